"""The fit of the workload formula to measured times of a block. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from knapformer._core import ArgumentError, StateError, WorkloadModel


@dataclass(frozen=True)
class WorkloadFit:
    """k and gamma of t = k (24 l d^2 + gamma 4 l^2 d), fitted by least squares of the relative errors."""

    seconds_per_flop: float  # k
    gamma: float  # the cost of a FLOP of attention over that of a FLOP of the matrix products
    relative_rms_error: float  # root mean square of (fitted - measured) / measured
    relative_rms_error_without_gamma: float  # the same for gamma 1 and the k that is best with it


def fit_workload(
    seq_lens: Iterable[SupportsIndex], latencies_s: Iterable[SupportsFloat], d_model: SupportsIndex, mask: str = "full"
) -> WorkloadFit:
    """Fits k and gamma to measured latencies (seconds) of one block at these lengths (tokens), by least squares.

    Raises ArgumentError for fewer than two distinct lengths, or latencies that are not positive and finite; StateError
    where the best k is not positive.
    """
    lens, seconds = list(seq_lens), list(map(float, latencies_s))
    if len(lens) != len(seconds):
        raise ArgumentError(f"latencies_s: got {len(seconds)}, expected one for each of the {len(lens)} lengths")
    for t in seconds:
        if not 0 < t < math.inf:
            raise ArgumentError(f"latencies_s: got {t}, expected positive finite numbers of seconds")
    # Relative errors are those of 1 = k (x + gamma y), with the FLOPs of each kind over the latency. k and k gamma
    # follow from the normal equations. Both columns are scaled to length 1, so that the conditioning depends only on
    # the angle between them.
    x, both = (
        [WorkloadModel(gamma).work(n, d_model, mask) / t for n, t in zip(lens, seconds, strict=True)]
        for gamma in (0.0, 1.0)
    )
    if len(set(lens)) < 2 or min(x) <= 0:
        raise ArgumentError(f"seq_lens: got {lens} of width {d_model}, expected two distinct lengths, all at least 1")
    y = [whole - part for whole, part in zip(both, x, strict=True)]
    x_norm, y_norm = math.hypot(*x), math.hypot(*y)
    cosine = math.fsum(a * b for a, b in zip(x, y, strict=True)) / x_norm / y_norm
    x_sum, y_sum = math.fsum(x) / x_norm, math.fsum(y) / y_norm
    k = (x_sum - cosine * y_sum) / (1 - cosine**2) / x_norm
    k_gamma = (y_sum - cosine * x_sum) / (1 - cosine**2) / y_norm
    if not k > 0:
        raise StateError(
            f"fit_workload: the best k is {k} s per FLOP, expected a positive one: the latencies do not grow with the "
            "lengths as the workload model says; measure more lengths, or with less noise"
        )

    def error(k: float, k_gamma: float) -> float:
        return math.sqrt(math.fsum((k * a + k_gamma * b - 1) ** 2 for a, b in zip(x, y, strict=True)) / len(x))

    k_alone = math.fsum(both) / math.fsum(a * a for a in both)
    return WorkloadFit(k, k_gamma / k, error(k, k_gamma), error(k_alone, k_alone))
