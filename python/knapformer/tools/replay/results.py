"""From measured seconds of every rank to the figures of a step. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from knapformer import Cluster, Plan, StepTime, TrainedModel, predict_step
from knapformer.tools.measure.figures import forward_flops, hardware_flops_utilization, number_or_none

# Planned work that differs less than this between ranks has nothing to correlate with.
_MIN_SPREAD_OF_WORK = 0.01


class RankSeconds(NamedTuple):
    """What a rank computes in a step, over all blocks: forward, recompute and backward."""

    token_s: float = 0.0
    whole_attention_s: float = 0.0  # on sequences that lie whole there
    shared_attention_s: float = 0.0


@dataclass(frozen=True)
class Variant:
    """One way to place the sequences, and what was measured of it, for each step."""

    name: str | None  # the topology; None: every sequence at home
    plans: list[Plan]
    measured: list[list[RankSeconds]]  # of each rank

    def steps(self, cluster: Cluster, model: TrainedModel) -> list[StepTime]:
        """Measured compute, and around it what the cluster model says of waits and communication."""
        # The model wants seconds of one block's forward pass.
        layers, attention = model.num_blocks * model.token_passes, model.num_blocks * model.attention_passes
        of_block = [
            [(r.token_s / layers, r.whole_attention_s / attention, r.shared_attention_s / attention) for r in ranks]
            for ranks in self.measured
        ]
        return [predict_step(plan, cluster, model, of) for plan, of in zip(self.plans, of_block, strict=True)]

    def figures(self, cluster: Cluster, model: TrainedModel, mask: str, peak_tflops: float | None) -> dict[str, Any]:
        """Means over the steps, ready for JSON: what is infinite or undefined is None there."""
        steps = self.steps(cluster, model)
        seconds = [[sum(rank) for rank in ranks] for ranks in self.measured]
        work = [plan.workload_after for plan in self.plans]
        fbl_s = [step.total_s for step in steps]
        mean_s = statistics.fmean(fbl_s)
        num_tokens = statistics.fmean(plan.num_tokens for plan in self.plans)
        flops, num_ranks = statistics.fmean(forward_flops(plan, mask) for plan in self.plans), self.plans[0].num_ranks
        return {
            "topology": self.name,
            "fbl_s": mean_s,
            "fbl_per_step_s": fbl_s,
            **{term: statistics.fmean(step.terms[term] for step in steps) for term in StepTime.labels()},
            "slowest_rank_s": statistics.fmean(max(of) for of in seconds),
            "wir": number_or_none(statistics.fmean(plan.wir_after for plan in self.plans)),
            "measured_wir": number_or_none(statistics.fmean(_max_over_min(of) for of in seconds)),
            "tokens_per_s": num_tokens / mean_s,
            "hfu": hardware_flops_utilization(
                flops, model.num_blocks, mean_s, num_ranks, peak_tflops, model.recomputes
            ),
            "correlation": correlation(work, seconds),
            "spread": spread(work, seconds),
            "work_per_rank": work,
            "seconds_per_rank": self.measured,
        }


def correlation(work: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> float | None:
    """Planned work with measured seconds of the ranks, each over its step's mean. None where the work is even."""
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
