"""From measured seconds of every rank to the figures of a step. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from knapformer import Cluster, Plan, StepTime, TrainedModel, predict_step
from knapformer.tools.measure.figures import forward_flops, hardware_flops_utilization, number_or_none
from knapformer.tools.report import PLANNED_STEP

# Standard deviation over mean of the ranks' planned work, below which no correlation is computed.
_MIN_SPREAD_OF_WORK = 0.01


class RankSeconds(NamedTuple):
    """What a rank computes in a step, over all blocks: forward, recompute and backward."""

    token_s: float = 0.0
    whole_attention_s: float = 0.0  # on sequences that lie whole there
    shared_attention_s: float = 0.0


@dataclass(frozen=True)
class Variant:
    """One way to place the sequences, and what was measured of it: for each step, each of its micro-batches."""

    name: str | None  # the topology; None: every sequence at home
    plans: list[list[Plan]]
    measured: list[list[list[RankSeconds]]]  # of each rank
    planned_whole: bool = False  # the micro-batches of a step are planned at once

    def micro_batches(self, cluster: Cluster, model: TrainedModel) -> list[list[StepTime]]:
        """The measured compute, with the waits and communication that the cluster model adds."""
        # The model wants seconds of one block's forward pass.
        layers, attention = model.num_blocks * model.token_passes, model.num_blocks * model.attention_passes

        def time_of(plan: Plan, ranks: Sequence[RankSeconds]) -> StepTime:
            of_block = [
                (r.token_s / layers, r.whole_attention_s / attention, r.shared_attention_s / attention) for r in ranks
            ]
            return predict_step(plan, cluster, model.replace(routed=plan.model.routed), of_block)

        return [
            [time_of(*of) for of in zip(plans, measured, strict=True)]
            for plans, measured in zip(self.plans, self.measured, strict=True)
        ]

    def figures(self, cluster: Cluster, model: TrainedModel, mask: str, peak_tflops: float | None) -> dict[str, Any]:
        """Means over the steps, ready for JSON: infinite or undefined figures become None. Work and seconds of ranks
        are listed by micro-batch, all steps one after another."""
        times = self.micro_batches(cluster, model)
        plans = [plan for of_step in self.plans for plan in of_step]
        of_ranks = [ranks for of_step in self.measured for ranks in of_step]
        seconds = [[sum(rank) for rank in ranks] for ranks in of_ranks]
        work = [plan.workload_after for plan in plans]
        busy = [k for k, plan in enumerate(plans) if plan.num_tokens > 0]  # a planned step may have empty micro-batches
        busy_work, busy_seconds = ([of[k] for k in busy] for of in (work, seconds))
        num_steps, num_ranks = len(self.plans), plans[0].num_ranks
        fbl_s = [math.fsum(time.total_s for time in of_step) for of_step in times]
        mean_s = statistics.fmean(fbl_s)

        def per_step(values: Iterable[float]) -> float:
            return math.fsum(values) / num_steps

        all_times = [time for of_step in times for time in of_step]
        flops = per_step(forward_flops(plan, mask) for plan in plans)
        return {
            "name": self.name if not self.planned_whole else f"{PLANNED_STEP}, {self.name}",
            "topology": self.name,
            "fbl_s": mean_s,
            "fbl_per_step_s": fbl_s,
            **{term: per_step(time.terms[term] for time in all_times) for term in StepTime.labels()},
            "slowest_rank_s": per_step(max(of) for of in seconds),
            "wir": number_or_none(statistics.fmean(plans[k].wir_after for k in busy)),
            "measured_wir": number_or_none(statistics.fmean(_max_over_min(of) for of in busy_seconds)),
            "tokens_per_s": per_step(plan.num_tokens for plan in plans) / mean_s,
            "max_tokens_per_rank": max(plan.max_tokens for plan in plans),
            "exchanged_bytes": per_step(time.route_bytes.total + time.attention_bytes.total for time in all_times),
            "fsdp_bytes": per_step(time.fsdp_bytes for time in all_times),
            "hfu": hardware_flops_utilization(
                flops, model.num_blocks, mean_s, num_ranks, peak_tflops, model.recomputes
            ),
            "correlation": correlation(busy_work, busy_seconds),
            "spread": spread(busy_work, busy_seconds),
            "work_per_rank": work,
            "seconds_per_rank": of_ranks,
        }


def correlation(work: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> float | None:
    """Correlation of planned work and measured seconds, each over its micro-batch's mean; None where one is even."""
    planned, measured = ([v / statistics.fmean(of) for of in values for v in of] for values in (work, seconds))
    if statistics.pstdev(planned) < _MIN_SPREAD_OF_WORK:
        return None
    return None if statistics.pstdev(measured) == 0 else statistics.correlation(planned, measured)


def spread(work: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> float:
    """How much the measured seconds per planned FLOP differ between ranks: standard deviation over mean."""
    pairs = (pair for of in zip(work, seconds, strict=True) for pair in zip(*of, strict=True))
    per_flop = [s / w for w, s in pairs if w > 0]
    return statistics.pstdev(per_flop) / statistics.fmean(per_flop)


def _max_over_min(values: Sequence[float]) -> float:
    return max(values) / min(values) if min(values) > 0 else math.inf
