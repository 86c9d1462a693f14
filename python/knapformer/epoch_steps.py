"""Which samples an epoch's optimizer steps have, and their plans: every rank makes the same by itself. Needs torch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from knapformer._core import ArgumentError, Plan
from knapformer.argument_checks import described, extremes
from knapformer.cost import Cost
from knapformer.planning import plan

_STEPS_KEPT = 8  # plans that are kept: a DataLoader's workers fetch ahead of the step that a trainer asks for


@dataclass(frozen=True)
class EpochOrder:
    """The order in which an epoch goes through the samples."""

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


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Samples and plan of each step. lengths, work, masks, topology, drop_last, allow_empty, max_tokens_per_rank: as
    BalancedBatchSampler takes them. num_samples: of an epoch; step_size: of a step, of all ranks."""

    lengths: Tensor
    work: Tensor | None
    masks: list[str] | None
    topology: str
    cost: Cost
    num_ranks: int
    micro_batches: int
    num_samples: int
    step_size: int
    drop_last: bool
    allow_empty: bool
    max_tokens_per_rank: int

    def num_steps(self, first: int) -> int:
        """Of a pass that begins at this position of an epoch."""
        left = self.num_samples - first
        return left // self.step_size if self.drop_last else -(-left // self.step_size)

    def check_last_step(self, first: int) -> None:
        """Raises ArgumentError where it has too few samples, in a pass that begins at this position."""
        num_lists = self.num_ranks * self.micro_batches
        left = (self.num_samples - first) % self.step_size
        if 0 < left < num_lists and not (self.drop_last or self.allow_empty):
            raise ArgumentError(
                f"lengths: got {self.num_samples} samples, of which {left} are left for the last step; expected at "
                f"least {num_lists}, one for each rank and micro-batch, or drop_last=True, or allow_empty=True"
            )

    def checked(self, weights: Tensor | None, repeats: Tensor | None) -> Plan:
        """Refuses what is wrong for any samples, and a longest sample that no step can hold. The plan of no samples."""
        limit = self.max_tokens_per_rank
        none: list[list[Any]] = [[]] * self.num_ranks
        planned = self._plan(none, none)
        lengths, drawn = self.lengths, repeats if weights is None else weights
        if limit > 0 and drawn is not None:
            lengths = lengths[drawn > 0]
        if limit == 0 or len(lengths) == 0:
            return planned
        longest = extremes(lengths)[1]
        try:
            self._plan([[longest], *none[1:]], [[1.0], *none[1:]])
        except ArgumentError as error:
            sharing = -(-longest // limit)
            remedy = f"; {sharing} ranks could share it: give a topology with bags of so many"
            raise ArgumentError(
                f"{error}, which has {longest} tokens{remedy if sharing <= self.num_ranks else ''}"
            ) from None
        return planned

    def plan_of(self, samples: Tensor, step: int) -> Plan:
        """The plan of a step, whose ids count up through these samples. Where no list may be empty, that is checked on
        all ranks, so that none of them waits for one that has nothing to collate."""
        work = [] if self.work is None else self._by_rank(self.work[samples])
        masks: str | list[list[str]] = "full"
        if self.masks is not None:
            masks = [[self.masks[sample] for sample in of_rank] for of_rank in self._by_rank(samples)]
        planned = self._plan(self._by_rank(self.lengths[samples]), work, masks)
        if self.allow_empty:
            return planned
        planned = planned.fill_ranks()
        for micro_batch, of_micro_batch in enumerate(planned.plans):
            held = of_micro_batch.sequences_on
            if [] in held:
                raise ArgumentError(
                    f"topology: got {self.topology}, by which rank {held.index([])} has no sample in micro-batch "
                    f"{micro_batch} of step {step}; expected allow_empty=True, or bags of one size without a limit"
                )
        return planned

    def _plan(self, lengths: list[list[Any]], work: list[list[Any]], masks: str | list[list[str]] = "full") -> Plan:
        return plan(
            lengths, self.topology, self.cost, micro_batches=self.micro_batches,
            max_tokens_per_rank=self.max_tokens_per_rank, masks=None if self.masks is None else masks,
            work=None if self.work is None else work,
        )  # fmt: skip

    def _by_rank(self, values: Tensor) -> list[list[Any]]:
        """Values of a step's samples, as a list for each rank: as even as possible, the longer lists first."""
        return [of_rank.tolist() for of_rank in values.tensor_split(self.num_ranks)]


class EpochPass:
    """The steps of an epoch, from a position in its order on: their samples and plans, made when they are asked for."""

    def __init__(self, order: EpochOrder, steps: EpochSteps, epoch: int, first: int) -> None:
        self.epoch, self.first = epoch, first
        self._order, self._steps = order, steps
        self._planned: OrderedDict[int, tuple[Tensor, Plan]] = OrderedDict()  # of the last steps

    @property
    def num_steps(self) -> int:
        return self._steps.num_steps(self.first)

    @cached_property
    def _epoch_samples(self) -> Tensor:
        return self._order.of(self.epoch)

    def samples(self, step: int) -> Tensor:
        """A step's samples: first those that a DistributedSampler gives to rank 0, then those of rank 1, and so on."""
        first = self.first + step * self._steps.step_size
        samples = self._epoch_samples[first : min(first + self._steps.step_size, self._steps.num_samples)]
        dealt = torch.nn.functional.pad(samples, (0, -len(samples) % self._steps.num_ranks), value=-1)
        dealt = dealt.view(-1, self._steps.num_ranks).T.flatten()
        return dealt[dealt >= 0]

    def planned(self, step: int) -> tuple[Tensor, Plan]:
        """The step's samples, in the order of the plan's ids, and its plan."""
        if step in self._planned:
            self._planned.move_to_end(step)
            return self._planned[step]
        samples = self.samples(step)
        self._planned[step] = samples, self._steps.plan_of(samples, step)
        if len(self._planned) > _STEPS_KEPT:
            self._planned.popitem(last=False)
        return self._planned[step]

    def chunks(self, step: int, micro_batch: int, rank: int) -> list[tuple[int, int, int]]:
        """(index, begin, end) of each sample of which the rank computes the tokens [begin, end)."""
        samples, planned = self.planned(step)
        return [(int(samples[i]), begin, end) for i, begin, end in planned.chunks_on(rank, micro_batch)]
