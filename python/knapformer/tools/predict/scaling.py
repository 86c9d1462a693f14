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
    figures = [_figures(plan, predict_step(plan)) for plan in plans]
    mean = {field: statistics.fmean(of[field] for of in figures) for field in figures[0]}
    mean["efficiency"] = mean["ideal_s"] / mean["total_s"]
    mean["tokens_per_s"] = mean["tokens"] / mean["total_s"]
    return Point(plans[0].num_ranks, topology=name, asked=name, plan_s=plan_s, mean=mean)


def _figures(plan: Plan, step: StepTime) -> dict[str, float]:
    return {
        "wir": plan.wir_after,
        "tokens": plan.num_tokens,
        "max_tokens_per_rank": plan.max_tokens,
        **step.terms,
        "total_s": step.total_s,
        "ideal_s": step.ideal_s,
        "route_bytes": step.route_bytes.total,
        "route_bytes_between_nodes": step.route_bytes.between,
        "attention_bytes": step.attention_bytes.total,
        "attention_bytes_between_nodes": step.attention_bytes.between,
    }


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
        # The plan at home does not depend on the solver: the fastest one.
        planned_somehow = plan_steps(replace(workload, solver=solver_names()[-1]), "g1n1", num_ranks)
        home = [plan_home(plan) for plan, _ in planned_somehow]
        points.append(summary(home, 0.0, NO_BALANCER))
        planned: dict[str, Point] = {}
        for asked in topologies:
            text = topology_for(asked, num_ranks)
            if text not in planned:
                plans, seconds = zip(*plan_steps(workload, text, num_ranks), strict=True)
                planned[text] = summary(plans, statistics.median(seconds), text)
            points.append(replace(planned[text], asked=asked))
    return points
