"""The usual ways to train on sequences of different lengths, and this project's, simulated on the same samples.

One cost model prices them all (docs/cluster_model.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from knapformer import ArgumentError, Topology, TopologyOption, rank_topologies
from knapformer.tools.baselines import Alternative, baselines
from knapformer.tools.ways import DrawnSteps, OptimizerStep, planned_whole

# Of topologies: a larger sample changes their order by less than the predictions' error.
_MAX_STEPS, _MAX_BATCHES = 2, 4


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
