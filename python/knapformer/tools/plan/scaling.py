"""Predicted steps of a data mix, of one micro-batch or several, as the cluster grows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import knapformer
from knapformer import (
    ArgumentError,
    Cluster,
    DataMix,
    Plan,
    StepPlan,
    StepTime,
    Topology,
    TrainedModel,
    plan_home,
    predict_step,
    solver_names,
)
from knapformer.tools.cli_args import (
    MAX_RANKS,
    Lengths,
    batches_of_step,
    counts,
    lengths_of_step,
    micro_batches_of_step,
)
from knapformer.tools.measure.figures import forward_flops, hardware_flops_utilization
from knapformer.tools.report import PLANNED_STEP
from knapformer.tools.report.points import Point

NO_BALANCER = "none"  # in place of a topology


@dataclass(frozen=True)
class Workload:
    """What is planned, and how. One step's lengths come from the mix, or are given for one number of ranks.

    given: lengths of steps, [step][rank], in place of the mix. micro_batches: of a step, which is then also planned
    whole; None: one, which is not. max_tokens_per_rank: a limit of every plan or, with micro_batches, only of steps
    planned whole; 0: no limit, and for steps planned whole what the fullest rank holds in the same step planned by
    micro-batch. peak_tflops: of a rank's device; None: unknown, so HFU is not given.
    """

    d_model: int
    gamma: float
    solver: str
    cluster: Cluster
    model: TrainedModel
    mix: DataMix | None = None
    seed: int = 0
    first_step: int = 0
    num_steps: int = 1
    given: Sequence[Lengths] = ()
    micro_batches: int | None = None
    sync: str = "micro_batch"
    max_tokens_per_rank: int = 0
    mask: str = "full"
    rank_speed: Sequence[float] = ()
    effort: int | str = "default"
    peak_tflops: float | None = None

    def plan(self, seq_lens: Lengths, topology: str) -> Plan:
        """The plan of a micro-batch."""
        limit = self.max_tokens_per_rank if self.micro_batches is None else 0
        planned: Plan = knapformer.plan(seq_lens, topology, **self._options(), max_tokens_per_rank=limit)
        return planned

    def plan_step(self, micro_batches: Sequence[Lengths], topology: str, max_tokens: int, routed: bool) -> StepPlan:
        """All micro-batches planned at once. routed: tokens travel in the model; else ranks load what they compute."""
        planned: StepPlan = knapformer.plan(
            lengths_of_step(micro_batches), topology, **self._options(routed=routed), sync=self.sync,
            micro_batches=len(micro_batches), max_tokens_per_rank=self.max_tokens_per_rank or max_tokens,
        )  # fmt: skip
        return planned

    def _options(self, routed: bool = True) -> dict[str, Any]:
        model = self.model if routed else self.model.replace(routed=False)
        return {
            "d_model": self.d_model, "gamma": self.gamma, "solver": self.solver, "effort": self.effort,
            "masks": self.mask, "rank_speed": self.rank_speed, "cluster": self.cluster, "model": model,
        }  # fmt: skip

    def steps(self, num_ranks: int) -> Iterator[list[Lengths]]:
        """The lengths of each micro-batch of each step, as the ranks draw them."""
        count = self.micro_batches or 1
        for step in range(self.first_step, self.first_step + self.num_steps):
            if self.mix is None:
                yield micro_batches_of_step(self.given[step], count)
            else:
                yield [self.mix.draw_lengths(self.seed, batch, num_ranks) for batch in batches_of_step(step, count)]

    def topology(self, text: str, num_ranks: int) -> str:
        """Bags for this number of ranks: expands 'g8n*'; 'auto' is the best of the first step. Raises ArgumentError."""
        if text != "auto":
            return topology_for(text, num_ranks)
        first = next(self.steps(num_ranks))
        if self.micro_batches is None:
            return str(self.plan(first[0], text).topology)
        return str(self.plan_step(first, text, 0, routed=True).plans[0].topology)


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


@dataclass(frozen=True)
class PlannedStep:
    plans: list[Plan]  # of each micro-batch
    plan_s: float  # that planning took

    @property
    def max_tokens(self) -> int:
        """Tokens of the fullest rank in any micro-batch."""
        return max(plan.max_tokens for plan in self.plans)


def plan_micro_batches(workload: Workload, topology: str, num_ranks: int) -> list[PlannedStep]:
    """Plans each micro-batch of each step by itself, as a balancer in the model does."""
    steps = []
    for micro_batches in workload.steps(num_ranks):
        start = time.perf_counter()
        plans = [workload.plan(seq_lens, topology) for seq_lens in micro_batches]
        steps.append(PlannedStep(plans, time.perf_counter() - start))
    return steps


def plan_steps(workload: Workload, topology: str, num_ranks: int, max_tokens: Sequence[int]) -> list[PlannedStep]:
    """Plans each step whole. max_tokens: for each step, the limit per rank and micro-batch if the workload has none."""
    steps = []
    for micro_batches, limit in zip(workload.steps(num_ranks), max_tokens, strict=True):
        start = time.perf_counter()
        plan = workload.plan_step(micro_batches, topology, limit, routed=False)
        steps.append(PlannedStep(plan.plans, time.perf_counter() - start))
    return steps


def summary(steps: Sequence[PlannedStep], name: str, mask: str, peak_tflops: float | None = None) -> Point:
    figures = [_figures(step, mask) for step in steps]
    mean = {field: statistics.fmean(of[field] for of in figures) for field in figures[0]}
    mean["efficiency"] = mean["ideal_s"] / mean["total_s"]
    mean["tokens_per_s"] = mean["tokens"] / mean["total_s"]
    plan_s = statistics.median(step.plan_s for step in steps)
    num_ranks, model = steps[0].plans[0].num_ranks, steps[0].plans[0].model
    flops = mean.pop("forward_flops")
    peak = peak_tflops if model.mode == "training" else None
    hfu = hardware_flops_utilization(flops, model.num_blocks, mean["total_s"], num_ranks, peak, model.recomputes)
    return Point(num_ranks, topology=name, asked=name, plan_s=plan_s, mean=mean, hfu=hfu)


def _figures(step: PlannedStep, mask: str) -> dict[str, float]:
    """Sums over the micro-batches, since ranks wait for each other in each; the mean WIR and the highest max_tokens."""
    times = [predict_step(plan) for plan in step.plans]
    sums = {term: math.fsum(of.terms[term] for of in times) for term in StepTime.labels()}
    return {
        "forward_flops": math.fsum(forward_flops(plan, mask) for plan in step.plans),
        "wir": statistics.fmean(plan.wir_after for plan in step.plans),
        "tokens": sum(plan.num_tokens for plan in step.plans),
        "max_tokens_per_rank": step.max_tokens,
        **sums,
        "total_s": math.fsum(of.total_s for of in times),
        "ideal_s": math.fsum(of.ideal_s for of in times),
        "route_bytes": math.fsum(of.route_bytes.total for of in times),
        "route_bytes_between_nodes": math.fsum(of.route_bytes.between for of in times),
        "attention_bytes": math.fsum(of.attention_bytes.total for of in times),
        "attention_bytes_between_nodes": math.fsum(of.attention_bytes.between for of in times),
        "fsdp_bytes": math.fsum(of.fsdp_bytes for of in times),
    }


def check_scaling(workload: Workload, ranks: Sequence[int], topologies: Sequence[str]) -> None:
    """Checks topologies and numbers of ranks before any lengths are drawn. Raises ArgumentError."""
    for num_ranks in ranks:
        if workload.mix is not None:
            workload.mix.check_divides(num_ranks)
        for topology in topologies:
            if topology != "auto":
                Topology(topology_for(topology, num_ranks), num_ranks)


def predict_scaling(workload: Workload, ranks: Sequence[int], topologies: Sequence[str]) -> list[Point]:
    """For each number of ranks: no balancer, then each topology, planned by micro-batch and, if micro_batches is given,
    also by whole step. Raises ArgumentError.
    """
    points = []
    for num_ranks in ranks:
        # The plan at home does not depend on the solver, so the fastest one is taken.
        fastest = replace(workload, solver=solver_names()[-1], effort="default", max_tokens_per_rank=0)
        planned_somehow = plan_micro_batches(fastest, "g1n1", num_ranks)
        home = [PlannedStep([plan_home(plan) for plan in step.plans], 0.0) for step in planned_somehow]
        points.append(summary(home, NO_BALANCER, workload.mask, workload.peak_tflops))
        planned: dict[str, list[Point]] = {}
        for asked in topologies:
            text = workload.topology(asked, num_ranks)
            if text not in planned:
                steps = plan_micro_batches(workload, text, num_ranks)
                planned[text] = [summary(steps, text, workload.mask, workload.peak_tflops)]
                if workload.micro_batches is not None:
                    whole = plan_steps(workload, text, num_ranks, [step.max_tokens for step in steps])
                    name = f"{PLANNED_STEP}, {text}"
                    planned[text].append(summary(whole, name, workload.mask, workload.peak_tflops))
            for point, prefix in zip(planned[text], ("", f"{PLANNED_STEP}, "), strict=False):
                points.append(replace(point, asked=prefix + asked))
    return points
