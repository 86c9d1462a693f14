"""The usual ways to train on sequences of different lengths, and this project's, simulated on the same samples.

Every alternative is a function of a `Draw` that yields what its optimizer steps cost. One cost model prices them all
(docs/cluster_model.md); ranks wait for each other in every micro-batch, as under FSDP2.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import knapformer
from knapformer import ArgumentError, Cluster, Plan, TrainedModel, plan_home, plan_home_bags, predict_step
from knapformer.tools.cli_args import Lengths, lengths_of_step, micro_batches_of_step


@dataclass(frozen=True)
class Setting:
    """What all alternatives have in common.

    batch_size: samples that a rank draws for a micro-batch, in the mean. max_tokens: tokens that a rank may hold in a
    micro-batch; 0: memory is not limited. limit_is_given: whether max_tokens is the user's --max-tokens-per-rank, and
    not what fits in memory. job_ranks: the ranks of the job, of which num_ranks are simulated; 0: all.
    """

    num_ranks: int
    batch_size: float
    micro_batches: int
    d_model: int
    gamma: float
    cluster: Cluster
    model: TrainedModel
    max_tokens: int = 0
    mask: str = "full"
    rank_speed: Sequence[float] = ()
    limit_is_given: bool = False
    job_ranks: int = 0

    def of_job(self, topology: str) -> str:
        """The topology, of bags of equal size over num_ranks, over the ranks of the job."""
        bag, _, count = topology.rpartition("n")
        return f"{bag}n{int(count) * (self.job_ranks or self.num_ranks) // self.num_ranks}"

    @property
    def too_much(self) -> str:
        """What is said of an alternative that needs more than max_tokens."""
        return f"does not keep --max-tokens-per-rank {self.max_tokens}" if self.limit_is_given else "does not fit"

    def plan(self, lengths: Lengths, topology: str, *, solver: str = "greedy", routed: bool = False) -> Plan:
        return knapformer.plan(
            lengths, topology, self.d_model, self.gamma, solver, masks=self.mask, rank_speed=self.rank_speed,
            cluster=self.cluster, model=self.model.replace(routed=routed),
        )  # fmt: skip

    def work(self, length: int) -> float:
        return knapformer.WorkloadModel(self.gamma).work(length, self.d_model, self.mask)


@dataclass(frozen=True)
class Draw:
    """The samples of some optimizer steps: [step][rank], in the order in which ranks draw them.

    pool: the lengths that an alternative draws from where it takes other samples. batches: the same samples,
    [step][micro-batch][rank], as ranks draw them; None: each step is cut into parts of nearly equal numbers. watch:
    is called with the name of each alternative that is simulated.
    """

    setting: Setting
    steps: Sequence[Lengths]
    pool: Sequence[int]
    seed: int = 0
    batches: Sequence[Sequence[Lengths]] | None = None
    watch: Callable[[str], object] = str

    @staticmethod
    def of_batches(
        setting: Setting, batches: Sequence[Sequence[Lengths]], pool: Sequence[int], seed: int = 0,
        watch: Callable[[str], object] = str,
    ) -> Draw:  # fmt: skip
        """batches: [step][micro-batch][rank]."""
        return Draw(setting, [lengths_of_step(step) for step in batches], pool, seed, batches, watch)

    def with_micro_batches(self, batches: Sequence[Sequence[Lengths]]) -> Draw:
        """Of steps with another number of micro-batches."""
        setting = replace(self.setting, micro_batches=len(batches[0]))
        return Draw.of_batches(setting, batches, self.pool, self.seed, self.watch)

    @cached_property
    def micro_batches(self) -> Sequence[Sequence[Lengths]]:
        """[step][micro-batch][rank]: what ranks compute together where no step is planned whole."""
        if self.batches is not None:
            return self.batches
        return [micro_batches_of_step(lengths, self.setting.micro_batches) for lengths in self.steps]

    @cached_property
    def sorted_pool(self) -> list[int]:
        return sorted(self.pool)


@dataclass
class Step:
    """One optimizer step: sums over its micro-batches."""

    seconds: float = 0
    work_s: float = 0  # of its samples' work alone, spread evenly over the ranks
    compute_s: float = 0  # of the slowest ranks
    samples: int = 0
    tokens: int = 0
    bytes_in_node: float = 0
    bytes_between: float = 0
    max_tokens: int = 0
    plans: list[Plan] = field(default_factory=list, repr=False)  # of its micro-batches; see simulate
    plan_work_s: float = 0  # as work_s, with padding

    def add(self, plan: Plan, real_work_s: float | None = None) -> None:
        """Adds a micro-batch. real_work_s: the ideal time without padding, where part of the plan's work is padding."""
        time = predict_step(plan)
        self.plans.append(plan)
        self.seconds += time.total_s
        self.work_s += time.ideal_s if real_work_s is None else real_work_s
        self.plan_work_s += time.ideal_s
        self.compute_s += time.token_s + time.attention_s
        self.samples += plan.num_sequences
        self.tokens += plan.num_tokens
        self.bytes_in_node += time.route_bytes.inside + time.attention_bytes.inside
        self.bytes_between += time.route_bytes.between + time.attention_bytes.between
        self.max_tokens = max(self.max_tokens, plan.max_tokens)


