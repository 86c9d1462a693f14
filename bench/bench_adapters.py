"""Compares packed calls of a diffusers model with its own calls: cost on samples of one size, gain on padded captions.

    PYTHONPATH=python python bench/bench_adapters.py [--json FILE] [--rounds 7] [--d-model 512]

Each round runs both calls, forward and backward, one after the other on the same model. A ratio is the median of the
rounds' ratios, so that a drift of the machine's speed affects both calls alike. Times are processor seconds of one
thread, which other processes on the machine change little. What is compared:

equal    four samples of one size: diffusers' own call with a batch of four
captions four pictures of one size, captions of 20 to 512 tokens: diffusers' own call with captions padded to 512
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from driver import parser_of, write_results
from torch import Tensor

import knapformer

SIDE, CAPTIONS = 16, (20, 77, 200, 512)


def model_of(d_model: int) -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=d_model // 64,
        joint_attention_dim=768, pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(8, 28, 28),
    )  # fmt: skip


def samples_of(text_lens: tuple[int, ...]) -> list[dict[str, Tensor]]:
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    ids = torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float()
    return [
        {
            "hidden_states": torch.randn(1, SIDE * SIDE, 64), "encoder_hidden_states": torch.randn(1, num_text, 768),
            "pooled_projections": torch.randn(1, 768), "timestep": torch.rand(1), "guidance": torch.ones(1),
            "img_ids": ids, "txt_ids": torch.zeros(num_text, 3),
        }
        for num_text in text_lens
    ]  # fmt: skip


def padded(samples: list[dict[str, Tensor]], num_text: int) -> dict[str, Tensor]:
    """One batch, captions filled with zeros."""
    batch = {name: torch.cat([s[name] for s in samples]) for name in ("hidden_states", "pooled_projections")}
    batch |= {name: torch.cat([s[name] for s in samples]) for name in ("timestep", "guidance")}
    texts = [s["encoder_hidden_states"] for s in samples]
    fill = [torch.nn.functional.pad(text, (0, 0, 0, num_text - text.shape[1])) for text in texts]
    return {
        **batch, "encoder_hidden_states": torch.cat(fill), "img_ids": samples[0]["img_ids"],
        "txt_ids": torch.zeros(num_text, 3),
    }  # fmt: skip


def seconds(compute: Callable[[], Tensor]) -> float:
    begin = time.process_time()
    compute().backward()
    return time.process_time() - begin


def compare(model: Any, samples: list[dict[str, Tensor]], num_text: int, rounds: int) -> dict[str, float]:
    batch = padded(samples, num_text)
    ways: dict[str, Callable[[], Tensor]] = {
        "packed": lambda: sum((p.square().mean() for p in model(samples)), torch.zeros(())),
        "diffusers": lambda: model(**batch).sample.square().mean(),
    }
    for way in ways.values():
        seconds(way)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 0):  # each goes first in every second round
            taken[name].append(seconds(ways[name]))
            model.zero_grad()
    ratios = [a / b for a, b in zip(taken["packed"], taken["diffusers"], strict=True)]
    tokens = sum(SIDE * SIDE + sample["encoder_hidden_states"].shape[1] for sample in samples)
    return {
        "packed_s": statistics.median(taken["packed"]),
        "diffusers_s": statistics.median(taken["diffusers"]),
        "ratio": statistics.median(ratios),
        "tokens_ratio": tokens / (len(samples) * (SIDE * SIDE + num_text)),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--d-model", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = knapformer.balance(model_of(arguments.d_model))
    results = {
        "equal": compare(model, samples_of((128,) * 4), 128, arguments.rounds),
        "captions": compare(model, samples_of(CAPTIONS), max(CAPTIONS), arguments.rounds),
    }
    for name, figures in results.items():
        print(name, {key: round(value, 3) for key, value in figures.items()})
    if arguments.json:
        configuration = {"rounds": arguments.rounds, "d_model": arguments.d_model, "captions": CAPTIONS}
        write_results(arguments.json, "adapters", configuration, **results)


if __name__ == "__main__":
    main()
