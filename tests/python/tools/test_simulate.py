"""The simulator: its figures against arithmetic by hand, and whole runs on real ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from knapformer.adapters.named import build_model, load_config, random_batch
from knapformer.calibration import ExchangeCost
from knapformer.tools.measure.figures import hardware_flops_utilization
from knapformer.tools.report import NO_BALANCER, PLANNED_STEP
from knapformer.tools.simulate.calibrate import lengths_to_measure
from knapformer.tools.simulate.data import StepData, equal_lengths
from knapformer.tools.simulate.results import Measured, Variant, figures, sentences
from knapformer.tools.simulate.settings import SimulationSettings
from knapformer.tools.simulate.variants import EQUAL_LENGTHS, Variants, variant_names
from knapformer.tools.simulate.worker import balancer_of, joined
from printed import check_tables

from knapformer import ArgumentError, Calibration, Cluster, DataMix, Sample, WorkloadModel, plan, plan_home

LENGTHS = [[[100, 20], [20]], [[40], [40, 60]]]  # of two steps


def variants() -> tuple[Variant, Variant]:
    plans = [plan(lengths, "g2n1", 16, gamma=1.0) for lengths in LENGTHS]
    measured = Measured([4.0, 2.0], [0.5, 0.25], [3.0, 1.0]), Measured([2.0, 1.0], [0.5, 0.3], [3.0, 1.0])
    home = Variant(NO_BALANCER, None, measured[0], [[plan_home(of)] for of in plans])
    return home, Variant("g2n1", "g2n1", measured[1], [[of] for of in plans])


def work(*seq_lens: int) -> float:
    return sum(24 * n * 16**2 + 4 * n**2 * 16 for n in seq_lens)


def test_figures_by_hand() -> None:
    baseline, balanced = variants()
    highest_before = work(100, 20) + max(work(40), work(40, 60))
    # Two ranks share every sequence evenly.
    highest_after = (work(100, 20, 20) + work(40, 40, 60)) / 2
    got = figures(balanced, baseline, [1e12, 3e12], depth=5, peak_tflops=10.0, checkpointing=True)
    assert got["fbl_s"] == 1.5 and got["fbl_median_s"] == 1.5 and got["fbl_per_step_s"] == [2.0, 1.0]
    assert got["speed_up"] == 2.0 and got["speed_up_median"] == 2.0
    assert got["promised_speed_up"] == pytest.approx(highest_before / highest_after)
    assert got["share_of_promise"] == pytest.approx(2.0 / (highest_before / highest_after))
    assert got["tokens_per_s"] == pytest.approx((140 + 140) / 2 / 1.5)
    assert got["hfu"] == pytest.approx(4 * 2e12 * 5 / (1.5 * 2 * 10e12))
    assert got["tokens_moved"] == pytest.approx(0.5) and got["max_tokens_per_rank"] == 70
    assert got["wir"] == pytest.approx(1.0)
    assert got["loss_difference"] == pytest.approx(0.2) and got["gradient_difference"] == 0
    got = figures(baseline, baseline, [1e12, 3e12], depth=5, peak_tflops=None, checkpointing=True)
    assert (got["speed_up"], got["promised_speed_up"], got["tokens_moved"], got["hfu"]) == (1, 1, 0, None)
    assert got["wir"] == pytest.approx((work(100, 20) / work(20) + work(40, 60) / work(40)) / 2)
    assert got["max_tokens_per_rank"] == 120 and got["loss_difference"] == 0


def test_ranks_wait_in_every_micro_batch() -> None:
    """A step of the two: each micro-batch counts with its slowest rank."""
    baseline, balanced = (
        dataclasses.replace(of, plans=[[plans[0] for plans in of.plans]], measured=Measured([s], [1.0], [1.0]))
        for of, s in zip(variants(), (6.0, 4.0), strict=True)
    )
    got = figures(balanced, baseline, [4e12], depth=5, peak_tflops=None, checkpointing=True)
    highest_before = work(100, 20) + work(40, 60)
    assert got["promised_speed_up"] == pytest.approx(2 * highest_before / (work(100, 20, 20) + work(40, 40, 60)))
    assert got["tokens_per_s"] == pytest.approx((140 + 140) / 4.0) and got["speed_up"] == 1.5


def test_an_infinite_ratio_is_null() -> None:
    plans = [[plan_home(plan([[5], []], "g2n1", 16))]]
    alone = Variant(NO_BALANCER, None, Measured([1.0], [1.0], [1.0]), plans)
    assert math.isinf(alone.wir()) and figures(alone, alone, [1.0], 1, None, True)["wir"] is None


def test_hfu_of_the_published_table() -> None:
    """Low mix without a balancer: FBL 3.13 s and 24.72 % on 32 ranks of 989 TFLOP/s.

    Each has 32 samples of 256 visual and on average 196 text tokens.
    """
    d = 3072
    forward = 32 * 32 * (24 * 452 * d**2 + 4 * 452**2 * d)
    assert hardware_flops_utilization(forward, 57, 3.13, 32, 989.0, True) == pytest.approx(0.2472, rel=0.03)
    assert hardware_flops_utilization(forward, 57, 3.13, 32, 989.0, False) == pytest.approx(0.2472 * 3 / 4, rel=0.03)


@pytest.mark.parametrize(
    ("speed_up", "promised", "words"),
    [
        (1.9, 2.0, "1.90 times as fast, 95% of what its plans promise"),
        (0.9, 2.0, "gained nothing"),
        (0.98, 1.0, "even already, there was nothing to gain"),
    ],
)
def test_the_sentence_says_what_was_gained(speed_up: float, promised: float, words: str) -> None:
    same = {"loss_per_step": [1.0], "loss_difference": 1e-7, "gradient_difference": 2e-7}
    baseline = {"name": NO_BALANCER, "topology": None, "fbl_s": 2.0, "speed_up": 1.0, "promised_speed_up": 1.0,
                "share_of_promise": 1.0, **same}  # fmt: skip
    other = {"name": "g4n1", "topology": "g4n1", "fbl_s": 4.0, "speed_up": 0.5, "promised_speed_up": 1.5,
             "share_of_promise": 0.3, **same}  # fmt: skip
    balanced = {
        "name": "g2n1",
        "topology": "g2n1",
        "fbl_s": 2.0 / speed_up,
        "speed_up": speed_up,
        "promised_speed_up": promised,
        "share_of_promise": speed_up / promised,
        **same,
    }
    gained, loss = sentences([baseline, other, balanced]).splitlines()
    assert words in gained and "g2n1" in gained and "1.0e-07, of the gradient's norm 2.0e-07" in loss
    planned = {**balanced, "name": PLANNED_STEP, "topology": "g1n4"}
    equal = {**balanced, "name": EQUAL_LENGTHS, "fbl_s": 1.0 / speed_up}
    text = sentences([baseline, other, planned, equal])
    assert f"{words}" in text and "whole step planned" in text and "2.000 of it" in text


def test_equal_lengths_have_the_work() -> None:
    def cost(length: int) -> float:
        return 3 * length + length**2

    for count, total in ((1, 700.0), (3, 5000.0), (7, 30.0), (5, 100_000.0)):
        lengths = equal_lengths(total, count, cost)
        assert len(lengths) == count and max(lengths) - min(lengths) <= 1
        candidates = [[n] * (count - more) + [n + 1] * more for n in range(1, 400) for more in range(count)]
        best = min(abs(sum(map(cost, of)) - total) for of in candidates)
        assert abs(sum(map(cost, lengths)) - total) == pytest.approx(best)


@pytest.mark.parametrize("model", ["flux-tiny", "wan-tiny"])
def test_what_each_variant_computes(model: str) -> None:
    given = settings(
        data="g1b2i64f1s0,g1b3i128f1s0", num_ranks=4, model=load_config(model), topologies=("g2n2",),
        micro_batches=3, equal_lengths=True, max_text_tokens=20,
    )  # fmt: skip
    assert variant_names(given) == [NO_BALANCER, "g2n2", PLANNED_STEP, EQUAL_LENGTHS]
    variants = Variants(given, 0.5)
    data = {name: way.data for name, way in variants.ways(1).items()}
    drawn, planned, equal = data[NO_BALANCER], data[PLANNED_STEP], data[EQUAL_LENGTHS]
    assert data["g2n2"] is drawn
    mix, config = given.mix(), given.model
    for rank in range(4):  # the batches of the mix behind those of step 0
        sizes = [[repr(config.possible(s)) for s in mix.draw(0, 3 + k, rank)] for k in range(3)]
        assert [[repr(s.size) for s in of] for of in drawn.samples[rank]] == sizes

    def seeds(of: StepData) -> list[int]:
        return sorted(s.seed for ranks in of.samples for samples in ranks for s in samples)

    assert seeds(planned) == seeds(drawn) and len(set(seeds(drawn))) == len(seeds(drawn)) == 30
    assert all(samples for ranks in planned.samples for samples in ranks)
    fullest = max(sum(lens) for k in range(3) for lens in drawn.seq_lens(k))
    assert drawn.max_tokens() == fullest >= planned.max_tokens()

    workload = WorkloadModel(0.5)

    def works(of: StepData) -> list[float]:
        return [sum(workload.work(n, config.d_model) for n in lens) for k in range(3) for lens in of.seq_lens(k)]

    assert len(set(works(equal))) == 1 and sum(works(equal)) == pytest.approx(sum(works(drawn)), rel=0.005)
    # As the plans say that stand for them.
    plans = variants.plans(1)
    assert [plan.seq_lens for plan in plans[PLANNED_STEP]] == [planned.seq_lens(k) for k in range(3)]
    assert all(plan.tokens_moved == 0 for plan in plans[PLANNED_STEP] + plans[NO_BALANCER])


def test_what_others_compute() -> None:
    """Buckets: all ranks as many tokens in a micro-batch, a length of the data. A budget: no rank beyond the longest
    sample or the mean batch. Static groups: everything that was drawn, evenly on the group's ranks."""
    lengths = tuple([40] * 6 + [100, 400])
    given = settings(
        lengths=lengths, data="x", batch_size=3, num_ranks=4, micro_batches=2, topologies=(), num_steps=20,
        ways=("buckets", "time_budget", "static_2"),
    )  # fmt: skip
    names = ["lockstep buckets", "time budget", "sequence parallel 2"]
    assert variant_names(given) == [NO_BALANCER, *names, PLANNED_STEP]
    variants, workload, seen = Variants(given, 0.5), WorkloadModel(0.5), []

    def work(lens: list[int]) -> float:
        return sum(workload.work(n, given.model.d_model) for n in lens)

    budget = max(work([400]), 3 * work(list(lengths)) / 8)
    for step in range(22):
        ways, plans = variants.ways(step), variants.plans(step)
        drawn = ways[NO_BALANCER].data
        for k in range(2):
            buckets, budgets = (ways[name].data.seq_lens(k) for name in names[:2])
            (length,) = {n for lens in buckets for n in lens}
            assert [len(lens) for lens in buckets] == [3] * 4 and length in lengths
            seen.append(length)
            assert all(lens and work(lens) <= budget * (1 + 1e-9) for lens in budgets)
            shared = plans["sequence parallel 2"][k]
            assert shared.seq_lens == drawn.seq_lens(k) and set(shared.degree_of_sequence) == {2}
            tokens = [sum(map(sum, drawn.seq_lens(k)[bag : bag + 2])) for bag in (0, 2)]
            assert [sum(shared.tokens_after[bag : bag + 2]) for bag in (0, 2)] == tokens
        assert ways["sequence parallel 2"].data is drawn and ways["lockstep buckets"].own_share == pytest.approx(1)
    # In proportion to the samples, up to what 44 draws can tell (systematic draws: 8 times as many are made).
    assert seen.count(40) > 22 and {100, 400} <= set(seen)


