"""Optimizer steps as commands plan them: at home, by micro-batch, or whole; and what a step takes by the cluster model.

A way is a function of DrawnSteps that yields what its optimizer steps compute. Needs no torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import knapformer
from knapformer import Cluster, Cost, MicroBatchTime, Plan, TrainedModel, WorkloadModel, plan_home, predict_micro_batch
from knapformer._core import head_shares
from knapformer.tools.rank_lengths import Lengths, MaskedLength, has_masks, lengths_of_step

# Peak of a rank's accelerator by cluster name: dense bf16 without sparsity, TFLOP/s, from data sheets.
PEAK_TFLOPS = {"h100": 989.0, "h200": 989.0, "published": 989.0, "h100-pcie": 756.0, "b200": 2250.0, "a100": 312.0}

# Names of ways that are not those of a topology alone.
NO_BALANCER = "no balancer"
PLANNED_STEP = "step planned"  # all micro-batches at once, by ranks that load what they compute


@dataclass(frozen=True, kw_only=True)
class PlanCost(Cost):
    """The cost of a command's plans, whose fields are all known, and their solver, as in `knapformer.plan`."""

    d_model: int
    gamma: float
    cluster: Cluster
    model: TrainedModel
    solver: str | None = None

    def plan(self, lengths: Lengths, topology: str, *, routed: bool | None = None, **others: Any) -> Plan:
        """routed: tokens travel in the model; otherwise ranks load what they compute; None: as the model says. others:
        arguments of `knapformer.plan`, in place of these."""
        model = self.model if routed is None else self.model.replace(routed=routed)
        own: dict[str, Any] = {"model": model, "solver": self.solver}
        return knapformer.plan(lengths, topology, self, masks=self.masks(lengths), **(own | others))

    def home(self, lengths: Lengths) -> Plan:
        """Every sequence at home. It does not depend on the solver: the fastest is taken."""
        return plan_home(self.plan(lengths, f"g1n{len(lengths)}", solver="greedy"))

    def masks(self, lengths: Lengths) -> str | list[list[str]]:
        """One for all sequences where none has its own."""
        return [list(map(self.mask_of, lens)) for lens in lengths] if has_masks(lengths) else self.mask

    def mask_of(self, length: int) -> str:
        return length.mask if isinstance(length, MaskedLength) else self.mask

    def work(self, length: int) -> float:
        return WorkloadModel(self.gamma).work(length, self.d_model, self.mask_of(length))


@dataclass(frozen=True)
class DrawnSteps:
    """The samples of some optimizer steps, [step][micro-batch][rank], in the order in which ranks draw them.

    pool: the lengths that a way draws from where it takes other samples. max_tokens_per_rank: the limit in a
    micro-batch; 0: none.
    """

    planning: PlanCost
    batches: Sequence[Sequence[Lengths]]
    pool: Sequence[int] = ()
    seed: int = 0
    max_tokens_per_rank: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.batches[0][0])

    @property
    def micro_batches(self) -> int:
        return len(self.batches[0])

    @cached_property
    def batch_size(self) -> float:
        """Samples of a rank in a micro-batch, in the mean."""
        return statistics.fmean(len(lens) for step in self.batches for batch in step for lens in batch)


@dataclass
class OptimizerStep:
    """One optimizer step. own_share: of the plans' work, what is not padding. plan_s: that planning took. times: of the
    plans; None: as predict_micro_batch says."""

    plans: Sequence[Plan]
    own_share: float = 1.0
    plan_s: float = 0.0
    whole: Plan | None = None  # which `plans` are of
    times: Sequence[MicroBatchTime] | None = None

    @property
    def plan(self) -> Plan:
        """Of the step, if it is planned whole; else of its first micro-batch."""
        return self.whole or self.plans[0]

    @property
    def work_s(self) -> float:
        """Seconds of the samples' own work, spread evenly over the ranks."""
        return self.own_share * self.figures["ideal_s"]

    @cached_property
    def figures(self) -> dict[str, float]:
        """Sums over the micro-batches, since ranks wait for each other in each; max_tokens is that of any.

        wir: the mean over those that have tokens; infinite where one of them leaves a rank without work.
        """
        times = self.times or [predict_micro_batch(plan) for plan in self.plans]
        sums: dict[str, Callable[[MicroBatchTime], float]] = {
            "total_s": lambda of: of.total_s,
            "compute_s": lambda of: of.token_s + of.attention_s,
            "ideal_s": lambda of: of.ideal_s,
            "route_bytes": lambda of: of.route_bytes.total,
            "route_bytes_between_nodes": lambda of: of.route_bytes.between,
            "attention_bytes": lambda of: of.attention_bytes.total,
            "attention_bytes_between_nodes": lambda of: of.attention_bytes.between,
            "fsdp_bytes": lambda of: of.fsdp_bytes,
        }
        return {
            "wir": statistics.fmean([plan.wir_after for plan in self.plans if plan.num_tokens] or [1.0]),
            "samples": sum(plan.num_sequences for plan in self.plans),
            "tokens": sum(plan.num_tokens for plan in self.plans),
            "max_tokens": max(plan.max_tokens for plan in self.plans),
            **{term: math.fsum(of.terms[term] for of in times) for term in MicroBatchTime.labels()},
            **{name: math.fsum(map(of, times)) for name, of in sums.items()},
        }


Steps = Sequence[OptimizerStep]
Way = Callable[[DrawnSteps], Iterator[OptimizerStep]]


def at_home(draw: DrawnSteps) -> Iterator[OptimizerStep]:
    """Each rank computes what it drew, packed without padding."""
    for batches in draw.batches:
        yield OptimizerStep([draw.planning.home(batch) for batch in batches])


