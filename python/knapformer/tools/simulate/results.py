"""From measured latencies and plans to the figures of a run. Imports no torch.

The words are the paper's: WIR, the highest work of a rank over the lowest; FBL, forward and backward latency of a step,
that of the slowest rank; TPS, tokens per second; HFU, hardware FLOPs utilization.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knapformer import Plan
from knapformer.tools.measure.figures import hardware_flops_utilization, number_or_none
from knapformer.tools.report import NO_BALANCER


@dataclass(frozen=True)
class Variant:
    """One way to run the steps, and what was measured of it. Lists hold one entry per timed step."""

    topology: str | None  # None: no balancer
    latencies_s: list[float]  # of the slowest rank
    plans: list[Plan]  # for no balancer any topology's: their state before is what counts

    @property
    def name(self) -> str:
        return self.topology or NO_BALANCER

    def wir(self) -> float:
        """Mean over steps; infinite where in some step a rank had no work."""
        values = [plan.wir_after if self.topology else plan.wir_before for plan in self.plans]
        return math.inf if math.inf in values else statistics.fmean(values)

    def highest_work(self) -> list[float]:
        """For each step, FLOPs of one block on the most loaded rank: what the step's time follows."""
        return [max(plan.workload_after if self.topology else plan.workload_before) for plan in self.plans]

    def tokens_moved(self) -> float:
        """Share of the tokens that one route takes to another rank."""
        if self.topology is None:
            return 0.0
        return sum(plan.tokens_moved for plan in self.plans) / sum(plan.num_tokens for plan in self.plans)


def figures(
    variant: Variant,
    baseline: Variant,
    forward_flops: Sequence[float],
    depth: int,
    peak_tflops: float | None,
    checkpointing: bool,
) -> dict[str, Any]:
    """Of one variant, ready for JSON: an infinite WIR is None there. forward_flops: of one block, for each step."""
    num_ranks = variant.plans[0].num_ranks
    fbl = statistics.fmean(variant.latencies_s)
    ratios = [before / after for before, after in zip(baseline.latencies_s, variant.latencies_s, strict=True)]
    promises = [before / after for before, after in zip(baseline.highest_work(), variant.highest_work(), strict=True)]
    promised = math.fsum(baseline.highest_work()) / math.fsum(variant.highest_work())
    speed_up = statistics.fmean(baseline.latencies_s) / fbl
    flops = statistics.fmean(forward_flops)
    return {
        "topology": variant.topology,
        "wir": number_or_none(variant.wir()),
        "fbl_s": fbl,
        "fbl_median_s": statistics.median(variant.latencies_s),
        "fbl_per_step_s": variant.latencies_s,
        "tokens_per_s": statistics.fmean(plan.num_tokens for plan in variant.plans) / fbl,
        "hfu": hardware_flops_utilization(flops, depth, fbl, num_ranks, peak_tflops, checkpointing),
        "speed_up": speed_up,
        "speed_up_median": statistics.median(ratios),
        "promised_speed_up": promised,
        "share_of_promise": speed_up / promised,
        "share_of_promise_median": statistics.median(r / p for r, p in zip(ratios, promises, strict=True)),
        "tokens_moved": variant.tokens_moved(),
    }


def sentence(all_figures: Sequence[dict[str, Any]]) -> str:
    """What was gained, in one line of words. The first figures are those without a balancer."""
    baseline, *balanced = all_figures
    best = max(balanced, key=lambda f: float(f["speed_up"]))
    step = f"a step takes {best['fbl_s']:.3g} s instead of {baseline['fbl_s']:.3g} s"
    promise = f"{best['share_of_promise']:.0%} of what its plans promise"
    if best["promised_speed_up"] < 1.02:
        return (
            f"The ranks' work is even already, there was nothing to gain: with {best['topology']} {step}, "
            f"{abs(1 - 1 / best['speed_up']):.1%} {'less' if best['speed_up'] >= 1 else 'more'}."
        )
    if best["speed_up"] >= 1.005:
        return f"The balancer gained: with {best['topology']} {step}, {best['speed_up']:.2f} times as fast, {promise}."
    return (
        f"The balancer gained nothing: with {best['topology']} {step}, though its plans promise a factor of "
        f"{best['promised_speed_up']:.2f}."
    )
