"""Fits the workload model's gamma to the machine before a simulation.

All ranks measure at the same time, since they share memory and caches in a run too; the times are averaged, so that
all ranks fit the same gamma.
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
    """In equal ratios up to the longest, over a range of at least _MIN_SPAN: over less, noise would decide gamma."""
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
    """Fits gamma to forward and backward of the model's blocks, at lengths_to_measure(seq_lens), in tokens.

    Collective over the world; returns the same on every rank. Raises StateError where the times contradict the model.
    """
    lengths = lengths_to_measure(seq_lens)
    times = time_works(block_works(config, device, dtype, checkpointing, mode), lengths, device, _NUM_ROUNDS)
    best = torch.tensor(times.per_block(min))
    dist.all_reduce(best)
    return fit_workload(lengths, (best / dist.get_world_size()).tolist(), config.d_model, config.mask)
