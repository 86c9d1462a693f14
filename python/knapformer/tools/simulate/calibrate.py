"""Fits the workload model's gamma to the machine before a simulation.

Every rank measures at the same time, as in a run, where they share memory and caches; the times are averaged, so that
all fit the same gamma.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from knapformer import WorkloadFit, fit_workload
from knapformer.models.config import BaseConfig
from knapformer.tools.measure.blocks import block_works, time_works
from knapformer.tools.measure.figures import equal_ratios

_NUM_LENGTHS = 5
_MIN_SPAN = 16  # longest over shortest
_NUM_ROUNDS = 5


def lengths_to_measure(seq_lens: Sequence[int]) -> list[int]:
    """In equal ratios up to the longest, from the shortest or lower: over a narrow range noise would decide gamma."""
    high = max(_MIN_SPAN * 16, max(seq_lens))
    low = min(max(16, min(seq_lens)), high // _MIN_SPAN)
    return equal_ratios(low, high, _NUM_LENGTHS)


def fit_blocks(
    config: BaseConfig,
    seq_lens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    mode: str = "training",
) -> WorkloadFit:
    """Forward and backward of the model's blocks, at lengths between those of `seq_lens` (tokens).

    Collective over the world; returns the same on every rank. Raises StateError where the times contradict the model.
    """
    lengths = lengths_to_measure(seq_lens)
    times = time_works(block_works(config, device, dtype, checkpointing, mode), lengths, device, _NUM_ROUNDS)
    best = torch.tensor(times.per_block(min))
    dist.all_reduce(best)
    return fit_workload(lengths, (best / dist.get_world_size()).tolist(), config.d_model, config.mask)