def settings(**changes: Any) -> SimulationSettings:
    fields: dict[str, Any] = {
        "data": "g2b2i256f1s0",
        "topologies": ("g2n1",),
        "num_ranks": 2,
        "model": load_config("flux-tiny"),
        "model_name": "flux-tiny",
    }
    return SimulationSettings(**{**fields, **changes})


def test_ranks_plan_with_the_cluster_that_is_given() -> None:
    """A world of one: the process itself."""
    given = settings(data="g1b2i256f1s0", num_ranks=1, topologies=("g1n1",), cluster=Cluster("cpu", ranks_per_node=2))
    balancer = balancer_of(given, "g1n1", 0.49)
    made = balancer.plan_routing([8, 4], given.model.d_model)
    assert made == given.plan([[8, 4]], "g1n1", 0.49) and made.cluster == given.cluster


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "high"}, "data: got 'high'"),
        ({"num_ranks": 3}, "ranks: got 3"),
        ({"topologies": ()}, "topology: got none"),
        ({"ways": ("static_4",)}, "way: got 'static_4', expected each once of buckets, time_budget, static_2 on 2"),
        ({"ways": ("buckets", "buckets")}, "way: got 'buckets'"),
        ({"micro_batches": 2, "max_tokens_per_rank": 3}, "max_tokens_per_rank: got 3"),
        ({"topologies": ("g2n1", "g2n1")}, "topology: got 'g2n1' twice"),
        ({"num_ranks": 4, "topologies": ("g3n1",)}, "topology: got 'g3n1'"),
        (
            {"topologies": ("g2/1n1",), "solver": "greedy"},
            "solver: got 'greedy' for topology g2/1n1, expected flat bags",
        ),
        ({"solver": "magic"}, "solver: got '?magic"),
        ({"scale": math.nan}, "scale: got nan"),
        ({"keep_exchanges": True, "checkpointing": False}, "keep_exchanges: got True"),
        ({"model": load_config("wan-tiny"), "max_text_tokens": 513}, "max_text_tokens: got 513, expected at most 512"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        settings(**changes)


def test_lengths_to_measure_span_the_mix() -> None:
    lengths = lengths_to_measure([700, 80, 5000, 300])
    assert lengths[0] == 80 and lengths[-1] == 5000 and lengths == sorted(set(lengths)) and len(lengths) == 5
    for seq_lens in ([300], [300, 310], [1], [100_000, 90_000]):
        lengths = lengths_to_measure(seq_lens)
        assert lengths == sorted(set(lengths)) and lengths[-1] >= 16 * lengths[0] and lengths[-1] >= max(seq_lens)


SIMULATE = [
    "simulate", "--ranks", "2", "--model", "transformer-tiny", "--data", "g1b1i64f1s0,g1b3i128f1s0",
    "--max-text-tokens", "20", "--steps", "3", "--warmup", "1", "--topology", "g2n1",
    "--topology", "g1n2", "--topology", "g2/1n1", "--peak-tflops", "0.1",
]  # fmt: skip


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # Joined with the checkout's own, so that the ranks find the package as this process does.
    path = os.pathsep.join([environment.pop("PYTHONPATH", ""), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def check_results(path: Path, gamma: float | None) -> None:
    results = json.loads(path.read_text())
    none, shared, whole, nested = results["variants"]
    assert [v["topology"] for v in results["variants"]] == [None, "g2n1", "g1n2", "g2/1n1"]
    assert all(len(v["fbl_per_step_s"]) == 3 and min(v["fbl_per_step_s"]) > 0 for v in results["variants"])
    assert none["speed_up"] == none["promised_speed_up"] == 1 and shared["wir"] < whole["wir"] < none["wir"]
    assert nested["wir"] <= whole["wir"]
    mix = DataMix.parse("g1b1i64f1s0,g1b3i128f1s0", max_text_tokens=20)
    tokens = sum(sum(map(sum, mix.draw_lengths(0, step, 2))) for step in (1, 2, 3)) / 3  # step 0 was the warm-up
    assert none["tokens_per_s"] == pytest.approx(tokens / none["fbl_s"])
    assert 0 < none["hfu"] < 1 and results["gamma"] > 0 and (gamma is None or results["gamma"] == gamma)
    assert (results["fit"] is None) == (gamma is not None)
    assert results["environment"]["torch"] == torch.__version__


def test_a_run_that_starts_its_ranks(tmp_path: Path) -> None:
    done = start(
        [
            sys.executable,
            "-m",
            "knapformer",
            *SIMULATE,
            "--model",
            "flux-tiny",
            "--keep-exchanges",
            "--json",
            str(tmp_path / "out.json"),
        ]
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_results(tmp_path / "out.json", None)
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    check_tables(done.stdout)
    assert done.stdout.endswith(f"{summary}\n") and "The loss is the same" in summary
    assert "12 of 16 done" not in done.stdout and "g1n2" in done.stdout and "none" in done.stdout
    assert os.listdir(tmp_path) == ["out.json"]


def test_wan_is_simulated_and_its_videos_alone_are_planned(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [*SIMULATE[:7], "--max-text-tokens", "20", "--model", "wan-tiny", "--gamma", "0.5", "--json", str(out)]
    done = start(
        [sys.executable, "-m", "knapformer", *arguments, "--steps", "2", "--warmup", "0", "--topology", "g2n1"]
    )
    assert done.returncode == 0, done.stderr
    none, shared = json.loads(out.read_text())["variants"]
    mix = DataMix.parse("g1b1i64f1s0,g1b3i128f1s0", max_text_tokens=20)
    possible = load_config("wan-tiny").possible
    patches = [[possible(s).visual_tokens for s in mix.draw(0, step, rank)] for step in (0, 1) for rank in (0, 1)]
    assert none["tokens_per_s"] == pytest.approx(sum(map(sum, patches)) / 2 / none["fbl_s"])
    assert shared["wir"] == pytest.approx(1, abs=0.05) and none["wir"] > 1.2


def test_a_step_of_several_micro_batches(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [
        *SIMULATE[:3], "--model", "transformer-tiny", "--data", "g1b1i64f1s0,g1b3i128f1s0", "--max-text-tokens", "20",
        "--steps", "2", "--warmup", "0",
        "--gamma", "0.5", "--dtype", "fp64", "--micro-batches", "3", "--topology", "g2/1n1", "--equal-lengths",
        "--cluster", "cpu", "--json", str(out),
    ]  # fmt: skip
    done = start([sys.executable, "-m", "knapformer", *arguments])
    assert done.returncode == 0, done.stderr
    none, nested, planned, equal = json.loads(out.read_text())["variants"]
    assert [of["name"] for of in (none, nested, planned, equal)] == [NO_BALANCER, "g2/1n1", PLANNED_STEP, EQUAL_LENGTHS]
    for of in (nested, planned):
        assert of["loss_per_step"] == pytest.approx(none["loss_per_step"], rel=1e-12)
        assert of["gradient_difference"] < 1e-11
    assert len(set(none["loss_per_step"])) == 2 and equal["loss_per_step"] != none["loss_per_step"]
    assert planned["tokens_moved"] == 0 < nested["tokens_moved"] and planned["promised_speed_up"] > 1.5
    assert planned["tokens_per_s"] * planned["fbl_s"] == pytest.approx(none["tokens_per_s"] * none["fbl_s"])
    assert all(of["predicted_s"] > 0 for of in (none, nested, planned, equal))
    check_tables(done.stdout)
    assert "step planned: BalancedBatchSampler" in done.stdout and "The loss is the same" in done.stdout


def test_adapters_on_a_frozen_base_are_simulated(tmp_path: Path) -> None:
    """As a calibration of them says: base and embedders are frozen, gradients are of the adapters alone."""
    pytest.importorskip("peft")
    calibration = Calibration(0.8, 1e-12, 64, True, 0.01, 0.2, 0.03, mode="lora")
    (tmp_path / "lora.json").write_text(json.dumps(calibration.to_dict()))
    out = tmp_path / "out.json"
    arguments = [
        *SIMULATE[:3], "--model", "flux-tiny", "--data", "g1b1i64f1s0,g1b3i128f1s0", "--max-text-tokens", "20",
        "--steps", "1", "--warmup", "1", "--topology", "g2/1n1", "--dtype", "fp64", "--calibration",
        str(tmp_path / "lora.json"), "--json", str(out),
    ]  # fmt: skip
    done = start([sys.executable, "-m", "knapformer", *arguments])
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    none, nested = results["variants"]
    assert results["settings"]["mode"] == "lora" and none["predicted_s"] > 0
    assert nested["loss_difference"] < 1e-12 and nested["gradient_difference"] < 1e-11


def test_what_others_do_is_measured_beside(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    out, samples = tmp_path / "out.json", tmp_path / "samples.csv"
    samples.write_text("num_tokens\n" + "\n".join(str(20 + 5 * i) for i in range(40)))
    ways = [word for way in ("buckets", "time_budget", "static_2") for word in ("--way", way)]
    command = [
        sys.executable, "-m", "knapformer", "simulate", "--lengths", str(samples), "--batch-size", "2", "--ranks", "2",
        "--model", "transformer-tiny", "--gamma", "0.5", "--steps", "1", "--warmup", "1", *ways, "--cluster", "cpu",
        "--json", str(out), "--report", str(tmp_path / "out.html"),
    ]  # fmt: skip
    done = start(command)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    none, buckets, budget, static = results["variants"]
    assert results["settings"]["lengths"] == 40 and results["data_codes"] is None
    assert static["loss_difference"] < 1e-4 and static["gradient_difference"] < 1e-4  # the same samples, shared
    assert "loss_difference" not in buckets and "loss_difference" not in budget
    assert static["work"] == none["work"] == 1 and static["wir"] == pytest.approx(1, abs=0.05)
    # Forty lengths in at most 32 buckets are padded; the gain is in the samples' own work for time.
    for of in (buckets, budget, static):
        assert of["speed_up"] == pytest.approx(of["work"] * none["fbl_s"] / of["fbl_s"])
        assert of["predicted_s"] > 0
    check_tables(done.stdout)
    assert "lockstep buckets: other samples" in done.stdout
    # The page's headline is of the same samples.
    page = (tmp_path / "out.html").read_text()
    assert f"{none['fbl_s']:.3g} → {static['fbl_s']:.3g} s" in page and "time budget, measured" in page


def test_a_batch_is_joined_of_its_samples() -> None:
    """A model gets the same loss of samples drawn one by one and joined as of each alone."""
    for name in ("flux-tiny", "wan-tiny", "transformer-tiny"):
        config = load_config(name)
        cpu, sizes = torch.device("cpu"), [Sample(3, 12), Sample(0, 4), Sample(5, 30)]  # possible for all
        torch.manual_seed(0)
        model = build_model(config, torch.float64)
        drawn = [
            random_batch(config, of, seed, cpu, torch.float64)[0]
            for seed, of in enumerate([[], *([size] for size in sizes)])
        ]
        alone = torch.cat([model(batch) for batch in drawn[1:]])
        assert torch.allclose(model(joined(drawn)), alone, rtol=0, atol=1e-12)


def test_a_run_that_torchrun_starts(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        "2",
    ]
    calibration = Calibration(0.8, 1e-12, 32, True, 0.01, 0.2, 0.03, node=ExchangeCost(2, 1e-5, 3e9))
    (tmp_path / "calibration.json").write_text(json.dumps(calibration.to_dict()))
    arguments = [*SIMULATE, "--calibration", str(tmp_path / "calibration.json"), "--dtype", "bf16", "--no-checkpoint"]
    done = start([*torchrun, "-m", "knapformer", *arguments, "--json", str(tmp_path / "out.json")])
    assert done.returncode == 0, done.stderr
    check_results(tmp_path / "out.json", 0.8)
    cluster = Cluster(**json.loads((tmp_path / "out.json").read_text())["settings"]["cluster"])
    measured = Cluster(flops_per_s=4e12, node_bytes_per_s=3e9, node_latency_s=1e-5)
    assert calibration.cluster() == measured
    assert cluster == measured.replace(fixed_s=0.0)  # no whole steps were calibrated, and those of others do not count
    assert done.stdout.count("FBL s ┃") == 1  # rank 0 alone reports


def test_torchrun_with_other_ranks_than_asked_for() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = start([sys.executable, "-m", "knapformer", *SIMULATE], **env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--ranks: got 2, expected 4" in done.stderr


def test_a_failing_rank_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """Rank 1 finds no worker; rank 0 waits for it to join and has to be ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1': sys.modules['knapformer.tools.simulate.worker'] = None\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "knapformer", *SIMULATE, "--json", str(out / "out.json")]
    done = start(command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and os.listdir(out) == []
    assert done.stderr.splitlines()[-1].startswith("knapformer simulate: rank 1 failed: ModuleNotFoundError")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 1, "SIGTERM")]
)
def test_a_signal_ends_the_run_and_its_ranks(number: int, status: int, words: str, tmp_path: Path) -> None:
    arguments = [*SIMULATE, "--steps", "100000", "--gamma", "1", "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "knapformer", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert run.stderr is not None
    lines = [run.stderr.readline()]
    while "measuring" not in lines[-1]:
        lines.append(run.stderr.readline())
        assert lines[-1], "".join(lines)
    run.send_signal(number)
    out, err = run.communicate(timeout=300)  # returns once no rank holds the pipes
    assert (run.returncode, out) == (status, "") and words in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_devices_that_are_not_there() -> None:
    done = start([sys.executable, "-m", "knapformer", *SIMULATE, "--device", "cuda"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "device: got 'cuda'" in done.stderr
