"""The usual ways to train on sequences of different lengths, and this project's, simulated on the same samples.

One cost model prices them all (docs/cluster_model.md); ranks wait for each other in every micro-batch, as under FSDP2.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from knapformer import ArgumentError, Topology, TopologyOption, attention_pairs, rank_topologies
from knapformer._core import plan_home_bags
from knapformer.tools.rank_lengths import Lengths, MaskedLength, lengths_of_step, micro_batches_of_step
from knapformer.tools.ways import DrawnSteps, OptimizerStep, Way, at_home, planned_whole

_MAX_BUCKETS = 32
# Of topologies: a larger sample changes their order by less than the predictions' error.
_MAX_STEPS, _MAX_BATCHES = 2, 4


@dataclass(frozen=True)
class Alternative:
    """name: in tables. advice: what is taken, where the name needs words. change: what the user has to do. effect: how
    it changes which samples a step has, '' for not at all. degree: how many ranks share a sequence at most, 0 for none.
    topology: of the balancer in the model."""

    key: str
    name: str
    steps: Way = field(repr=False)
    change: str = "nothing"
    effect: str = ""
    degree: int = 0
    topology: str = ""
    advice: str = ""


def one_by_one(draw: DrawnSteps) -> Iterator[OptimizerStep]:
    """Micro-batches of at most one sample a rank, as many as the rank with the most samples needs."""
    for batches in draw.batches:
        lengths = lengths_of_step(batches)
        single = micro_batches_of_step(lengths, max(1, *map(len, lengths)))
        yield OptimizerStep([draw.planning.home(batch) for batch in single])


def _bucket_tops(pool: Sequence[int]) -> list[int]:
    """The longest sample of each bucket, ascending: a bucket for each length where there are few lengths, else buckets
    whose upper bounds have equal ratios."""
    distinct = sorted(set(map(int, pool)))
    if len(distinct) <= _MAX_BUCKETS:
        return distinct
    low, high = distinct[0], distinct[-1]
    tops = [math.ceil(low * (high / low) ** ((i + 1) / _MAX_BUCKETS)) for i in range(_MAX_BUCKETS)]
    return sorted({distinct[bisect.bisect_right(distinct, min(top, high)) - 1] for top in tops})


def _padded(length: int, tokens: int) -> int:
    """A sample that is padded to so many tokens. Of a mask of its own the share of pairs stays."""
    if not isinstance(length, MaskedLength):
        return tokens
    return MaskedLength(tokens, f"density:{attention_pairs(length.mask, length) / length**2:.17f}")


def lockstep_buckets(draw: DrawnSteps) -> Iterator[OptimizerStep]:
    """In each micro-batch all ranks use one bucket, drawn in proportion to its samples and padded to its longest.

    Where memory is limited, batches of long buckets are smaller.
    """
    planning, pool = draw.planning, sorted(draw.pool)
    tops = _bucket_tops(pool)
    ends = [bisect.bisect_right(pool, top) for top in tops]
    rng = random.Random(draw.seed)
    # Systematic sampling: each bucket is drawn as often as its share of the samples says, in shuffled order. These
    # steps differ more than those of other alternatives, so more of them are simulated.
    num_steps = 8 * len(draw.batches)
    count = num_steps * draw.micro_batches
    start = rng.random()
    places = [int((i + start) * len(pool) / count) for i in range(count)]
    rng.shuffle(places)
    for _ in range(num_steps):
        plans, own = [], 0.0
        for _ in range(draw.micro_batches):
            bucket = bisect.bisect_right(ends, places.pop())
            first = ends[bucket - 1] if bucket else 0
            size = max(1, round(draw.batch_size))
            if draw.max_tokens_per_rank:
                size = max(1, min(size, draw.max_tokens_per_rank // tops[bucket]))
            lens = [[pool[rng.randrange(first, ends[bucket])] for _ in range(size)] for _ in range(draw.num_ranks)]
            plans.append(planning.home([[_padded(length, tops[bucket]) for length in of_rank] for of_rank in lens]))
            own += planning.home(lens).ideal_time
        yield OptimizerStep(plans, own_share=own / sum(plan.ideal_time for plan in plans))


def time_budget(draw: DrawnSteps) -> Iterator[OptimizerStep]:
    """Each rank fills its micro-batch from its own stream until its predicted seconds, or its memory, are full.

    The budget is the mean time of batch_size samples of the pool, and at least the time of its longest sample.
    """
    pool = draw.pool
    works = {length: draw.planning.work(length) for length in set(pool)}
    budget = max(draw.batch_size * sum(map(works.__getitem__, pool)) / len(pool), max(works.values()))
    streams = [random.Random(f"{draw.seed} {rank}") for rank in range(draw.num_ranks)]
    waiting = [stream.choice(pool) for stream in streams]

    def batch() -> Lengths:
        lens: Lengths = [[] for _ in streams]
        for rank, stream in enumerate(streams):
            left, room = budget, draw.max_tokens_per_rank or math.inf
            while not lens[rank] or (works[waiting[rank]] <= left and waiting[rank] <= room):
                lens[rank].append(waiting[rank])
                left -= works[waiting[rank]]
                room -= waiting[rank]
                waiting[rank] = stream.choice(pool)
        return lens

    for batches in draw.batches:
        yield OptimizerStep([draw.planning.home(batch()) for _ in batches])


def static_sharing(draw: DrawnSteps, degree: int, **cut: Any) -> Iterator[OptimizerStep]:
    """Sequence parallelism of one degree for all sequences: the ranks of a group share what they have drawn.

    cut: fields of the TrainedModel, by which heads and queries are cut. Default: heads alone.
    """

    topology = f"g{degree}n{draw.num_ranks // degree}"
    model = draw.planning.model.replace(**({"cuts_queries": False} | cut))
    for batches in draw.batches:
        plans = (draw.planning.plan(batch, topology, solver="greedy", model=model) for batch in batches)
        yield OptimizerStep([plan_home_bags(plan) for plan in plans])


def longest_first(draw: DrawnSteps) -> Iterator[OptimizerStep]:
    """Assigns each micro-batch's samples, the longest first, to the rank that has the least work."""
    for batches in draw.batches:
        topology = f"g1n{draw.num_ranks}"
        yield OptimizerStep([draw.planning.plan(batch, topology, solver="greedy", routed=False) for batch in batches])