@dataclass(frozen=True)
class Alternative:
    """name: in tables. advice: what is taken, where the name needs words. change: what the user has to do. effect: how
    it changes which samples a step has, '' for not at all. degree: of static sequence parallelism, 0 for none.
    topology: of the balancer in the model, over the ranks of the job."""

    key: str
    name: str
    steps: Callable[[Draw], Iterator[Step]] = field(repr=False)
    change: str = "nothing"
    effect: str = ""
    ours: bool = False
    degree: int = 0
    topology: str = ""
    advice: str = ""


def as_drawn(draw: Draw) -> Iterator[Step]:
    """Each rank computes what it drew, packed without padding."""
    for micro_batches in draw.micro_batches:
        step = Step()
        for micro_batch in micro_batches:
            step.add(plan_home(draw.setting.plan(micro_batch, f"g1n{draw.setting.num_ranks}")))
        yield step


def one_by_one(draw: Draw) -> Iterator[Step]:
    """Micro-batches of at most one sample a rank, as many as the rank with the most samples needs."""
    for lengths in draw.steps:
        step = Step()
        for micro_batch in micro_batches_of_step(lengths, max(1, *map(len, lengths))):
            step.add(plan_home(draw.setting.plan(micro_batch, f"g1n{draw.setting.num_ranks}")))
        yield step


_MAX_BUCKETS = 32


def _bucket_tops(pool: Sequence[int]) -> list[int]:
    """The longest sample of each bucket, ascending: a bucket for each length where there are few lengths, else buckets
    whose upper bounds have equal ratios."""
    distinct = sorted(set(pool))
    if len(distinct) <= _MAX_BUCKETS:
        return distinct
    low, high = distinct[0], distinct[-1]
    tops = [math.ceil(low * (high / low) ** ((i + 1) / _MAX_BUCKETS)) for i in range(_MAX_BUCKETS)]
    return sorted({distinct[bisect.bisect_right(distinct, min(top, high)) - 1] for top in tops})