def by_micro_batch(draw: DrawnSteps, topology: str, max_tokens_per_rank: int = 0) -> Iterator[OptimizerStep]:
    """Each micro-batch is planned by itself, as by plan_routing without micro_batches."""
    for batches in draw.batches:
        start = time.perf_counter()
        plans = [draw.planning.plan(batch, topology, max_tokens_per_rank=max_tokens_per_rank) for batch in batches]
        yield OptimizerStep(plans, plan_s=time.perf_counter() - start)


def planned_whole(draw: DrawnSteps, topology: str, *, routed: bool | None = None) -> Iterator[OptimizerStep]:
    """All micro-batches of a step are planned at once. routed: as in PlanCost.plan."""
    for batches in draw.batches:
        start = time.perf_counter()
        whole = draw.planning.plan(
            lengths_of_step(batches), topology, routed=routed, micro_batches=len(batches),
            max_tokens_per_rank=draw.max_tokens_per_rank,
        )  # fmt: skip
        yield OptimizerStep(whole.plans, plan_s=time.perf_counter() - start, whole=whole)


def usual_ways(draw: DrawnSteps, topologies: Iterable[str], whole: bool) -> dict[str, list[OptimizerStep]]:
    """By name: without a balancer, then each topology planned by micro-batch and, where asked for, by whole step; the
    limit of tokens is then that of whole steps."""
    found = {NO_BALANCER: list(at_home(draw))}
    for topology in topologies:
        found[topology] = list(by_micro_batch(draw, topology, 0 if whole else draw.max_tokens_per_rank))
        if whole:
            name = f"{PLANNED_STEP}, {topology}"
            found[name] = list(planned_whole(draw, topology, routed=False))
    return found


def heads_text(draw: DrawnSteps, plan: Plan) -> str:
    """By which parts ranks share sequences of this many heads, and what that costs; '' where none are shared, or the
    heads are not known. plan: of the draw's first step."""
    model = plan.model
    degrees = sorted(set(plan.degree_of_sequence) - {1}, reverse=True)
    if model.num_heads == 0 or not degrees:
        return ""
    cuts = []
    for degree in degrees:
        of_queries = plan.query_parts.get(degree, 1)
        shares = head_shares(model.num_heads, model.num_kv_heads or model.num_heads, degree // of_queries)
        more = max(heads for heads, _ in shares) * len(shares) / model.num_heads - 1
        cut = ((len(shares), "heads"), (of_queries, "queries"))
        parts = " x ".join(f"{count} parts of its {what}" for count, what in cut if count > 1)
        uneven = f" (the busiest of them computes {more:.0%} more attention than the mean)" if more else ""
        cuts.append(f"{degree} ranks share a sequence by {parts}{uneven}")
    text = f"With {model.num_heads} heads, {', '.join(cuts)}."
    if all(model.num_heads % degree == 0 for degree in degrees):
        return text
    even = replace(draw.planning, model=model.replace(num_heads=0, num_kv_heads=0))
    first = replace(draw, planning=even, batches=draw.batches[:1])
    step = next(planned_whole(first, str(plan.topology), routed=model.routed))
    ratio = plan.predicted_time / math.fsum(of.predicted_time for of in step.plans)
    return f"{text} The step takes {ratio:.3f} times as long as with heads that divide evenly."


def means(steps: Steps, peak_tflops: float | None) -> dict[str, Any]:
    """The mean figures of steps. hfu: None without a peak, that of a rank's device. wir: None where it is infinite."""
    mean: dict[str, Any] = {name: statistics.fmean(of.figures[name] for of in steps) for name in steps[0].figures}
    return mean | {
        "wir": number_or_none(mean["wir"]), "efficiency": mean["ideal_s"] / mean["total_s"],
        "tokens_per_s": mean["tokens"] / mean["total_s"],
        "hfu": hfu_of(steps, steps[0].plans[0].model, mean["total_s"], peak_tflops),
    }  # fmt: skip


def measured(
    name: str | None, steps: Steps, seconds: Sequence[float], model: TrainedModel, peak_tflops: float | None
) -> dict[str, Any]:
    """What files hold of the measured steps of a variant, by all commands that measure. name: None or NO_BALANCER where
    all are at home. seconds: of each step. An infinite WIR becomes None."""
    fbl_s, mean = statistics.fmean(seconds), means(steps, peak_tflops=None)
    return {
        "name": name,
        "topology": None if name in (None, NO_BALANCER) else str(steps[0].plans[0].topology),
        "fbl_s": fbl_s,
        "fbl_per_step_s": list(seconds),
        "wir": mean["wir"],
        "tokens_per_s": mean["tokens"] / fbl_s,
        "max_tokens": max(step.figures["max_tokens"] for step in steps),
        "hfu": hfu_of(steps, model, fbl_s, peak_tflops),
    }


def hfu_of(steps: Steps, model: TrainedModel, latency_s: float, peak_tflops: float | None) -> float | None:
    """Hardware FLOPs utilization, between 0 and 1, of steps that take so long in the mean. Attention's FLOPs count in
    full, whatever gamma the plans have. None without a peak, that of a rank's device, or where not all parameters
    train."""
    if peak_tflops is None or model.mode != "training":
        return None
    plans = (plan.on(gamma=1.0) for step in steps for plan in step.plans)
    of_block = math.fsum(work for plan in plans for work in plan.sequence_works)
    flops = model.token_passes * model.num_blocks * of_block / len(steps)
    return flops / (latency_s * steps[0].plans[0].num_ranks * peak_tflops * 1e12)


def number_or_none(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return None if math.isinf(value) else value
