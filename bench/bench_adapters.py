"""Compares packed calls of a diffusers model with its own calls: cost on samples of one size, gain on padded captions.

    PYTHONPATH=python python bench/bench_adapters.py [--device cuda] [--json FILE] [--rounds 7] [--d-model 512]

Each round runs both calls, forward and backward, one after the other on the same model. A ratio is the median of the
rounds' ratios, so that a drift of the machine's speed affects both calls alike. On the CPU times are processor seconds
of one thread, which other processes on the machine change little; models are narrow there. On CUDA both calls take
flash attention: in diffusers' own call, cuDNN's, which torch 2.11 chooses on an H200, ends in an illegal memory access
in the backward pass. What is compared, for FLUX and Wan:

equal    four samples of one size: diffusers' own call with a batch of four
captions four samples of one size, captions of 20 to 512 tokens: diffusers' own call with captions padded to 512
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from driver import parser_of, write_results
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import knapformer

CAPTIONS = (20, 77, 200, 512)
GOALS = {"equal": 1.05, "captions": 1.0}  # at most so many of diffusers' seconds


def flux(d_model: int, head_dim: int) -> Any:
    axes = (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16)
    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=head_dim,
        num_attention_heads=d_model // head_dim, joint_attention_dim=768, pooled_projection_dim=768,
        guidance_embeds=True, axes_dims_rope=axes,
    )  # fmt: skip


def flux_sample(num_text: int, side: int) -> dict[str, Tensor]:
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    ids = torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float()
    return {
        "hidden_states": torch.randn(1, side * side, 64), "encoder_hidden_states": torch.randn(1, num_text, 768),
        "pooled_projections": torch.randn(1, 768), "timestep": torch.rand(1), "guidance": torch.ones(1),
        "img_ids": ids, "txt_ids": torch.zeros(num_text, 3),
    }  # fmt: skip


def wan(d_model: int, head_dim: int) -> Any:
    return WanTransformer3DModel(
        num_layers=2, attention_head_dim=head_dim, num_attention_heads=d_model // head_dim, ffn_dim=4 * d_model,
        text_dim=768,
    )  # fmt: skip


def wan_sample(num_text: int, side: int) -> dict[str, Tensor]:
    """A clip of as many tokens: patches are of 1 x 2 x 2."""
    return {
        "hidden_states": torch.randn(1, 16, 4, side, side), "timestep": torch.randint(1000, (1,)),
        "encoder_hidden_states": torch.randn(1, num_text, 768),
    }  # fmt: skip


SHARED = ("img_ids", "txt_ids")  # without a dimension of samples


def padded(samples: list[dict[str, Tensor]], num_text: int) -> dict[str, Tensor]:
    """One batch, captions filled with zeros."""
    batch = {name: samples[0][name] for name in SHARED if name in samples[0]}
    if "txt_ids" in batch:
        batch["txt_ids"] = batch["txt_ids"].new_zeros(num_text, 3)
    for name in samples[0].keys() - batch.keys():
        rows = [sample[name] for sample in samples]
        if name == "encoder_hidden_states":
            rows = [torch.nn.functional.pad(text, (0, 0, 0, num_text - text.shape[1])) for text in rows]
        batch[name] = torch.cat(rows)
    return batch


def seconds(compute: Callable[[], Tensor], device: str) -> float:
    if device == "cpu":
        begin = time.process_time()
        compute().backward()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    compute().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def compare(model: Any, samples: list[dict[str, Tensor]], num_text: int, arguments: Any) -> dict[str, float]:
    batch, device = padded(samples, num_text), arguments.device
    ways: dict[str, Callable[[], Tensor]] = {
        "packed": lambda: sum((p.square().mean() for p in model(samples)), torch.zeros((), device=device)),
        "diffusers": lambda: model(**batch).sample.square().mean(),
    }
    for way in ways.values():
        seconds(way, device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name in sorted(ways, reverse=number % 2 == 0):  # each goes first in every second round
            taken[name].append(seconds(ways[name], device))
            model.zero_grad()
    ratios = [a / b for a, b in zip(taken["packed"], taken["diffusers"], strict=True)]
    texts = [sample["encoder_hidden_states"].shape[1] for sample in samples]
    num_visual = arguments.side**2 * len(samples)
    return {
        "packed_s": statistics.median(taken["packed"]),
        "diffusers_s": statistics.median(taken["diffusers"]),
        "ratio": statistics.median(ratios),
        "tokens_ratio": (num_visual + sum(texts)) / (num_visual + len(samples) * num_text),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--d-model", type=int, help="default 512 on the CPU, FLUX's 3072 on CUDA")
    parser.add_argument("--side", type=int, help="a sample has side * side visual tokens; default 16 or 64")
    arguments = parser.parse_args()
    is_cpu = arguments.device == "cpu"
    arguments.side = arguments.side or (16 if is_cpu else 64)
    d_model, head_dim = arguments.d_model or (512 if is_cpu else 3072), 64 if is_cpu else 128
    dtype = torch.float32 if is_cpu else torch.bfloat16
    if is_cpu:
        torch.set_num_threads(1)
    torch.manual_seed(0)

    def on_device(name: str, tensor: Tensor) -> Tensor:
        is_position = name.endswith("ids") or not tensor.is_floating_point()
        return tensor.to(arguments.device, None if is_position else dtype)

    comparisons = {}
    for model_name, make, make_sample in (("flux", flux, flux_sample), ("wan", wan, wan_sample)):
        model = knapformer.balance(make(d_model, head_dim).to(arguments.device, dtype))
        for case, captions in (("equal", (128,) * 4), ("captions", CAPTIONS)):
            drawn = [make_sample(num_text, arguments.side) for num_text in captions]
            samples = [{name: on_device(name, tensor) for name, tensor in sample.items()} for sample in drawn]
            figures = compare(model, samples, max(captions), arguments) | {"goal": GOALS[case]}
            comparisons[f"{model_name} {case}"] = figures
            print(model_name, case, {key: round(value, 3) for key, value in figures.items()})
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        write_results(arguments.json, "adapters", options | {"captions": CAPTIONS}, comparisons=comparisons)


if __name__ == "__main__":
    main()
