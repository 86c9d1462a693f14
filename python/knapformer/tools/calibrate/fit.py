"""From measured times to a calibration, and warnings where it should not be trusted. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from knapformer import StateError, TrainedModel, WorkloadFit, WorkloadModel, fit_workload
from knapformer.calibration import Calibration, ExchangeCost, FixedCost

GAMMA_RANGE = (0.1, 10.0)  # attention's FLOPs cost some factor of those of matrix products, but not a hundred
MIN_SPAN = 8.0  # longest over shortest: attention's share has to change
MIN_ATTENTION = 0.10  # attention's share of the time at the longest length: below it, noise hides gamma
MAX_NOISE = 0.10  # median over the lengths of the relative spread between repeats
MAX_ERROR = 0.10  # relative RMS of the fit
MAX_EXCHANGE_ERROR = 0.25  # the same for an all-to-all: one line is fitted over three orders of magnitude


def fit_warnings(lengths: Sequence[int], fit: WorkloadFit, noise: float, d_model: int, mask: str = "full") -> list[str]:
    """The reasons why a fit is poor, one sentence each; none where it is good."""
    low, high = min(lengths), max(lengths)
    whole, tokens = (WorkloadModel(gamma).work(high, d_model, mask) for gamma in (max(fit.gamma, 0.0), 0.0))
    attention, error = 1 - tokens / whole, fit.relative_rms_error
    poor = (
        (high < MIN_SPAN * low, f"lengths from {low} to {high}, expected the longest {MIN_SPAN:g} times the shortest"),
        (
            attention < MIN_ATTENTION,
            f"attention is {attention:.1%} of the time at {high} tokens, expected at least {MIN_ATTENTION:.0%}: "
            "measure longer lengths to tell gamma",
        ),
        (noise > MAX_NOISE, f"repeats spread by {noise:.1%} of their median, expected at most {MAX_NOISE:.0%}"),
        (error > MAX_ERROR, f"the fit is off by {error:.1%} (RMS), expected at most {MAX_ERROR:.0%}"),
        (
            not GAMMA_RANGE[0] <= fit.gamma <= GAMMA_RANGE[1],
            f"gamma is {fit.gamma:.3g}, expected {GAMMA_RANGE[0]:g} to {GAMMA_RANGE[1]:g}",
        ),
    )
    return [f"poor fit: {why}" for is_poor, why in poor if is_poor]


def error_warnings(what: str, relative_rms_error: float, at_most: float = MAX_ERROR) -> list[str]:
    """As `fit_warnings`, for what else is fitted."""
    if relative_rms_error <= at_most:
        return []
    return [f"poor fit: {what} off by {relative_rms_error:.0%} (RMS), expected at most {at_most:.0%}"]


def fit_exchange(num_bytes: Sequence[float], seconds: Sequence[float], num_ranks: int) -> ExchangeCost:
    """latency_s and bytes_per_s by least squares, each size weighted by its time: sizes span orders of magnitude, and
    with equal relative errors the noise of the smallest would decide about the rate.

    num_bytes: sent by a rank in one all-to-all. Raises StateError where the times do not grow with the bytes.
    """
    # s = a + b n: minimises sum (a + b n - s)^2 / s.
    pairs = list(zip(num_bytes, seconds, strict=True))
    uu, uv, vv = (math.fsum(n**power / s for n, s in pairs) for power in range(3))
    ut, vt = len(pairs), math.fsum(num_bytes)
    det = uu * vv - uv * uv
    latency_s = max(0.0, (ut * vv - vt * uv) / det) if det > 0 else 0.0
    seconds_per_byte = (vt - latency_s * uv) / vv
    if not seconds_per_byte > 0:
        raise StateError("all-to-all: its times do not grow with the bytes; measure on an idle machine")
    squares = math.fsum(((latency_s + seconds_per_byte * n) / s - 1) ** 2 for n, s in pairs)
    return ExchangeCost(num_ranks, latency_s, 1 / seconds_per_byte, math.sqrt(squares / len(pairs)))


def fit_fixed(predicted_s: Sequence[float], measured_s: Sequence[float], num_ranks: int) -> FixedCost:
    """What whole steps took beyond their predictions, by least squares of relative errors; at least 0."""
    # (p + f) / m is to be 1: minimises sum (f / m - (1 - p / m))^2.
    pairs = [(1 / m, 1 - p / m) for p, m in zip(predicted_s, measured_s, strict=True)]
    fixed_s = max(0.0, math.fsum(u * v for u, v in pairs) / math.fsum(u * u for u, _ in pairs))
    squares = math.fsum((fixed_s * u - v) ** 2 for u, v in pairs)
    return FixedCost(num_ranks, fixed_s, math.sqrt(squares / len(pairs)))


def calibration_of(
    lengths: Sequence[int], latencies_s: Sequence[float], spreads: Sequence[float], d_model: int, *, recomputes: bool,
    mode: str = "training", mask: str = "full", device: str | None = None, overlaps_attention: bool = True,
) -> Calibration:  # fmt: skip
    """latencies_s: of one block over one sequence of each length; spreads: relative, between their repeats.

    Raises ArgumentError for fewer than two distinct lengths, StateError where the best k or gamma is negative.
    """
    fit = fit_workload(lengths, latencies_s, d_model, mask)
    if fit.gamma < 0:
        raise StateError(
            f"poor fit: the best gamma is {fit.gamma:.3g}, expected one >= 0: attention does not show in the times; "
            "measure longer lengths, or on an idle machine"
        )
    noise, passes = statistics.median(spreads), TrainedModel(recomputes=recomputes, mode=mode)
    return Calibration(
        fit.gamma * passes.token_passes / passes.attention_passes, fit.seconds_per_flop, d_model, recomputes,
        fit.relative_rms_error, fit.relative_rms_error_without_gamma, noise, mask=mask, device=device,
        warnings=tuple(fit_warnings(lengths, fit, noise, d_model, mask)), longest=max(lengths), mode=mode,
        overlaps_attention=overlaps_attention,
    )  # fmt: skip
