"""What the ranks of test_exactness do, and the same in one process that holds all the data.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from knapformer.losses import token_mean
from knapformer.models import (
    NAMED_CONFIGS,
    FluxBatch,
    FluxConfig,
    TransformerBatch,
    build_model,
    init_weights,
    set_checkpointing,
    shard_model,
)
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from knapformer import Cluster, SequenceBalancer

GAMMA = 0.7
# An exchange costs a few percent of a token's work at these widths: plans share short sequences, but not all of them.
CLUSTER = Cluster(flops_per_s=1e9, node_bytes_per_s=2e8, network_bytes_per_s=2e8)

Samples = list[tuple[int, int]]  # (text tokens, image tokens) of each
Step = list[Samples]  # of each rank
# Loss of each step, gradients of all steps added up. Arrays: a tensor does not outlive the process that pickles it.
Outcome = tuple[list[float], dict[str, NDArray[np.float64]]]


@dataclass(frozen=True)
class Case:
    model: str
    topology: str | None
    checkpointing: bool
    steps: tuple[Step, ...]


def _draw(name: str, sample: tuple[int, int], key: int) -> dict[str, Tensor]:
    """A sample's tensors; a function of its place in the step alone."""
    generator = torch.Generator().manual_seed(key)
    config = NAMED_CONFIGS[name]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_text, num_image = sample
    if not isinstance(config, FluxConfig):
        tokens = num_text + num_image
        return {"x": normal(tokens, config.in_channels), "target": normal(tokens, config.out_channels)}
    return {
        "image": normal(num_image, config.in_channels),
        "image_ids": torch.randint(0, 20, (num_image, 3), generator=generator),
        "text": normal(num_text, config.text_channels),
        "text_ids": torch.randint(0, 5, (num_text, 3), generator=generator),
        "pooled": normal(1, config.pooled_channels),
        "timestep": normal(1),
        "guidance": normal(1),
        "target": normal(num_image, config.out_channels),
    }


def batch_of(name: str, step: Step, index: int, ranks: list[int]) -> tuple[FluxBatch | TransformerBatch, Tensor]:
    """The samples of some ranks, packed. `index`: of the step."""
    keyed = [(sample, 10_000 * index + 100 * rank + i) for rank in ranks for i, sample in enumerate(step[rank])]
    # One sample of no tokens carries shapes and dtypes where there is no sample.
    drawn = [_draw(name, sample, key) for sample, key in keyed]
    empty = {field: value[:0] for field, value in _draw(name, (0, 0), 0).items()}
    packed = {field: torch.cat([empty[field], *(d[field] for d in drawn)]) for field in empty}
    target = packed.pop("target")
    if "x" in packed:
        return TransformerBatch(packed["x"], [text + image for (text, image), _ in keyed]), target
    image_lens, text_lens = [image for (_, image), _ in keyed], [text for (text, _), _ in keyed]
    return FluxBatch(**packed, image_lens=image_lens, text_lens=text_lens), target


def run_alone(name: str, steps: tuple[Step, ...]) -> Outcome:
    """No ranks, no sharding, no balancer, no checkpoint: what every other run has to equal."""
    model = build_model(NAMED_CONFIGS[name], torch.float64)
    init_weights(model, seed=5)
    losses = []
    for index, step in enumerate(steps):
        batch, target = batch_of(name, step, index, list(range(len(step))))
        loss = (model(batch) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def run_on_ranks(case: Case) -> Outcome:
    """Collective. With FSDP2; the same outcome on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(NAMED_CONFIGS[case.model], torch.float64)
    init_weights(model, seed=5)
    set_checkpointing(model, case.checkpointing)
    shard_model(model, init_device_mesh("cpu", (world,)))
    balancer = None if case.topology is None else SequenceBalancer(case.topology, gamma=GAMMA, cluster=CLUSTER)
    losses = []
    for index, step in enumerate(case.steps):
        batch, target = batch_of(case.model, step, index, [rank])
        loss = token_mean((model(batch, balancer) - target).square().mean(-1))
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / world)
    grads = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, DTensor):
            grads[name] = parameter.grad.full_tensor().numpy()
    return losses, grads


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """Collective."""
    torch.set_num_threads(1)
    return [run_on_ranks(case) for case in cases]
