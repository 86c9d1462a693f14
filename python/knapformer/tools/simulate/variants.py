"""What a simulation computes in each step, in each of its variants: samples and plans. Imports no torch.

A sample's tensors follow from its own seed. So they are the same on every rank and in every micro-batch that may
compute the sample, as with a data set. Buckets and the time budget choose their samples with the code that
`knapformer doctor` predicts with; static sequence parallelism is planned as there.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from knapformer import ArgumentError, DataMix, Plan, Sample
from knapformer.adapters.named import ModelConfig
from knapformer.tools.baselines import Alternative, baselines
from knapformer.tools.rank_lengths import Lengths
from knapformer.tools.ways import (
    NO_BALANCER,
    PLANNED_STEP,
    DrawnSteps,
    OptimizerStep,
    PlanCost,
    by_micro_batch,
    planned_whole,
)


@dataclass(frozen=True)
class SeededSample:
    size: Sample
    seed: int  # of its tensors
    tokens: int  # that are planned


StepData = list[list[list[SeededSample]]]  # of an optimizer step: [rank][micro-batch][sample]


def batches_of(data: StepData) -> list[Lengths]:
    """[micro-batch][rank]: lengths in tokens."""
    lens = [[[sample.tokens for sample in samples] for samples in of_rank] for of_rank in data]
    return [list(batch) for batch in zip(*lens, strict=True)]


def as_planned(data: StepData, plan: Plan) -> StepData:
    """The same samples, each in the place where `plan`, made from their lengths, computes it."""
    step = [sample for of_rank in data for samples in of_rank for sample in samples]
    parts = range(plan.num_micro_batches)
    return [[[step[i] for i, _, _ in plan.chunks_on(rank, k)] for k in parts] for rank in range(len(data))]


@dataclass(frozen=True)
class VariantStep:
    """What a variant gives the ranks to compute in a step, before a balancer in the model moves any of it.

    step: the plan of each micro-batch, as the ranks make it: equal input gives equal plans. followed: the balancer
    follows these plans, and makes none. same_samples: whether it computes the drawn samples.
    """

    data: StepData
    step: OptimizerStep
    followed: bool = False
    same_samples: bool = True


@dataclass(frozen=True)
class Simulation:
    """The command's options, and what is made of them: samples are drawn from the mix, or from lengths at random.
    Construction checks that they fit together; its ArgumentError names what does not."""

    args: argparse.Namespace
    model: ModelConfig
    planning: PlanCost
    num_ranks: int
    mix: DataMix | None
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        args = self.args
        if not args.topology and args.micro_batches is None and not args.way:
            raise ArgumentError("--topology: got none, expected at least one, --micro-batches, or a --way")
        if others := set(args.way) - {of.key for of in baselines(self.num_ranks)}:
            raise ArgumentError(f"--way: got {others.pop()!r}, expected one that {self.num_ranks} ranks allow")
        # Some errors show only in planning, such as a solver that does not support nested bags. A limit of tokens may
        # be kept in one step and not in another.
        for _ in itertools.islice(self.variants(), None if args.max_tokens_per_rank else 1):
            pass

    @property
    def limit(self) -> int:
        """Of tokens of a rank in a micro-batch planned by itself."""
        return self.args.max_tokens_per_rank if self.args.micro_batches is None else 0

    def draw(self, step: int) -> StepData:
        """What the ranks draw in an optimizer step: in each micro-batch the next batch of the mix."""

        def batch(rank: int, number: int) -> list[Sample]:
            if self.mix is not None:
                return self.mix.draw(self.args.seed, number, rank)
            drawn = random.Random(f"{self.args.seed} {number} {rank}").choices(self.lengths, k=self.args.batch_size)
            return list(map(self._sample_of, drawn))

        count = self.args.micro_batches or 1
        batches = range(step * count, (step + 1) * count)
        return self._seeded(step, [[batch(rank, k) for k in batches] for rank in range(self.num_ranks)])

    def _sample_of(self, length: int) -> Sample:
        """Of which a share is text tokens."""
        return self.model.sample_of(length, self.model.text_tokens(length))

    def _seeded(self, step: int, sizes: list[list[list[Sample]]]) -> StepData:
        """Gives each sample the seed of its tensors. sizes: [rank][micro-batch][sample]."""
        seeds = itertools.count((self.args.seed * 1_000_003 + step) * 65_537)

        def seeded(size: Sample) -> SeededSample:
            possible = self.model.possible(size)
            return SeededSample(possible, next(seeds) % (1 << 63), self.model.planned_tokens(possible))

        return [[list(map(seeded, of)) for of in of_rank] for of_rank in sizes]

    def variants(self) -> Iterator[dict[str, VariantStep]]:
        """Of each step, warm-up ones first, what each variant computes. The others are compared with the first."""
        args = self.args
        drawn = [self.draw(step) for step in range(args.warmup + args.steps)]
        batches = list(map(batches_of, drawn))
        pool = self.lengths or [n for step in batches for batch in step for lens in batch for n in lens]
        draw = DrawnSteps(self.planning, batches, pool, args.seed, args.max_tokens_per_rank)

        def alone(data: StepData, own_share: float = 1.0, same_samples: bool = True) -> VariantStep:
            """Without a balancer."""
            plans = list(map(self.planning.home, batches_of(data)))
            return VariantStep(data, OptimizerStep(plans, own_share), same_samples=same_samples)

        def of_other(alternative: Alternative) -> Iterator[VariantStep]:
            for number, step in zip(range(len(drawn)), alternative.steps(draw), strict=False):
                if alternative.degree:
                    yield VariantStep(drawn[number], step, followed=True)
                else:
                    lens = zip(*(plan.chunk_lens for plan in step.plans), strict=True)
                    sizes = [[list(map(self._sample_of, of)) for of in of_rank] for of_rank in lens]
                    yield alone(self._seeded(number, sizes), step.own_share, same_samples=False)

        found: dict[str, Iterator[VariantStep]] = {NO_BALANCER: map(alone, drawn)}
        found |= {of.name: of_other(of) for of in baselines(self.num_ranks) if of.key in args.way}
        for topology in args.topology:
            found[topology] = map(VariantStep, drawn, by_micro_batch(draw, topology, self.limit))
        if args.micro_batches is not None:
            # As BalancedBatchSampler plans: whole samples, where possible at least one on every rank in every
            # micro-batch. A fixed time, which is the same in every plan, would hide how far a plan is from the best.
            cluster = self.planning.cluster.replace(fixed_s=0.0)
            unfixed = replace(draw, planning=replace(self.planning, cluster=cluster))
            planned = planned_whole(unfixed, f"g1n{self.num_ranks}", routed=False)
            found[PLANNED_STEP] = (
                alone(as_planned(data, step.plan.fill_ranks())) for data, step in zip(drawn, planned, strict=True)
            )
        for steps in zip(*found.values(), strict=False):
            yield dict(zip(found, steps, strict=True))
