"""The order in which an epoch goes through the samples. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from knapformer.sample_values import described


@dataclass(frozen=True)
class EpochOrder:
    """The same on all ranks."""

    num_samples: int  # of an epoch
    shuffle: bool
    seed: int
    repeats: Tensor | None  # how often each stands in an epoch
    weights: Tensor | None  # by which samples are drawn

    def of(self, epoch: int) -> Tensor:
        """The indices of an epoch's samples."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        if self.weights is not None:
            ends = self.weights.cumsum(0)
            # torch.multinomial takes at most 2^24 weights
            drawn = torch.rand(self.num_samples, dtype=torch.float64, generator=generator) * ends[-1:]
            return torch.searchsorted(ends, drawn, right=True)
        count = self.num_samples
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        return order if self.repeats is None else torch.repeat_interleave(self.repeats)[order]

    @cached_property
    def state(self) -> dict[str, int]:
        """What the order depends on, beside the epoch."""
        drawn = self.repeats if self.weights is None else self.weights
        return {
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "num_samples": self.num_samples,
            "repeats_and_weights": 0 if drawn is None else int(described(drawn).split()[-1], 16),
        }
