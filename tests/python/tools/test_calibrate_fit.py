"""Calibration: fits against times made with known numbers, its file, and who reads it. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from knapformer.calibration import Calibration, ExchangeCost, FixedCost
from knapformer.tools.calibrate.fit import calibration_of, error_warnings, fit_exchange, fit_fixed, fit_warnings
from knapformer.tools.cli import main

import knapformer as kf

WIDTH, K, GAMMA = 64, 2e-12, 0.37
LENGTHS = [32, 64, 128, 256, 512, 1024]


def block_s(length: int, mask: str = "full") -> float:
    """As the paper's Eq. 2 says, typed anew."""
    pairs = length**2 if mask == "full" else length * (length + 1) / 2  # or causal
    return K * (24 * length * WIDTH**2 + GAMMA * 4 * pairs * WIDTH)


def fitted(noise: float = 0.0, mask: str = "full", lengths: list[int] = LENGTHS) -> Calibration:
    generator = random.Random(1)
    times = [block_s(n, mask) * (1 + noise * generator.uniform(-1, 1)) for n in lengths]
    spreads = [noise] * len(lengths)
    return calibration_of(lengths, times, spreads, WIDTH, recomputes=True, mask=mask)


def test_known_numbers_are_recovered() -> None:
    calibration = fitted()
    assert calibration.gamma == pytest.approx(GAMMA) and calibration.seconds_per_flop == pytest.approx(K)
    assert calibration.relative_rms_error < 1e-9 < 0.1 < calibration.relative_rms_error_without_gamma
    assert calibration.flops_per_s == pytest.approx(4 / K) and calibration.warnings == ()
    assert fitted(mask="causal").gamma == pytest.approx(GAMMA)  # the planner counts the mask's pairs again
    noisy = fitted(noise=0.05)
    assert noisy.gamma == pytest.approx(GAMMA, rel=0.1) and noisy.noise == 0.05 and noisy.warnings == ()
    without = calibration_of(LENGTHS, [block_s(n) for n in LENGTHS], [0.0] * 6, WIDTH, recomputes=False)
    assert without.flops_per_s == pytest.approx(3 / K)


def test_a_poor_fit_is_said() -> None:
    assert any("spread by 30" in warning for warning in fitted(noise=0.3).warnings)
    assert ["the longest 8 times the shortest" in w for w in fitted(lengths=[64, 80, 96, 128]).warnings] == [True]
    fit = kf.fit_workload(LENGTHS, [n**1.5 for n in LENGTHS], WIDTH)
    assert fit.relative_rms_error > 0.1 and any(
        "the fit is off by" in why for why in fit_warnings(LENGTHS, fit, 0.0, WIDTH)
    )
    steep = kf.fit_workload(LENGTHS, [24 * n * WIDTH**2 + 50 * 4 * n**2 * WIDTH for n in LENGTHS], WIDTH)
    assert any("gamma is 50" in why for why in fit_warnings(LENGTHS, steep, 0.0, WIDTH))
    # At width 64 and 32 tokens attention is 0.37 * 32 / (6 * 64 + 0.37 * 32) = 3 % of the time: gamma is noise.
    short = [2, 4, 8, 16, 32]
    assert ["attention is 3.0% of the time at 32 tokens" in why for why in fitted(lengths=short).warnings] == [True]
    assert error_warnings("a step is", 0.1) == [] == error_warnings("an exchange is", 0.25, 0.25)
    assert error_warnings("a step is", 0.5, 0.25) == ["poor fit: a step is off by 50% (RMS), expected at most 25%"]
    with pytest.raises(kf.StateError, match="poor fit: the best gamma is -"):
        calibration_of(LENGTHS, [n - n**2 / 3000 for n in LENGTHS], [0.0] * 6, WIDTH, recomputes=True)
    with pytest.raises(kf.StateError, match="the best k is -"):
        calibration_of([100, 200, 400], [1e-3, 1.0, 10.0], [0.0] * 3, WIDTH, recomputes=True)


