"""The usual ways to train on sequences of different lengths, without this project, on the same samples.

Ranks wait for each other in every micro-batch, as under FSDP2.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from knapformer import attention_pairs
from knapformer._core import plan_home_bags
from knapformer.tools.rank_lengths import Lengths, MaskedLength, lengths_of_step, micro_batches_of_step
from knapformer.tools.ways import DrawnSteps, OptimizerStep, Way, at_home

_MAX_BUCKETS = 32


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
    return sorted({distinct[bisect.bisect_right(distinct, top) - 1] for top in tops})


def _padded(length: int, tokens: int) -> int:
    """A sample that is padded to so many tokens. If it has a mask, the share of pairs stays."""
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
    cut: dict[str, Any] = {"cuts_queries": True}
    shared: list[tuple[str, str, int, dict[str, Any]]] = [
        *((f"static_{degree}", f"sequence parallel {degree}", degree, {}) for degree in (2, 4, 8)),
        ("ring_8", "static ring 8", 8, cut | {"num_heads": 1, "num_kv_heads": 1}),  # one head is not cut
        ("ulysses_ring_8", "Ulysses x ring 8", 8, cut),
    ]
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
                key, name, partial(static_sharing, degree=degree, **of),
                "the model's attention, and the loader", degree=degree,
            )
            for key, name, degree, of in shared if num_ranks % degree == 0
        ),
    ]  # fmt: skip