def baselines(num_ranks: int) -> list[Alternative]:
    """The alternatives without this project that this number of ranks allows, the least change first."""
    one_head: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1}  # is cut into none: all ranks share queries
    rings: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("ring_8", "static ring 8", one_head),
        ("ulysses_ring_8", "Ulysses x ring 8", {}),
    )
    return [
        Alternative("as_drawn", "no balancing", at_home),
        Alternative("one_by_one", "one sample at a time", one_by_one, "batch size 1, and more accumulation"),
        Alternative(
            "buckets", "lockstep buckets", lockstep_buckets,
            "a bucketing sampler; samples are cropped or padded to their bucket's size",
            "a micro-batch sees one length, and a step as many as it has micro-batches",
        ),
        Alternative(
            "time_budget", "time budget", time_budget, "an iterable data set that packs by predicted seconds",
            "the number of samples in a step varies",
        ),
        Alternative("longest_first", "longest first", longest_first, "a sampler that knows the lengths"),
        *(
            Alternative(
                f"static_{degree}", f"sequence parallel {degree}", partial(static_sharing, degree=degree),
                "the model's attention, and the loader", degree=degree,
            )
            for degree in (2, 4, 8) if num_ranks % degree == 0
        ),
        *(
            Alternative(
                key, name, partial(static_sharing, degree=8, cuts_queries=True, **cut),
                "the model's attention, and the loader", degree=8,
            )
            for key, name, cut in rings if num_ranks % 8 == 0
        ),
    ]  # fmt: skip