def lockstep_buckets(draw: Draw) -> Iterator[Step]:
    """In each micro-batch all ranks use one bucket, drawn in proportion to its samples and padded to its longest.

    Where memory is limited, batches of long buckets are smaller.
    """
    setting, pool = draw.setting, draw.sorted_pool
    tops = _bucket_tops(pool)
    ends = [bisect.bisect_right(pool, top) for top in tops]
    rng = random.Random(draw.seed)
    # Systematic sampling: each bucket is drawn as often as its share of the samples says, in shuffled order. These
    # steps differ more than those of other alternatives, so more of them are simulated.
    num_steps = 8 * len(draw.steps)
    count = num_steps * setting.micro_batches
    start = rng.random()
    places = [int((i + start) * len(pool) / count) for i in range(count)]
    rng.shuffle(places)
    for _ in range(num_steps):
        step = Step()
        for _ in range(setting.micro_batches):
            bucket = bisect.bisect_right(ends, places.pop())
            first = ends[bucket - 1] if bucket else 0
            size = max(1, round(setting.batch_size))
            if setting.max_tokens:
                size = max(1, min(size, setting.max_tokens // tops[bucket]))
            lens = [[pool[rng.randrange(first, ends[bucket])] for _ in range(size)] for _ in range(setting.num_ranks)]
            padded = setting.plan([[tops[bucket]] * size] * setting.num_ranks, f"g1n{setting.num_ranks}")
            real = setting.plan(lens, f"g1n{setting.num_ranks}")
            step.add(plan_home(padded), real_work_s=predict_step(plan_home(real)).ideal_s)
        yield step


def time_budget(draw: Draw) -> Iterator[Step]:
    """Each rank fills its micro-batch from its own stream until its predicted seconds, or its memory, are full.

    The budget is the mean time of batch_size samples of the pool, and at least the time of its longest sample.
    """
    setting, pool = draw.setting, draw.pool
    works = {length: setting.work(length) for length in set(pool)}
    budget = max(setting.batch_size * sum(map(works.__getitem__, pool)) / len(pool), max(works.values()))
    streams = [random.Random(f"{draw.seed} {rank}") for rank in range(setting.num_ranks)]
    waiting = [stream.choice(pool) for stream in streams]
    for _ in draw.steps:
        step = Step()
        for _ in range(setting.micro_batches):
            lens: Lengths = [[] for _ in streams]
            for rank, stream in enumerate(streams):
                left, room = budget, setting.max_tokens or math.inf
                while not lens[rank] or (works[waiting[rank]] <= left and waiting[rank] <= room):
                    lens[rank].append(waiting[rank])
                    left -= works[waiting[rank]]
                    room -= waiting[rank]
                    waiting[rank] = stream.choice(pool)
            step.add(plan_home(setting.plan(lens, f"g1n{setting.num_ranks}")))
        yield step


def static_sharing(degree: int) -> Callable[[Draw], Iterator[Step]]:
    """Sequence parallelism of one degree for all sequences: the ranks of a group share what they have drawn."""

    def steps(draw: Draw) -> Iterator[Step]:
        for micro_batches in draw.micro_batches:
            step = Step()
            for micro_batch in micro_batches:
                step.add(
                    plan_home_bags(draw.setting.plan(micro_batch, f"g{degree}n{draw.setting.num_ranks // degree}"))
                )
            yield step

    return steps


def longest_first(draw: Draw) -> Iterator[Step]:
    """Assigns each micro-batch's samples, the longest first, to the rank that has the least work."""
    for micro_batches in draw.micro_batches:
        step = Step()
        for micro_batch in micro_batches:
            step.add(draw.setting.plan(micro_batch, f"g1n{draw.setting.num_ranks}"))
        yield step


def planned_step(topology: str, *, routed: bool) -> Callable[[Draw], Iterator[Step]]:
    """All micro-batches of a step planned at once. routed: tokens travel; otherwise ranks load what they compute."""

    def steps(draw: Draw) -> Iterator[Step]:
        setting = draw.setting
        for lengths in draw.steps:
            step = Step()
            planned = knapformer.plan(
                lengths, topology, setting.d_model, setting.gamma, effort="low", masks=setting.mask,
                rank_speed=setting.rank_speed, cluster=setting.cluster, model=setting.model.replace(routed=routed),
                max_tokens_per_rank=setting.max_tokens, micro_batches=setting.micro_batches,
            )  # fmt: skip
            for plan in planned.plans:
                step.add(plan)
            yield step

    return steps


def baselines(num_ranks: int) -> list[Alternative]:
    """The alternatives without this project that this number of ranks allows, the least change first."""
    found = [
        Alternative("as_drawn", "no balancing", as_drawn),
        Alternative("one_by_one", "one sample at a time", one_by_one, "batch size 1, and more accumulation"),
        Alternative(
            "buckets",
            "lockstep buckets",
            lockstep_buckets,
            "a bucketing sampler; samples are cropped or padded to their bucket's size",
            "a micro-batch sees one length, and a step as many as it has micro-batches",
        ),
        Alternative(
            "time_budget",
            "time budget",
            time_budget,
            "an iterable data set that packs by predicted seconds",
            "the number of samples in a step varies",
        ),
        Alternative("longest_first", "longest first", longest_first, "a sampler that knows the lengths"),
    ]
    for degree in (2, 4, 8):
        if num_ranks % degree == 0:
            name, change = f"sequence parallel {degree}", "the model's attention, and the loader"
            found.append(Alternative(f"static_{degree}", name, static_sharing(degree), change, degree=degree))
    return found


def alternatives(setting: Setting, topologies: Sequence[str]) -> list[Alternative]:
    """The baselines that these ranks allow, then this project's. topologies: of the balancer in the model."""
    num_ranks = setting.num_ranks
    found = baselines(num_ranks)
    sampler = planned_step(f"g1n{num_ranks}", routed=False)
    change = "the loader's sampler, and how the loss is weighed"
    found.append(Alternative("sampler", "BalancedBatchSampler", sampler, change, ours=True))
    for topology in topologies:
        balancer, of_job = planned_step(topology, routed=True), setting.of_job(topology)
        largest = topology[1:].partition("n")[0].partition("/")[0]
        ranks, shared = (f"1-{largest}", f"long samples shared by up to {largest} ranks")
        if "/" not in topology:
            ranks, shared = (largest, f"every sample shared by {largest} ranks")
        found.append(
            Alternative(
                f"bags {of_job}",
                f"balancer, {ranks} ranks",
                balancer,
                "calls in the model",
                ours=True,
                topology=of_job,
                advice=f"the balancer in the model, with {shared}",
            )
        )
    return found


@dataclass(frozen=True)
class Result:
    """The simulated steps of an alternative. problem: why it is not possible; then there are no steps."""

    alternative: Alternative
    steps: list[Step]
    problem: str | None = None

    def mean(self, of: Callable[[Step], float]) -> float:
        return sum(map(of, self.steps)) / len(self.steps)

    @property
    def efficiency(self) -> float:
        """The time of the samples' own work over the time of the step. Alternatives are compared by it."""
        return self.mean(lambda step: step.work_s) / self.mean(lambda step: step.seconds)

    @property
    def waiting(self) -> float:
        """Of the ranks' computing time, the share in which they wait for the slowest, or compute padding."""
        return max(0.0, 1 - self.mean(lambda step: step.work_s) / self.mean(lambda step: step.compute_s))

    @property
    def max_tokens(self) -> int:
        return max(step.max_tokens for step in self.steps)


def simulate(alternative: Alternative, draw: Draw) -> Result:
    """Simulates all steps; only the first one keeps its plans."""
    steps: list[Step] = []
    draw.watch(alternative.name)
    try:
        for step in alternative.steps(draw):
            if steps:
                step.plans.clear()
            steps.append(step)
        return Result(alternative, steps)
    except ArgumentError as error:  # a limit that cannot be kept
        return Result(alternative, [], str(error))


def gain(one: Result, other: Result) -> tuple[float, float]:
    """How many times as fast `one` is as `other`, and the standard error of that over the draws (jackknife).

    The error is NaN where there is only one step.
    """
    count = min(len(one.steps), len(other.steps))

    def efficiency(result: Result, left_out: int | None) -> float:
        kept = [step for i, step in enumerate(result.steps) if i * count // len(result.steps) != left_out]
        return sum(step.work_s for step in kept) / sum(step.seconds for step in kept)

    def ratio(left_out: int | None = None) -> float:
        return efficiency(one, left_out) / efficiency(other, left_out)

    if count < 2:
        return ratio(), math.nan
    each = [ratio(i) for i in range(count)]
    mean = sum(each) / count
    return ratio(), math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in each))
