"""The fit of k and gamma: against what made the latencies, and against steps away from it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from knapformer import ArgumentError, StateError, WorkloadModel, fit_workload


@pytest.mark.parametrize("gamma", [0.0, 0.385, 1.0, 2.5])
def test_it_recovers_what_made_the_latencies(gamma: float) -> None:
    lens = [256, 1024, 4096, 8192, 16384, 25600]
    fit = fit_workload(lens, [2.5e-15 * WorkloadModel(gamma).work(length, 3072) for length in lens], 3072)
    assert fit.gamma == pytest.approx(gamma, abs=1e-9)
    assert fit.seconds_per_flop == pytest.approx(2.5e-15, rel=1e-9)
    assert fit.relative_rms_error < 1e-9
    assert gamma == 1 or fit.relative_rms_error_without_gamma > 0.01


def test_no_step_away_from_it_lowers_the_relative_error() -> None:
    lens, seconds = [500, 1000, 2000, 4000, 8000], [0.011, 0.019, 0.047, 0.099, 0.31]

    def error(k: float, gamma: float) -> float:
        work = [WorkloadModel(gamma).work(length, 1024) for length in lens]
        return math.sqrt(sum((k * w / t - 1) ** 2 for w, t in zip(work, seconds, strict=True)) / len(lens))

    fit = fit_workload(lens, seconds, 1024)
    best = error(fit.seconds_per_flop, fit.gamma)
    assert fit.relative_rms_error == pytest.approx(best, rel=1e-9)
    for dk in (0.99, 1.0, 1.01):
        for dg in (0.99, 1.0, 1.01):
            assert best <= error(fit.seconds_per_flop * dk, fit.gamma * dg) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("lens", "seconds", "d_model", "error"),
    [
        ([100, 200, 300], [1, 2], 64, ArgumentError),
        ([100, 200, 300], [1, -2, 3], 64, ArgumentError),
        ([100, 200, 300], [1, 2, math.nan], 64, ArgumentError),
        ([100, 100], [1, 2], 64, ArgumentError),
        ([100, 0], [1, 2], 64, ArgumentError),
        ([100, 200, 300], [1, 2, 3], 0, ArgumentError),
        ([1000, 10000], [1, 1000], 64, StateError),  # convex far beyond l^2: the best k is negative
    ],
)
def test_poor_data_are_refused(lens: list[int], seconds: list[Any], d_model: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        fit_workload(lens, seconds, d_model)
