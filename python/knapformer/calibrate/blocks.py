"""Times of a model's blocks over a range of lengths. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from knapformer.measure.blocks import BlockKind, build_kinds
from knapformer.measure.timing import Work, measured_rounds, relative_spread
from knapformer.models.config import ModelConfig
from knapformer.models.step import PackedStep

# Short sequences are measured several at a time, packed, as they run.
_TOKENS_PER_RUN = {"cpu": 1024, "cuda": 8192}
# Of each sequence: both halves of a double-stream block run, without one of them deciding the time.
_TEXT_SHARE = 0.1


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of forward, recompute and backward over one sequence, [kind][length][round]."""

    kinds: list[tuple[str, int]]  # name, and how many blocks of it the model has
    lengths: list[int]
    seconds: list[list[list[float]]]

    def per_block(self, of: Callable[[Sequence[float]], float] = statistics.median) -> list[float]:
        """For each length the mean over the model's blocks, from `of` the rounds of each kind."""
        num_blocks = sum(count for _, count in self.kinds)
        return [
            sum(count * of(times) for (_, count), times in zip(self.kinds, column, strict=True)) / num_blocks
            for column in zip(*self.seconds, strict=True)
        ]

    def spreads(self) -> list[float]:
        """For each length the relative spread of its rounds, of the kind where that is largest."""
        return [max(relative_spread(times) for times in column) for column in zip(*self.seconds, strict=True)]


def time_blocks(
    config: ModelConfig,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    num_rounds: int,
    num_warmup_rounds: int = 1,
    on_done: Callable[[], None] = lambda: None,
) -> BlockTimes:
    """on_done is called after each of kinds x lengths x rounds measurements."""
    kinds = build_kinds(config, dtype, device, checkpointing)
    causal = getattr(config, "causal", False)
    counts = [max(1, _TOKENS_PER_RUN[device.type] // length) for length in lengths]
    steps = [PackedStep([n] * count, config.d_model, causal=causal) for n, count in zip(lengths, counts, strict=True)]

    def prepared(kind: BlockKind, step: PackedStep) -> Callable[[], Work]:
        return lambda: kind.work(step, [int(n * _TEXT_SHARE) for n in step.chunk_lens])

    prepare = [prepared(kind, step) for kind in kinds for step in steps]
    rounds = measured_rounds(prepare, device, num_rounds, num_warmup_rounds, on_done)
    per_sequence = [[s / counts[i % len(counts)] for s in times] for i, times in enumerate(rounds)]
    return BlockTimes(
        [(kind.name, kind.count) for kind in kinds],
        list(lengths),
        [per_sequence[i : i + len(counts)] for i in range(0, len(per_sequence), len(counts))],
    )
