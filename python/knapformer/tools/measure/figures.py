"""Calculations that all measuring commands share. Needs no torch."""

from __future__ import annotations

import math

from knapformer import Plan, TrainedModel, WorkloadModel

GAMMA_RANGE = (0.1, 10.0)

# Peak of a rank's accelerator by cluster name: dense bf16 without sparsity, TFLOP/s, from data sheets.
PEAK_TFLOPS = {"h100": 989.0, "h200": 989.0, "published": 989.0, "h100-pcie": 756.0, "b200": 2250.0, "a100": 312.0}


def plausible(gamma: float) -> bool:
    """Whether a fitted gamma may decide plans.

    Attention's FLOPs cost some factor of those of matrix products, but not a hundred: a value that is far off was
    measured on a disturbed machine.
    """
    return GAMMA_RANGE[0] <= gamma <= GAMMA_RANGE[1]


def forward_flops(plan: Plan, mask: str) -> float:
    """FLOPs of one block on all tokens of a plan. Attention's count in full, whatever gamma the plan has."""
    in_full = WorkloadModel(gamma=1.0)
    return sum(in_full.work(length, plan.d_model, mask) for lens in plan.seq_lens for length in lens)


def equal_ratios(low: float, high: float, count: int) -> list[int]:
    """Lengths from low to high, each by the same factor longer than the one before."""
    return [max(1, round(low * (high / low) ** (i / (count - 1)))) for i in range(count)]


def hardware_flops_utilization(
    forward_flops: float, depth: int, latency_s: float, num_ranks: int, peak_tflops: float | None, checkpointing: bool
) -> float | None:
    """forward_flops: of one block on all ranks' tokens in a step. Between 0 and 1; None without a peak."""
    if peak_tflops is None:
        return None
    passes = TrainedModel(recomputes=checkpointing).token_passes
    return passes * forward_flops * depth / (latency_s * num_ranks * peak_tflops * 1e12)


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """The divisor and the unit with which to show a number: (1e9, "GB") for some billions of "B"."""
    for exponent, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return 10.0**exponent, prefix + unit
    return 1.0, unit


def number_or_none(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return None if math.isinf(value) else value
