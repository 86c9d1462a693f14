"""Measures a model's blocks at several sequence lengths and fits the workload model's gamma to the machine.

Every rank measures at the same time, as in a run, where they share memory and caches; the times are averaged, so that
all fit the same gamma.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer import WorkloadFit, fit_workload
from knapformer.models.config import FluxConfig, ModelConfig
from knapformer.models.flux import FluxTransformer
from knapformer.models.parallel import Model, build_model, init_weights, set_checkpointing
from knapformer.models.step import PackedStep
from knapformer.simulator.batches import grid_ids

_NUM_LENGTHS = 5
_MIN_SPAN = 16  # longest over shortest
_MIN_TOKENS_PER_RUN = 1024  # short sequences are measured several at a time, packed, as they run
_REPEATS = 5


def lengths_to_measure(seq_lens: Sequence[int]) -> list[int]:
    """In equal ratios up to the longest, from the shortest or lower: over a narrow range noise would decide gamma."""
    high = max(_MIN_SPAN * 16, max(seq_lens))
    low = min(max(16, min(seq_lens)), high // _MIN_SPAN)
    return [round(low * (high / low) ** (i / (_NUM_LENGTHS - 1))) for i in range(_NUM_LENGTHS)]


def plausible(fit: WorkloadFit) -> bool:
    """Whether a fitted gamma may decide plans.

    Attention's FLOPs cost some factor of those of matrix products, but not a hundred: what is far off was measured on a
    disturbed machine.
    """
    return 0.1 <= fit.gamma <= 10.0


def fit_blocks(
    config: ModelConfig,
    seq_lens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    group: dist.ProcessGroup | None = None,
) -> WorkloadFit:
    """Forward and backward of one block of each kind, at lengths between those of `seq_lens` (tokens).

    Collective over `group`; returns the same on every rank. The fitted seconds_per_flop is of the blocks measured.
    Raises StateError where the times contradict the model.
    """
    one_of_each = (
        dataclasses.replace(
            config,
            num_double_blocks=min(1, config.num_double_blocks),
            num_single_blocks=min(1, config.num_single_blocks),
        )
        if isinstance(config, FluxConfig)
        else dataclasses.replace(config, num_blocks=1)
    )
    lengths = lengths_to_measure(seq_lens)
    model = build_model(one_of_each, dtype, device)
    init_weights(model)
    set_checkpointing(model, checkpointing)
    runs = [_packed_run(model, length, max(1, _MIN_TOKENS_PER_RUN // length), device, dtype) for length in lengths]
    # Rounds over all lengths, so that a disturbance hits one round and not one length; the best time counts.
    rounds = [[_seconds(run, device) for run, _ in runs] for _ in range(1 + _REPEATS)][1:]
    best = torch.tensor([min(times) / count for times, (_, count) in zip(zip(*rounds, strict=True), runs, strict=True)])
    dist.all_reduce(best, group=group)
    latencies_s = (best / dist.get_world_size(group)).tolist()
    return fit_workload(lengths, latencies_s, config.d_model)


def _packed_run(
    model: Model, length: int, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], int]:
    """A forward and backward pass of the blocks over `count` sequences of `length` tokens, and `count`."""
    config = model.config
    step = PackedStep([length] * count, config.d_model, causal=getattr(config, "causal", False))
    x = torch.randn(length * count, config.d_model, device=device, dtype=dtype, requires_grad=True)
    ids = grid_ids([length] * count).to(device)
    if isinstance(model, FluxTransformer):
        # A tenth is text: both halves of a double block run, without one of them deciding the time.
        is_text = (torch.arange(length * count, device=device) % length) < length // 10
        cond = torch.randn(count, config.d_model, device=device, dtype=dtype, requires_grad=True)
        inputs: tuple[Tensor, ...] = (ids, is_text, cond)
    else:
        inputs = (ids[:, 1:2],)

    def run() -> None:
        model.run_blocks(step, x, *inputs).sum().backward()

    return run, count


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
