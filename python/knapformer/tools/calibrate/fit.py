"""From measured times to a calibration, and warnings where it should not be trusted. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from knapformer import Cluster, Plan, StateError, TrainedModel, WorkloadFit, WorkloadModel, fit_workload, predict_step
from knapformer.calibration import Calibration, ExchangeCost, FixedCost

GAMMA_RANGE = (0.1, 10.0)  # attention's FLOPs cost some factor of those of matrix products, but not a hundred
MIN_LENGTHS = 4  # two numbers are fitted
MIN_SPAN = 8.0  # longest over shortest: attention's share has to change
MIN_ATTENTION = 0.10  # attention's share of the time at the longest length: below it, noise hides gamma
MAX_NOISE = 0.10  # median over the lengths of the relative spread between repeats
MAX_ERROR = 0.10  # relative RMS of the fit
MAX_EXCHANGE_ERROR = 0.25  # the same for an all-to-all: one line is fitted over three orders of magnitude


def fit_warnings(lengths: Sequence[int], fit: WorkloadFit, noise: float, d_model: int, mask: str = "full") -> list[str]:
    """The reasons why a fit is poor, one sentence each; none where it is good."""
    found = []
    distinct = sorted(set(lengths))
    if len(distinct) < MIN_LENGTHS:
        found.append(f"{len(distinct)} lengths for two numbers, expected at least {MIN_LENGTHS}")
    if distinct[-1] < MIN_SPAN * distinct[0]:
        found.append(
            f"lengths from {distinct[0]} to {distinct[-1]}, expected the longest {MIN_SPAN:g} times the shortest"
        )
    whole, tokens = (WorkloadModel(gamma).work(distinct[-1], d_model, mask) for gamma in (max(fit.gamma, 0.0), 0.0))
    if (attention := 1 - tokens / whole) < MIN_ATTENTION:
        found.append(
            f"attention is {attention:.1%} of the time at {distinct[-1]} tokens, expected at least "
            f"{MIN_ATTENTION:.0%}: measure longer lengths to tell gamma"
        )
    if noise > MAX_NOISE:
        found.append(f"repeats spread by {noise:.1%} of their median, expected at most {MAX_NOISE:.0%}")
    if fit.relative_rms_error > MAX_ERROR:
        found.append(f"the fit is off by {fit.relative_rms_error:.1%} (RMS), expected at most {MAX_ERROR:.0%}")
    if not GAMMA_RANGE[0] <= fit.gamma <= GAMMA_RANGE[1]:
        found.append(f"gamma is {fit.gamma:.3g}, expected {GAMMA_RANGE[0]:g} to {GAMMA_RANGE[1]:g}")
    return [f"poor fit: {why}" for why in found]


def exchange_warnings(name: str, cost: ExchangeCost) -> list[str]:
    """As `fit_warnings`, for the all-to-all of a kind of group: name is "node" or "network"."""
    if cost.relative_rms_error <= MAX_EXCHANGE_ERROR:
        return []
    return [
        f"poor fit: the {name}'s all-to-all is off by {cost.relative_rms_error:.0%} (RMS) from latency and rate, "
        f"expected at most {MAX_EXCHANGE_ERROR:.0%}"
    ]


def token_backward(calibration: Calibration, all_train: Calibration) -> float:
    """What a backward pass over the per-token layers costs in mode "lora", in forward passes.

    all_train: calibration of the same blocks, whose parameters all train.
    """
    passes = TrainedModel(recomputes=all_train.recomputes).token_passes  # of which two are the backward pass
    return passes * calibration.seconds_per_flop / all_train.seconds_per_flop - (passes - 2)


def step_warnings(name: str, relative_rms_error: float) -> list[str]:
    """As `fit_warnings`, for whole steps. name: which steps they are."""
    if relative_rms_error <= MAX_ERROR:
        return []
    return [f"poor fit: {name} are off by {relative_rms_error:.0%} (RMS), expected at most {MAX_ERROR:.0%}"]


@dataclass(frozen=True)
class MeasuredSteps:
    """Whole steps in which all ranks do the same.

    apart: plans in which every rank computes its own sequences; apart_s: their measured seconds. shared, shared_s: the
    same for plans of the same lengths whose ranks share sequences; empty where a rank had nobody to share with.
    """

    apart: Sequence[Plan]
    apart_s: Sequence[float]
    shared: Sequence[Plan] = ()
    shared_s: Sequence[float] = ()


def with_steps(calibration: Calibration, steps: MeasuredSteps, cluster: Cluster) -> Calibration:
    """`calibration` with what whole steps took beyond the prediction from its blocks and exchanges: a fixed time, and a
    wait in each exchange inside the node. cluster: as calibrated so far; its own fixed time is ignored."""
    num_ranks = steps.apart[0].num_ranks
    cluster = cluster.replace(fixed_s=0.0)

    def predicted_s(plans: Sequence[Plan]) -> list[float]:
        return [predict_step(plan, cluster).total_s for plan in plans]

    def sharing_s() -> list[float]:
        """What sharing adds to a step, as predicted."""
        pairs = zip(predicted_s(steps.shared), predicted_s(steps.apart), strict=True)
        return [shared_s - apart_s for shared_s, apart_s in pairs]

    node = calibration.node
    if steps.shared and node is not None:
        added_s, little_s, latency_s = sharing_s(), 1e-6, cluster.node_latency_s
        expected_s = [apart_s + more_s for apart_s, more_s in zip(steps.apart_s, added_s, strict=True)]
        beyond_s = fit_fixed(expected_s, steps.shared_s, num_ranks).seconds
        cluster = cluster.replace(node_latency_s=latency_s + little_s)
        # A slightly longer latency shows how many exchanges a step waits for.
        num_exchanges = (statistics.fmean(sharing_s()) - statistics.fmean(added_s)) / little_s
        node = replace(node, wait_s=beyond_s / num_exchanges if num_exchanges > 0 else 0.0)
        cluster = cluster.replace(node_latency_s=latency_s + node.wait_s)
    fixed = fit_fixed(predicted_s(steps.apart), steps.apart_s, num_ranks)
    warnings = step_warnings("whole steps", fixed.relative_rms_error)
    if steps.shared:
        pairs = zip(predicted_s(steps.shared), steps.shared_s, strict=True)
        squares = [((of_step + fixed.seconds) / s - 1) ** 2 for of_step, s in pairs]
        warnings += step_warnings("steps with shared sequences", math.sqrt(statistics.fmean(squares)))
    return replace(calibration, fixed=fixed, node=node, warnings=(*calibration.warnings, *warnings))


def fit_exchange(num_bytes: Sequence[float], seconds: Sequence[float], num_ranks: int) -> ExchangeCost:
    """latency_s and bytes_per_s by least squares of relative errors: sizes span orders of magnitude.

    num_bytes: sent by a rank in one all-to-all. Raises StateError where the times do not grow with the bytes.
    """
    # s = a + b n, each row divided by s: minimises sum (a / s + b n / s - 1)^2.
    rows = [(1 / s, n / s) for n, s in zip(num_bytes, seconds, strict=True)]
    uu, uv, vv = (math.fsum(terms) for terms in zip(*((u * u, u * v, v * v) for u, v in rows), strict=True))
    ut, vt = (math.fsum(column) for column in zip(*rows, strict=True))
    det = uu * vv - uv * uv
    latency_s = max(0.0, (ut * vv - vt * uv) / det) if det > 0 else 0.0
    seconds_per_byte = (vt - latency_s * uv) / vv
    if not seconds_per_byte > 0:
        raise StateError("all-to-all: its times do not grow with the bytes; measure on an idle machine")
    squares = math.fsum((latency_s * u + seconds_per_byte * v - 1) ** 2 for u, v in rows)
    return ExchangeCost(num_ranks, latency_s, 1 / seconds_per_byte, math.sqrt(squares / len(rows)))


def fit_fixed(predicted_s: Sequence[float], measured_s: Sequence[float], num_ranks: int) -> FixedCost:
    """What whole steps took beyond their predictions, by least squares of relative errors; at least 0."""
    # (p + f) / m is to be 1: minimises sum (f / m - (1 - p / m))^2.
    inverse = [1 / m for m in measured_s]
    missing = [1 - p / m for p, m in zip(predicted_s, measured_s, strict=True)]
    fixed_s = math.fsum(u * v for u, v in zip(inverse, missing, strict=True)) / math.fsum(u * u for u in inverse)
    fixed_s = max(0.0, fixed_s)
    squares = math.fsum((fixed_s * u - v) ** 2 for u, v in zip(inverse, missing, strict=True))
    return FixedCost(num_ranks, fixed_s, math.sqrt(squares / len(inverse)))


def calibration_of(
    lengths: Sequence[int],
    latencies_s: Sequence[float],
    spreads: Sequence[float],
    d_model: int,
    *,
    recomputes: bool,
    mode: str = "training",
    mask: str = "full",
    device: str | None = None,
) -> Calibration:
    """latencies_s: of one block over one sequence of each length; spreads: relative, between their repeats.

    Raises ArgumentError for fewer than two distinct lengths, StateError where the best k or gamma is negative.
    """
    fit = fit_workload(lengths, latencies_s, d_model, mask)
    if fit.gamma < 0:
        raise StateError(
            f"poor fit: the best gamma is {fit.gamma:.3g}, expected one >= 0: attention does not show in the times; "
            "measure longer lengths, or on an idle machine"
        )
    noise = statistics.median(spreads)
    passes = TrainedModel(recomputes=recomputes, mode=mode)
    return Calibration(
        gamma=fit.gamma * passes.token_passes / passes.attention_passes,
        seconds_per_flop=fit.seconds_per_flop,
        d_model=d_model,
        recomputes=recomputes,
        relative_rms_error=fit.relative_rms_error,
        relative_rms_error_without_gamma=fit.relative_rms_error_without_gamma,
        noise=noise,
        mask=mask,
        warnings=tuple(fit_warnings(lengths, fit, noise, d_model, mask)),
        device=device,
        longest=max(lengths),
        mode=mode,
    )
