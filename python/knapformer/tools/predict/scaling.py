"""Predicted steps of a data mix as the cluster grows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import knapformer
from knapformer import (
    ArgumentError,
    Cluster,
    DataMix,
    Plan,
    StepTime,
    Topology,
    TrainedModel,
    plan_home,
    predict_step,
    solver_names,
)
from knapformer.tools.cli_args import MAX_RANKS, counts
from knapformer.tools.report.points import Point

NO_BALANCER = "none"  # in place of a topology
_TERMS = ("token_s", "attention_s", "exchange_s", "route_s", "fsdp_s", "host_s", "fixed_s", "total_s", "ideal_s")


@dataclass(frozen=True)
class Workload:
    """What is planned, and how. One step's lengths come from the mix, or are given for one number of ranks."""

    d_model: int
    gamma: float
    solver: str
    cluster: Cluster
    model: TrainedModel
    mix: DataMix | None = None
    seed: int = 0
    num_steps: int = 1
    lengths: list[list[int]] | None = None

    def plan(self, seq_lens: list[list[int]], topology: str) -> Plan:
        return knapformer.plan(
            seq_lens, topology, self.d_model, self.gamma, self.solver, cluster=self.cluster, model=self.model
        )

    def seq_lens(self, num_ranks: int) -> Iterator[list[list[int]]]:
        if self.lengths is not None:
            yield self.lengths
            return
        assert self.mix is not None
        for step in range(self.num_steps):
            yield self.mix.draw_lengths(self.seed, step, num_ranks)


def parse_ranks(text: str) -> list[int]:
    """'32,128,...,2048': see knapformer.tools.cli_args.counts. Raises ArgumentError."""
    return counts(text, "--ranks", MAX_RANKS)


def topology_for(text: str, num_ranks: int) -> str:
    """'g8n*' is as many bags of 8 as the ranks make; any other text stays. Raises ArgumentError."""
    if not text.endswith("n*"):
        return text
    num_ranks_per_bag = Topology(text[:-1] + "1").num_ranks
    if "+" in text or num_ranks % num_ranks_per_bag:
        raise ArgumentError(
            f"topology: got {text!r} for {num_ranks} ranks, expected one term, with bags whose size divides the ranks"
        )
    return f"{text[:-1]}{num_ranks // num_ranks_per_bag}"


def plan_steps(workload: Workload, topology: str, num_ranks: int) -> list[tuple[Plan, float]]:
    """The plan of each step, and the seconds that planning took."""
    plans = []
    for seq_lens in workload.seq_lens(num_ranks):
        start = time.perf_counter()
        plan = workload.plan(seq_lens, topology)
        plans.append((plan, time.perf_counter() - start))
    return plans


def summary(plans: Sequence[Plan], plan_s: float, name: str) -> Point:
    steps: list[StepTime] = [predict_step(plan) for plan in plans]
    mean = {field: statistics.fmean(getattr(step, field) for step in steps) for field in _TERMS}
    tokens = statistics.fmean(plan.num_tokens for plan in plans)
    return Point(
        num_ranks=plans[0].num_ranks,
        topology=name,
        asked=name,
        efficiency=mean["ideal_s"] / mean["total_s"],
        wir=statistics.fmean(plan.wir_after for plan in plans),
        tokens_per_s=tokens / mean["total_s"],
        plan_s=plan_s,
        tokens=tokens,
        max_tokens_per_rank=statistics.fmean(max(plan.tokens_after) for plan in plans),
        **mean,
        route_bytes=statistics.fmean(step.route_bytes.total for step in steps),
        route_bytes_between_nodes=statistics.fmean(step.route_bytes.between for step in steps),
        attention_bytes=statistics.fmean(step.attention_bytes.total for step in steps),
        attention_bytes_between_nodes=statistics.fmean(step.attention_bytes.between for step in steps),
    )


def predict_scaling(workload: Workload, ranks: Sequence[int], topologies: Sequence[str]) -> list[Point]:
    """For each number of ranks: no balancer, then each topology. All input is checked before anything is planned.

    Raises ArgumentError.
    """
    for num_ranks in ranks:
        if workload.mix is not None:
            workload.mix.check_divides(num_ranks)
        for topology in topologies:
            Topology(topology_for(topology, num_ranks), num_ranks)
    points = []
    for num_ranks in ranks:
        home = [plan_home(plan) for plan, _ in plan_steps(_cheap(workload), "g1n1", num_ranks)]
        points.append(summary(home, 0.0, NO_BALANCER))
        planned: dict[str, Point] = {}
        for asked in topologies:
            text = topology_for(asked, num_ranks)
            if text not in planned:
                plans, seconds = zip(*plan_steps(workload, text, num_ranks), strict=True)
                planned[text] = summary(plans, statistics.median(seconds), text)
            points.append(replace(planned[text], asked=asked))
    return points


def _cheap(workload: Workload) -> Workload:
    """The same lengths with the solver that is fastest: the plan at home does not depend on it."""
    return replace(workload, solver=solver_names()[-1])
