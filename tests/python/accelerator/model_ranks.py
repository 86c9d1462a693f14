"""Models on the simulated accelerator and on the CPU, for test_models_on_device."""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest import mock

import simulated_device as sim
import torch
import torch.nn.functional as F
from knapformer.adapters.named import build_model, config_from_dict, load_config, random_batch
from knapformer.attention import kernels
from knapformer.losses import sample_mean, token_mean
from knapformer.models import init_weights, set_checkpointing
from torch import Tensor

from knapformer import Sample, SequenceBalancer

SAMPLES = [
    [Sample(5, 60), Sample(3, 16)], [Sample(7, 100)], [], [Sample(0, 9), Sample(4, 21), Sample(2, 2)],
]  # fmt: skip


def _model_and_batch(name: str, rank: int, device: str, dtype: torch.dtype) -> tuple[Any, Any, Tensor, list[int], Any]:
    config = config_from_dict(QWEN) if name == "qwen" else load_config(name)
    model = build_model(config, dtype)
    init_weights(model)
    set_checkpointing(model)
    if device != "cpu" and hasattr(embedding := getattr(model, "transformer", None), "patch_embedding"):
        embedding.patch_embedding.forward = functools.partial(_product_over_patches, embedding.patch_embedding)
    sizes = [config.possible(size) for size in SAMPLES[rank]]
    seq_lens = [config.planned_tokens(size) for size in sizes]
    return model.to(device), *random_batch(config, sizes, rank, torch.device(device), dtype), seq_lens, config


def _product_over_patches(conv: torch.nn.Conv3d, video: Tensor) -> Tensor:
    """A convolution whose strides equal its kernel's size, as a product: the simulated device has no convolution."""
    for axis, size in enumerate(conv.kernel_size):
        video = video.unflatten(2 + axis, (-1, size)).movedim(3 + axis, -1)
    rows = video.movedim(1, -4).flatten(-4)  # (videos, *grid, numbers of a patch)
    return F.linear(rows, conv.weight.flatten(1), conv.bias).movedim(-1, 1)


def models_agree(
    rank: int, world: int, names: list[str], topology: str, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> dict[str, Any]:
    """By model: outputs, losses and gradients on either device, and what the steps on the device counted.

    Steps are checkpointed. They are counted from after the plan to the end of the backward pass. compiled: the blocks
    on the device are.
    """
    group = sim.new_group()
    balancer = SequenceBalancer(topology, group=group)
    results = {}
    for name in names:
        by_device = {}
        for device in ("cpu", "sim"):
            model, batch, target, seq_lens, config = _model_and_batch(name, rank, device, dtype)
            for block in itertools.chain(*model.block_lists()) if compiled and device == "sim" else ():
                block.compile(backend="aot_eager", dynamic=True)
            for step in range(2):  # the second is like every later one
                model.zero_grad()
                plan = balancer.plan_routing(seq_lens, config.d_model)
                with sim.counted() as counted:
                    out = model(batch, balancer, planned=True)
                    per_token = (out - target).square().mean(1)
                    loss = token_mean(per_token, group=group) + sample_mean(
                        per_token, [len(out)][: len(out)], group=group
                    )
                    loss.backward()
                assert plan.num_ranks == world
                by_device[device, step] = (
                    out.detach().cpu(), loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}, counted,
                )  # fmt: skip
        results[name] = by_device
    return results


QWEN = {
    "_class_name": "QwenImageTransformer2DModel", "in_channels": 8, "out_channels": 2, "num_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip


def numbers_of_the_host(rank: int, world: int, name: str) -> tuple[list[Tensor], list[Tensor], sim.Counted]:
    """Outputs of a model on the CPU and on the device, where time steps are numbers of Python, and masks are on the
    CPU; and what the second call on the device counted."""
    outputs = []
    for device in ("cpu", "sim"):
        model, batch, *_ = _model_and_batch(name, rank, device, torch.float32)
        for i, sample in enumerate(batch):
            numbers = {"timestep": 0.25 + i / 8, "guidance": 4.0}
            sample |= {key: number for key, number in numbers.items() if sample.get(key) is not None}
            if name == "qwen" and i == 0:  # the other sample has no mask
                kept = torch.arange(sample["encoder_hidden_states"].shape[1]) < 4
                sample["encoder_hidden_states_mask"] = kept.float().unsqueeze(0)
        with torch.no_grad():
            for _ in range(2):
                with sim.counted() as counted:
                    out = model.transformer(batch)
        outputs.append([prediction.cpu() for prediction in out])
    return outputs[0], outputs[1], counted


def waits_for_numbers_of_the_device(rank: int, world: int, name: str) -> list[str]:
    """Where the host waits in the second call with time steps and masks on the device."""
    sim.register()
    model, batch, *_ = _model_and_batch(name, rank, "sim", torch.float32)
    for i, sample in enumerate(batch):
        sample["timestep"] = torch.tensor([0.25 + i / 8], device="sim")
        if name == "qwen":
            kept = torch.arange(sample["encoder_hidden_states"].shape[1]) < 4
            sample["encoder_hidden_states_mask"] = kept.float().unsqueeze(0).to("sim")
    assert len(batch) > 1
    with torch.no_grad():
        for _ in range(2):  # the first one copies tables of positions
            with sim.counted() as counted:
                model.transformer(batch)
    return counted.syncs


class VarlenKernel:
    """Stands in for torch's variable-length attention on the device: matrix products that never make the host wait."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *lens: int) -> Tensor:
        self.num_calls += 1
        of_q, of_k = (
            torch.bucketize(torch.arange(len(rows), device=rows.device), ends[1:], right=True)
            for rows, ends in ((q, ends_q), (k, ends_k))
        )
        scores = torch.einsum("ihd,jhd->hij", q, k).float() * q.shape[2] ** -0.5
        weights = scores.masked_fill(of_q[:, None] != of_k, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v)


def a_model_with_the_kernel_agrees(rank: int, world: int, name: str, topology: str) -> tuple[dict[Any, Any], int]:
    """The results of models_agree for a model in bfloat16, and how often the kernel was called. When the first block
    runs, it is not known yet whether the device has the kernel."""
    with mock.patch.object(kernels, "varlen_attn", VarlenKernel()) as kernel:
        return models_agree(rank, world, [name], topology, dtype=torch.bfloat16)[name], kernel.num_calls