def test_latency_and_rate_of_an_exchange_are_recovered() -> None:
    sizes = [1e4, 1e5, 1e6, 1e7, 1e8]
    exact = fit_exchange(sizes, [20e-6 + n / 5e9 for n in sizes], 8)
    assert (exact.latency_s, exact.bytes_per_s) == (pytest.approx(20e-6), pytest.approx(5e9))
    assert exact.num_ranks == 8 and exact.relative_rms_error < 1e-9
    # numpy's least squares agrees, with sizes weighted by their times.
    np = pytest.importorskip("numpy")
    generator = random.Random(2)
    times = [(20e-6 + n / 5e9) * generator.uniform(0.8, 1.2) for n in sizes]
    rows = np.array([[t**-0.5, n * t**-0.5] for n, t in zip(sizes, times, strict=True)])
    (latency_s, seconds_per_byte), *_ = np.linalg.lstsq(rows * [1e-5, 1e-9], np.sqrt(times), rcond=None)
    got = fit_exchange(sizes, times, 8)
    assert got.latency_s == pytest.approx(latency_s * 1e-5) and got.bytes_per_s == pytest.approx(1e9 / seconds_per_byte)
    assert got.relative_rms_error > 0.01
    # Small messages of two hosts, some of which a link's bucket let through at once, do not hide its rate.
    times = [1.43e-3, 1.34e-3, 0.55e-3, 6.4e-3, 32.7e-3]
    assert fit_exchange([7680, 32256, 130560, 523776, 2096640], times, 2).bytes_per_s < 80e6
    # A latency below nothing is none, and the rate is fitted anew.
    assert fit_exchange([1e6, 1e7], [0.0001, 0.0015], 2).latency_s == 0
    with pytest.raises(kf.StateError, match="do not grow"):
        fit_exchange([1e6, 1e7], [0.1, 0.001], 2)


def test_what_whole_steps_take_beside_their_blocks_is_recovered() -> None:
    predicted = [0.1, 0.2, 0.4, 1.6]
    exact = fit_fixed(predicted, [p + 0.05 for p in predicted], 4)
    assert exact == FixedCost(4, pytest.approx(0.05), pytest.approx(0, abs=1e-9))
    np = pytest.importorskip("numpy")
    generator = random.Random(3)
    times = [(p + 0.05) * generator.uniform(0.9, 1.1) for p in predicted]
    (fixed_s,), (squares,), *_ = np.linalg.lstsq(
        np.array([[1 / t] for t in times]), np.array([1 - p / t for p, t in zip(predicted, times, strict=True)])
    )
    got = fit_fixed(predicted, times, 4)
    assert got.seconds == pytest.approx(fixed_s) and got.relative_rms_error == pytest.approx(math.sqrt(squares / 4))
    # Where steps take less than their blocks, nothing is fixed, and the error says so.
    less = fit_fixed([1.0, 2.0], [0.8, 1.6], 2)
    assert less.seconds == 0 and less.relative_rms_error == pytest.approx(0.25)


def written(path: Path, **changes: Any) -> Path:
    measured = dataclasses.replace(fitted(), node=ExchangeCost(2, 3e-5, 4e9, 0.01), fixed=FixedCost(2, 0.03))
    path.write_text(json.dumps({**measured.to_dict(), "model": {}, **changes}))
    return path


