"""The samples of a simulated step: what each rank draws, and what it computes in each micro-batch. Imports no torch.

A sample's tensors follow from its own seed. So they are the same on every rank and in every micro-batch that may
compute the sample, as with a data set.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from knapformer import Sample, StepPlan, WorkloadModel
from knapformer.models.config import BaseConfig


@dataclass(frozen=True)
class SeededSample:
    size: Sample
    seed: int  # of its tensors


@dataclass(frozen=True)
class StepData:
    """The samples of an optimizer step, by rank and micro-batch: [rank][micro-batch][sample]."""

    config: BaseConfig
    samples: list[list[list[SeededSample]]]

    def seq_lens(self, micro_batch: int) -> list[list[int]]:
        """The lengths of each rank in a micro-batch, in tokens."""
        return [self._lens(of_rank[micro_batch]) for of_rank in self.samples]

    def seq_lens_of_step(self) -> list[list[int]]:
        """The lengths of each rank, its micro-batches one after another."""
        return [[length for samples in of_rank for length in self._lens(samples)] for of_rank in self.samples]

    def max_tokens(self) -> int:
        """Tokens of the fullest rank in any micro-batch."""
        return max(sum(self._lens(samples)) for of_rank in self.samples for samples in of_rank)

    def as_planned(self, plan: StepPlan) -> StepData:
        """The same samples, each in the place where `plan`, made from seq_lens_of_step(), computes it."""
        step = [sample for of_rank in self.samples for samples in of_rank for sample in samples]
        return StepData(
            self.config,
            [
                [[step[i] for i in plan.sequences_on(rank, k)] for k in range(plan.num_micro_batches)]
                for rank in range(len(self.samples))
            ],
        )

    def of_equal_lengths(self, workload: WorkloadModel) -> StepData:
        """Other samples with as much work: as many on average, the same share of text, and lengths that differ by at
        most a token. Every rank has the same ones in every micro-batch."""
        config = self.config
        sizes = [sample.size for of_rank in self.samples for samples in of_rank for sample in samples]
        num_lists = sum(map(len, self.samples))

        def work(length: int) -> float:
            return workload.work(length, config.d_model, config.mask)

        lens = [config.planned_tokens(size) for size in sizes]
        text_per_token = sum(size.text_tokens for size in sizes) / sum(lens)
        count = max(1, round(len(sizes) / num_lists))
        equal = equal_lengths(math.fsum(map(work, lens)) / num_lists, count, work)
        text_tokens = [int(text_per_token * length) for length in equal]
        visual_tokens = equal if config.text_beside else [n - text for n, text in zip(equal, text_tokens, strict=True)]
        alike = [config.possible(Sample(*of)) for of in zip(text_tokens, visual_tokens, strict=True)]
        first_seed = self.samples[0][0][0].seed if self.samples[0][0] else 0
        return StepData(
            config,
            [[[SeededSample(size, first_seed + i) for i, size in enumerate(alike)] for _ in of] for of in self.samples],
        )

    def _lens(self, samples: list[SeededSample]) -> list[int]:
        return [self.config.planned_tokens(sample.size) for sample in samples]


def equal_lengths(total_work: float, count: int, work: Callable[[int], float]) -> list[int]:
    """`count` lengths, no two further apart than one token, whose work adds up to about `total_work`.

    work: of a length; it grows with the length.
    """
    low = max(1, bisect_right(range(1 << 24), total_work / count, key=work) - 1)
    missing = total_work - count * work(low)
    longer = min(count, max(0, round(missing / (work(low + 1) - work(low)))))
    return [low] * (count - longer) + [low + 1] * longer
