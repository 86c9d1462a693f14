"""From measured latencies and plans to the figures of a run. Imports no torch.

The words are the paper's: WIR, the highest work of a rank over the lowest; FBL, forward and backward latency of a step,
that of the slowest rank; TPS, tokens per second; HFU, hardware FLOPs utilization.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from knapformer import Plan
from knapformer.tools.measure.figures import hardware_flops_utilization, number_or_none
from knapformer.tools.report import PLANNED_STEP
from knapformer.tools.simulate.variants import EQUAL_LENGTHS


class Measured(NamedTuple):
    """What was measured of one variant, an entry per timed step."""

    latencies_s: list[float]  # of the slowest rank
    losses: list[float]  # mean over the samples of all ranks and micro-batches
    gradient_norms: list[float]


@dataclass(frozen=True)
class Variant:
    """One way to run the steps, and what was measured of it."""

    name: str
    topology: str | None  # None: no balancer
    measured: Measured
    plans: Sequence[Sequence[Plan]]  # [timed step][micro-batch]; without a balancer, all at home
    own_shares: list[float] | None = None  # share of each timed step's work that is not padding; None: all
    same_samples: bool = True  # whether it computes the samples that were drawn

    def wir(self) -> float:
        """Mean over steps and micro-batches; infinite where any of them leaves a rank without work."""
        values = [plan.wir_after for plans in self.plans for plan in plans]
        return math.inf if math.inf in values else statistics.fmean(values)

    def highest_work(self) -> list[float]:
        """For each step, the sum over micro-batches of one block's FLOPs on the most loaded rank. The step's time
        follows this sum, since ranks wait for each other in every micro-batch."""
        return [math.fsum(max(plan.workload_after) for plan in plans) for plans in self.plans]

    def own_work(self) -> list[float]:
        """For each step, FLOPs of one block on its samples, without padding."""
        shares = self.own_shares or [1.0] * len(self.plans)
        return [
            share * math.fsum(work for plan in plans for work in plan.workload_after)
            for share, plans in zip(shares, self.plans, strict=True)
        ]

    def num_tokens(self) -> list[int]:
        return [sum(plan.num_tokens for plan in plans) for plans in self.plans]

    def max_tokens(self) -> int:
        """Tokens of the fullest rank in any micro-batch."""
        return max(plan.max_tokens for plans in self.plans for plan in plans)

    def tokens_moved(self) -> float:
        """Share of the tokens that a route moves to another rank."""
        return sum(plan.tokens_moved for plans in self.plans for plan in plans) / sum(self.num_tokens())


def figures(
    variant: Variant,
    baseline: Variant,
    forward_flops: Sequence[float],
    depth: int,
    peak_tflops: float | None,
    checkpointing: bool,
) -> dict[str, Any]:
    """A variant's figures, ready for JSON: an infinite WIR becomes None. forward_flops: of one block, for each step."""
    latencies_s, losses, _ = variant.measured
    num_ranks = variant.plans[0][0].num_ranks
    fbl = statistics.fmean(latencies_s)
    # A variant with other samples does more or less work in a step: its gains are scaled by the ratio of work.
    works = [of / base for base, of in zip(baseline.own_work(), variant.own_work(), strict=True)]
    work = math.fsum(variant.own_work()) / math.fsum(baseline.own_work())
    if variant.same_samples:
        work, works = 1.0, [1.0] * len(works)

    def gains(before: Sequence[float], after: Sequence[float]) -> list[float]:
        return [share * a / b for a, b, share in zip(before, after, works, strict=True)]

    ratios = gains(baseline.measured.latencies_s, latencies_s)
    promises = gains(baseline.highest_work(), variant.highest_work())
    promised = work * math.fsum(baseline.highest_work()) / math.fsum(variant.highest_work())
    speed_up = work * statistics.fmean(baseline.measured.latencies_s) / fbl
    flops = statistics.fmean(forward_flops)
    return {
        "name": variant.name,
        "topology": variant.topology,
        "wir": number_or_none(variant.wir()),
        "fbl_s": fbl,
        "fbl_median_s": statistics.median(latencies_s),
        "fbl_per_step_s": latencies_s,
        "tokens_per_s": statistics.fmean(variant.num_tokens()) / fbl,
        "max_tokens_per_rank": variant.max_tokens(),
        "hfu": hardware_flops_utilization(flops, depth, fbl, num_ranks, peak_tflops, checkpointing),
        "speed_up": speed_up,
        "speed_up_median": statistics.median(ratios),
        "promised_speed_up": promised,
        "share_of_promise": speed_up / promised,
        "share_of_promise_median": statistics.median(r / p for r, p in zip(ratios, promises, strict=True)),
        "tokens_moved": variant.tokens_moved(),
        "work": work,
        "loss_per_step": losses,
        **(differences(variant, baseline) if variant.same_samples else {}),
    }


def differences(variant: Variant, baseline: Variant) -> dict[str, float]:
    """The largest relative difference over the steps, of loss and of gradient norm, which have to be the same."""

    def largest(of: Callable[[Measured], list[float]]) -> float:
        pairs = zip(of(variant.measured), of(baseline.measured), strict=True)
        return max(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)

    return {"loss_difference": largest(lambda m: m.losses), "gradient_difference": largest(lambda m: m.gradient_norms)}


def sentences(all_figures: Sequence[dict[str, Any]]) -> str:
    """Sentences on what was gained, one a line. The first of all_figures are those without a balancer."""
    baseline, *others = all_figures
    topologies = [of for of in others if of["topology"] is not None and of["name"] != PLANNED_STEP]
    by_name = {of["name"]: of for of in others}
    lines = []
    if topologies:
        best = max(topologies, key=lambda of: float(of["speed_up"]))
        lines.append(_gain(best, baseline, f"with {best['topology']}"))
    if PLANNED_STEP in by_name:
        lines.append(_gain(by_name[PLANNED_STEP], baseline, "with the whole step planned"))
    if EQUAL_LENGTHS in by_name:
        equal, best = by_name[EQUAL_LENGTHS], by_name.get(PLANNED_STEP, topologies[0] if topologies else baseline)
        ratio = best["fbl_s"] / equal["fbl_s"]
        lines.append(f"As much work in sequences of equal length takes {equal['fbl_s']:.3g} s: {ratio:.3f} of it.")
    compared = [of for of in all_figures if "loss_difference" in of]
    loss, gradient = (max(of[name] for of in compared) for name in ("loss_difference", "gradient_difference"))
    lines.append(
        f"The loss is the same, {baseline['loss_per_step'][0]:.6g} in the first step: relative differences of at most "
        f"{loss:.1e}, of the gradient's norm {gradient:.1e}."
    )
    return "\n".join(lines)


def _gain(of: dict[str, Any], baseline: dict[str, Any], how: str) -> str:
    step = f"a step takes {of['fbl_s']:.3g} s instead of {baseline['fbl_s']:.3g} s"
    if of["promised_speed_up"] < 1.02:
        change = f"{abs(1 - 1 / of['speed_up']):.1%} {'less' if of['speed_up'] >= 1 else 'more'}"
        return f"The ranks' work is even already, there was nothing to gain: {how} {step}, {change}."
    if of["speed_up"] >= 1.005:
        promise = f"{of['share_of_promise']:.0%} of what its plans promise"
        return f"The balancer gained: {how} {step}, {of['speed_up']:.2f} times as fast, {promise}."
    factor = of["promised_speed_up"]
    return f"The balancer gained nothing: {how} {step}, though its plans promise a factor of {factor:.2f}."