def alternatives(draw: DrawnSteps, topologies: Sequence[str]) -> list[Alternative]:
    """The baselines that these ranks allow, then this project's; the least change first. topologies: of the balancer
    in the model."""
    sampler = partial(planned_whole, topology=f"g1n{draw.num_ranks}", routed=False)
    change = "the loader's batch sampler, and losses weighed with knapformer.losses"
    found = [*baselines(draw.num_ranks), Alternative("sampler", "BalancedBatchSampler", sampler, change)]
    for topology in topologies:
        largest = _largest_bag(topology)
        ranks, shared = f"1-{largest}", f"long samples shared by up to {largest} ranks"
        if "/" not in topology:
            ranks, shared = f"{largest}", f"every sample shared by {largest} ranks"
        found.append(
            Alternative(
                f"bags {topology}", f"balancer, {ranks} ranks", partial(planned_whole, topology=topology, routed=True),
                "calls in the model, and losses weighed with knapformer.losses", degree=largest, topology=topology,
                advice=f"the balancer in the model, with {shared}",
            )
        )  # fmt: skip
    return found


def ranked(draw: DrawnSteps) -> list[TopologyOption]:
    """Ranks topologies for micro-batches that are planned one by one, with tokens routed in the model."""
    of, drawn = draw.planning, itertools.chain.from_iterable(draw.batches[:_MAX_STEPS])
    batches = list(itertools.islice(drawn, _MAX_BATCHES))
    masks = [of.masks(batch) for batch in batches]
    return rank_topologies(
        batches, of, max_tokens_per_rank=draw.max_tokens_per_rank, masks=masks, model=of.model.replace(routed=True)
    )


def sharing(ranking: Sequence[TopologyOption], count: int = 2) -> list[str]:
    """The best `count` topologies in which ranks share sequences."""
    return [option.topology for option in ranking if _largest_bag(option.topology) > 1][:count]


def _largest_bag(topology: str) -> int:
    return max(map(len, Topology(topology).bags))


@dataclass(frozen=True)
class Result:
    """The simulated steps of an alternative. problem: why it is not possible; then there are no steps."""

    alternative: Alternative
    steps: list[OptimizerStep]
    problem: str | None = None

    def mean(self, *names: str) -> float:
        """Of figures of the steps, added up."""
        return sum(step.figures[name] for step in self.steps for name in names) / len(self.steps)

    @property
    def work_s(self) -> float:
        """Of the samples' work alone, spread evenly over the ranks."""
        return sum(step.work_s for step in self.steps) / len(self.steps)

    @property
    def efficiency(self) -> float:
        """The time of the samples' own work over the time of the step. Alternatives are compared by it."""
        return self.work_s / self.mean("total_s")

    @property
    def waiting(self) -> float:
        """Of the ranks' computing time, the share in which they wait for the slowest, or compute padding."""
        return max(0.0, 1 - self.work_s / self.mean("compute_s"))

    @property
    def max_tokens(self) -> int:
        return int(max(step.figures["max_tokens"] for step in self.steps))


def simulate(alternative: Alternative, draw: DrawnSteps) -> Result:
    """Simulates all steps, of which the figures are kept, and not the plans."""
    steps: list[OptimizerStep] = []
    try:
        for step in alternative.steps(draw):
            step.figures  # noqa: B018  computed while there are plans
            step.plans, step.whole = (), None
            steps.append(step)
        result = Result(alternative, steps)
    except ArgumentError as error:  # a limit that cannot be kept
        return Result(alternative, [], str(error))
    if not 0 < draw.max_tokens_per_rank < (held := result.max_tokens):
        return result
    return Result(alternative, [], f"{held:,} tokens on a rank, expected at most {draw.max_tokens_per_rank:,}")


def gain(one: Result, other: Result) -> tuple[float, float]:
    """How many times as fast `one` is as `other`, and the standard error of that over the draws (jackknife).

    The error is NaN where there is only one step.
    """
    count = min(len(one.steps), len(other.steps))

    def efficiency(result: Result, left_out: int | None) -> float:
        kept = [step for i, step in enumerate(result.steps) if i * count // len(result.steps) != left_out]
        return sum(step.work_s for step in kept) / sum(step.figures["total_s"] for step in kept)

    def ratio(left_out: int | None = None) -> float:
        return efficiency(one, left_out) / efficiency(other, left_out)

    if count < 2:
        return ratio(), math.nan
    each = [ratio(i) for i in range(count)]
    mean = sum(each) / count
    return ratio(), math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in each))
