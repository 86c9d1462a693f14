"""The simulator: whole runs on real ranks."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_ranks import simulate
from knapformer._core import DEFAULT_GAMMA
from knapformer.adapters.named import build_model, load_config, random_batch
from knapformer.calibration import ExchangeCost
from knapformer.tools.cli import main
from knapformer.tools.launch import use_device
from knapformer.tools.ways import NO_BALANCER, PLANNED_STEP
from printed import check_tables

from knapformer import Calibration, Cluster, DataMix, Sample

MIX = "g1b1i64f1s0,g1b3i128f1s0"
SIMULATE = [
    "simulate", "--ranks", "2", "--model", "transformer-tiny", "--data", MIX,
    "--max-text-tokens", "20", "--steps", "3", "--warmup", "1", "--topology", "g2n1",
    "--topology", "g1n2", "--topology", "g2/1n1", "--peak-tflops", "0.1",
]  # fmt: skip


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # Joined with the checkout's own, so that the ranks find the package as this process does.
    path = os.pathsep.join([environment.pop("PYTHONPATH", ""), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def check_results(path: Path, gamma: float) -> None:
    results = json.loads(path.read_text())
    none, shared, whole, nested = results["variants"]
    assert [v["topology"] for v in results["variants"]] == [None, "g2n1", "g1n2", "g2/1n1"]
    assert all(len(v["fbl_per_step_s"]) == 3 and min(v["fbl_per_step_s"]) > 0 for v in results["variants"])
    assert none["speed_up"] == none["promised_speed_up"] == 1 and shared["wir"] < whole["wir"] < none["wir"]
    assert nested["wir"] <= whole["wir"]
    mix = DataMix.parse(MIX, max_text_tokens=20)
    tokens = sum(sum(map(sum, mix.draw_lengths(0, step, 2))) for step in (1, 2, 3)) / 3  # step 0 was the warm-up
    assert none["tokens_per_s"] == pytest.approx(tokens / none["fbl_s"])
    assert 0 < none["hfu"] < 1 and results["gamma"] == gamma
    assert results["environment"]["torch"] == torch.__version__


def test_a_run_that_starts_its_ranks(tmp_path: Path) -> None:
    options = ["--model", "flux-tiny", "--keep-exchanges", "--json", str(tmp_path / "out.json")]
    done = start([sys.executable, "-m", "knapformer", *SIMULATE, *options])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_results(tmp_path / "out.json", DEFAULT_GAMMA)
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    check_tables(done.stdout)
    assert done.stdout.endswith(f"{summary}\n") and "The loss is the same" in summary
    assert "12 of 16 done" not in done.stdout and "g1n2" in done.stdout and "none" in done.stdout
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_step_of_several_micro_batches(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = simulate(
        2, "--model", "transformer-tiny", "--data", MIX, "--max-text-tokens", "20", "--steps", "2", "--warmup", "0",
        "--gamma", "0.5", "--dtype", "fp64", "--micro-batches", "3", "--topology", "g2/1n1",
        "--cluster", "cpu", "--json", str(out),
    )  # fmt: skip
    none, nested, planned = json.loads(out.read_text())["variants"]
    assert [of["name"] for of in (none, nested, planned)] == [NO_BALANCER, "g2/1n1", PLANNED_STEP]
    for of in (nested, planned):
        assert of["loss_per_step"] == pytest.approx(none["loss_per_step"], rel=1e-12)
        assert of["gradient_difference"] < 1e-11
    assert len(set(none["loss_per_step"])) == 2
    assert planned["tokens_moved"] == 0 < nested["tokens_moved"] and planned["promised_speed_up"] > 1.5
    assert planned["tokens_per_s"] * planned["fbl_s"] == pytest.approx(none["tokens_per_s"] * none["fbl_s"])
    assert all(of["predicted_s"] > 0 for of in (none, nested, planned))
    check_tables(printed)
    assert "step planned: as BalancedBatchSampler" in printed and "The loss is the same" in printed


@pytest.mark.nightly
def test_adapters_on_a_frozen_base_are_simulated(tmp_path: Path) -> None:
    """As a calibration of them says: base and embedders are frozen, gradients are of the adapters alone."""
    pytest.importorskip("peft")
    calibration = Calibration(0.8, 1e-12, 64, True, 0.01, 0.2, 0.03, mode="lora")
    (tmp_path / "lora.json").write_text(json.dumps(calibration.to_dict()))
    out = tmp_path / "out.json"
    simulate(
        2, "--model", "flux-tiny", "--data", MIX, "--max-text-tokens", "20", "--steps", "1", "--warmup", "1",
        "--topology", "g2/1n1", "--dtype", "fp64", "--calibration", str(tmp_path / "lora.json"), "--json", str(out),
    )  # fmt: skip
    results = json.loads(out.read_text())
    none, nested = results["variants"]
    assert results["settings"]["mode"] == "lora" and none["predicted_s"] > 0
    assert nested["loss_difference"] < 1e-12 and nested["gradient_difference"] < 1e-11


def test_what_others_do_is_measured_beside(tmp_path: Path) -> None:
    out, samples = tmp_path / "out.json", tmp_path / "samples.csv"
    samples.write_text("num_tokens\n" + "\n".join(str(20 + 5 * i) for i in range(40)))
    ways = [word for way in ("buckets", "time_budget", "static_2") for word in ("--way", way)]
    printed = simulate(
        2, "--lengths", str(samples), "--batch-size", "2", "--model", "transformer-tiny", "--gamma", "0.5",
        "--steps", "1", "--warmup", "1", *ways, "--cluster", "cpu", "--json", str(out),
    )  # fmt: skip
    results = json.loads(out.read_text())
    none, buckets, budget, static = results["variants"]
    assert results["settings"]["num_lengths"] == 40 and results["data_codes"] is None
    assert static["loss_difference"] < 1e-4 and static["gradient_difference"] < 1e-4  # the same samples, shared
    assert "loss_difference" not in buckets and "loss_difference" not in budget
    assert static["work"] == none["work"] == 1 and static["wir"] == pytest.approx(1, abs=0.05)
    # Forty lengths in at most 32 buckets are padded; the gain is in the samples' own work for time.
    for of in (buckets, budget, static):
        assert of["speed_up"] == pytest.approx(of["work"] * none["fbl_s"] / of["fbl_s"])
        assert of["predicted_s"] > 0
    check_tables(printed)
    assert "lockstep buckets, time budget: other samples" in printed


def test_a_sample_is_the_same_in_every_batch() -> None:
    """Of its own seed."""
    for name in ("flux-tiny", "wan-tiny", "transformer-tiny"):
        config, sizes = load_config(name), [Sample(3, 12), Sample(0, 4), Sample(5, 30)]  # possible for all
        torch.manual_seed(0)
        model, drawn = build_model(config, torch.float64), functools.partial(random_batch, config)
        batch, target = drawn(sizes, [7, 5, 6], torch.device("cpu"), torch.float64)
        alone = [
            drawn([of], [seed], torch.device("cpu"), torch.float64) for of, seed in zip(sizes, (7, 5, 6), strict=True)
        ]
        assert torch.equal(target, torch.cat([of for _, of in alone]))
        torch.testing.assert_close(model(batch), torch.cat([model(of) for of, _ in alone]), rtol=0, atol=1e-12)


@pytest.mark.nightly
def test_a_run_that_torchrun_starts(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"],
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


def test_other_ranks_than_torchrun_has_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(SIMULATE) == 2
    assert capsys.readouterr() == ("", "knapformer simulate: --ranks: got 2, expected 4, as torchrun has started\n")


def test_a_failing_rank_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """Rank 1's worker fails at once; rank 0 waits for it and has to be ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, types\n"
        "if os.environ.get('RANK') == '1':\n"
        "    sys.modules['knapformer.tools.simulate.worker'] = worker = types.ModuleType('worker')\n"
        "    worker.simulate = lambda *given: __import__('no_such_module')\n"
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
    arguments = [*SIMULATE, "--steps", "3000", "--gamma", "1", "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "knapformer", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell ignores SIGINT in what it runs behind `&`
    )  # fmt: skip
    assert run.stderr is not None
    lines = [run.stderr.readline()]
    while "measuring" not in lines[-1]:
        lines.append(run.stderr.readline())
        assert lines[-1], "".join(lines)
    run.send_signal(number)
    out, err = run.communicate(timeout=300)  # returns once no rank holds the pipes
    assert (run.returncode, out) == (status, "") and words in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("local_rank", [0, 1])
def test_it_says_that_there_are_too_few_gpus(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert use_device("auto", local_rank, num_local=2) == torch.device("cpu")
    said = capsys.readouterr().err
    assert said == ("" if local_rank else "knapformer: runs on the CPU, as it sees 1 GPUs for 2 ranks\n")