def test_the_file_round_trips_and_stands_in_for_gamma(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "calibration.json")
    calibration = Calibration.load(path)
    assert calibration.node == ExchangeCost(2, 3e-5, 4e9, 0.01) and calibration.fixed == FixedCost(2, 0.03)
    assert dataclasses.replace(calibration, node=None, fixed=None) == fitted()
    on_cpu = dataclasses.replace(calibration, overlaps_attention=False)
    overlaps = [
        of.cluster(base).overlaps_attention for of in (calibration, on_cpu) for base in (None, kf.Cluster("cpu"))
    ]
    assert overlaps == [True, False, False, False]
    lengths = [[1000, 50], [300]]
    assert kf.plan(lengths, "g2n1", d_model=WIDTH, gamma=calibration) == kf.plan(
        lengths, "g2n1", d_model=WIDTH, gamma=calibration.gamma
    )

    plan = ["plan", "--topology", "g8n4", "--data", "joint", "--ranks", "32", "--json", "-"]
    assert main(["doctor", *plan[3:], "--steps", "2", "--calibration", str(path)]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["gamma"] == calibration.gamma and diagnosis["cluster"]["fixed_s"] == 0.03
    unknown = written(tmp_path / "unknown.json", fixed=None)
    assert main(["doctor", *plan[3:], "--steps", "2", "--calibration", str(unknown)]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["fixed_s"] == 0, "that of somebody else's steps"
    predict = ["plan", "--data", "joint", "--topology", "g8n4", "--predictions", "-"]
    assert main([*predict, "--calibration", str(path), "--ranks-per-node", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    cluster = result["cluster"]
    assert result["gamma"] == calibration.gamma and cluster["ranks_per_node"] == 4
    assert cluster["flops_per_s"] == calibration.flops_per_s
    assert (cluster["node_latency_s"], cluster["node_bytes_per_s"]) == (3e-5, 4e9)
    assert cluster["fixed_s"] == 0.03
    assert cluster["network_bytes_per_s"] == 2.5e10  # not measured: the default stays
    # With these numbers a step at the planner's width takes what the calibrated formula says.
    assert main([*predict, "--calibration", str(path), "--d-model", str(WIDTH), "--ranks", "32"]) == 0
    none = json.loads(capsys.readouterr().out)["points"][0]
    lengths = kf.DataMix.parse("joint").draw_lengths(0, 0, 32)
    slowest = max(sum(block_s(n) for n in lens) for lens in lengths)
    assert none["token_s"] + none["attention_s"] == pytest.approx(57 * slowest)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as JSON"),
        (b"[1]", "expected what knapformer calibrate"),
        ({"version": 1}, "version: got 1"),
        ({"gamma": -0.1}, "gamma: got -0.1"),
        ({"seconds_per_flop": 0}, "seconds_per_flop: got 0"),
        ({"d_model": 1.5}, "d_model: got 1.5"),
        ({"recomputes": 1}, "recomputes: got 1"),
        ({"mask": "x"}, "mask: got 'x'"),
        ({"mode": "inference"}, "mode: got 'inference'"),
        ({"warnings": "none"}, "warnings: got 'none'"),
        ({"node": []}, "node: got [], expected an object"),
        ({"fixed": {"num_ranks": 0, "seconds": 0.1}}, "fixed: num_ranks: got 0, expected an integer from 1 to 2^63"),
        ({"longest": 10**400}, "longest: got 1000"),
        ({"network": {"num_ranks": 2, "latency_s": 0, "bytes_per_s": -1, "relative_rms_error": 0}}, "bytes_per_s: got"),
    ],
)
def test_a_wrong_file_is_one_line(
    content: bytes | dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    if isinstance(content, dict):
        written(path, **content)
    else:
        path.write_bytes(content)
    assert main(["plan", "--data", "joint", "--topology", "g8n4", "--calibration", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and "calibration.json" in error


def test_where_a_calibration_is_far_from_home() -> None:
    home = dataclasses.replace(fitted(), device="one", longest=1024)
    assert home.far_from(WIDTH, 2048, "one") == home.far_from(80) == []
    assert "measured at width 64, used at 128" in home.far_from(128)[0]
    assert "measured up to 1,024 tokens, used for 2,049" in home.far_from(WIDTH, 2049)[0]
    assert home.far_from(WIDTH, masks=["full", "full"]) == []
    assert "measured with the mask full, used with c3 f5; " in home.far_from(WIDTH, masks=["full", "c3 f5"])[0]
    windowed = dataclasses.replace(home, mask="window:5:0")
    assert windowed.far_from(WIDTH, masks=["c3 f5"]) == [] and len(windowed.far_from(WIDTH, masks=["causal"])) == 1
    assert "measured on one, used on two" in home.far_from(WIDTH, 1, "two")[0]
    assert dataclasses.replace(home, device=None, longest=None).far_from(WIDTH, 10**6, "two") == []
    assert Calibration.from_dict(home.to_dict()) == home


def test_commands_say_where_a_calibration_is_poor_or_far_from_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    poor = dataclasses.replace(fitted(), longest=100, warnings=("poor fit: for a reason",))
    path.write_text(json.dumps(poor.to_dict()))
    far = ["--data", "joint", "--calibration", str(path), "--json", "-"]
    for command in (["plan", "--topology", "g8n4", *far], ["doctor", "--steps", "2", *far]):
        assert main(command) == 0
        error = capsys.readouterr().err
        assert "measured at width 64, used at 3072" in error and "measured up to 100 tokens" in error
        assert "poor fit: for a reason" in error
