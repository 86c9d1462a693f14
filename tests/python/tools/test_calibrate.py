"""`knapformer calibrate`: whole runs, and what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from knapformer.calibration import Calibration
from knapformer.tools.calibrate.fit import fit_exchange, fit_fixed
from knapformer.tools.cli import main
from printed import check_tables

import knapformer as kf


@pytest.mark.usefixtures("flop_clock")
def test_one_rank_measures_every_kind_of_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from knapformer.adapters.named import load_config
    from knapformer.tools.measure.blocks import BlockTimes

    out = tmp_path / "out.json"
    model = tmp_path / "model.json"
    model.write_text(json.dumps(load_config("flux-tiny").replace(num_layers=1, num_single_layers=3).to_dict()))
    lengths = [64, 128, 256, 512]
    measure = ["--repeats", "3", "--lengths", "64,128,256,512", "--json", str(out)]
    status = main(["calibrate", "--model", str(model), *measure])
    assert status == 0
    shown = capsys.readouterr().out
    check_tables(shown)
    assert "1 x double" in shown and "3 x single" in shown and "All-to-all" not in shown
    calibration, details = Calibration.load(out), json.loads(out.read_text())
    assert calibration.node is None and calibration.d_model == 64 and calibration.recomputes
    assert f"gamma {calibration.gamma:.3f}" in shown
    measured = details["measured_blocks"]
    assert [(m["kind"], m["count"], m["lengths"]) for m in measured] == [("double", 1, lengths), ("single", 3, lengths)]
    # The fit is that of the mean block, weighted by the numbers of each kind.
    times = BlockTimes([("double", 1), ("single", 3)], lengths, [m["seconds"] for m in measured])
    by_hand = [
        (sorted(double)[1] + 3 * sorted(single)[1]) / 4
        for double, single in zip(measured[0]["seconds"], measured[1]["seconds"], strict=True)
    ]
    assert times.per_block() == pytest.approx(by_hand)
    assert calibration.gamma == pytest.approx(kf.fit_workload(lengths, by_hand, 64).gamma)
    assert calibration.gamma == pytest.approx(1, abs=0.1), "by a clock of FLOPs attention's cost as much as others"


@pytest.mark.usefixtures("flop_clock")
def test_gamma_is_fitted_to_the_kernel_of_a_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the clock that counts FLOPs: those of the mask's pairs alone, as no end of a range moves."""
    out = tmp_path / "out.json"
    command = [
        "calibrate",
        "--model",
        "flux-tiny",
        "--repeats",
        "1",
        "--no-checkpoint",
        "--lengths",
        "256,512,1024,2048",
    ]
    assert main([*command, "--mask", "block_causal:64:64", "--json", str(out)]) == 0
    calibration = Calibration.load(out)
    assert calibration.mask == "block_causal:64:64" and calibration.gamma == pytest.approx(1.0, rel=0.15)
    capsys.readouterr()
    plan = ["plan", "--data", "joint", "--topology", "g1n32", "--d-model", str(calibration.d_model)]
    assert main([*plan, "--calibration", str(out)]) == 0
    assert "measured with the mask block_causal:64:64, used with full" in capsys.readouterr().err
    assert main([*plan, "--calibration", str(out), "--mask", "block_causal:10:20"]) == 0
    assert "measured with the mask" not in capsys.readouterr().err
    assert main([*command, "--mask", "c3 f5"]) == 2
    error = capsys.readouterr().err
    assert "mask: got 'c3 f5' for a sequence of 256 tokens" in error and error.count("\n") == 1


@pytest.mark.usefixtures("flop_clock")
@pytest.mark.parametrize(
    ("name", "width", "kinds"),
    [
        ("wan-tiny", 48, [("block", 2)]),
        ("flux2-demo", 256, [("double", 1), ("single", 2)]),
        ("sd3-demo", 256, [("block", 3)]),
    ],
)
def test_models_of_diffusers_are_calibrated(
    name: str, width: int, kinds: list[tuple[str, int]], tmp_path: Path
) -> None:
    """By the clock that counts FLOPs attention costs as much as the rest, which is 24 l d^2 or nearly so."""
    out = tmp_path / "out.json"
    expected = [64, 1024]
    command = ["calibrate", "--model", name, "--repeats", "1", "--warmup", "1", "--lengths", "64,1024"]
    assert main([*command, "--json", str(out)]) == 0
    details = json.loads(out.read_text())
    assert [(of["kind"], of["count"], of["lengths"]) for of in details["measured_blocks"]] == [
        (*kind, expected) for kind in kinds
    ]
    calibration = Calibration.load(out)
    assert calibration.d_model == width and calibration.gamma == pytest.approx(1, abs=0.15)
    assert not calibration.cluster().overlaps_attention  # a CPU's cores carry exchanges, too


@pytest.mark.usefixtures("flop_clock")
def test_adapters_on_a_frozen_base_are_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the clock that counts FLOPs. A block of width d has products of 24 l d^2, and adapters of rank 16 beside them,
    32 * 16 l d: 16 d inputs and outputs of all layers. Forward, and backward to the inputs; of adapters to both of
    their matrices, too. Attention takes a forward pass and two backward, 12 l^2 d."""
    pytest.importorskip("peft")
    out, model, d = tmp_path / "out.json", tmp_path / "model.json", 192
    model.write_text(json.dumps({"kind": "transformer", "d_model": d, "num_heads": 4, "num_kv_heads": 4}))
    command = [
        "calibrate",
        "--model",
        str(model),
        "--mode",
        "lora",
        "--no-checkpoint",
        "--lengths",
        "32,64,128,256,512,1024",
    ]
    assert main([*command, "--repeats", "1", "--json", str(out)]) == 0
    calibration = Calibration.load(out)
    adapters = 4 * 16 / d  # of rank 16: 3 * 32 l r d more than 2 * 24 l d^2
    assert (calibration.mode, calibration.recomputes) == ("lora", False)
    assert calibration.seconds_per_flop == pytest.approx((2 + adapters) / 1e9, rel=1e-6)
    assert calibration.gamma == pytest.approx(2 / (2 + adapters), rel=1e-6)  # of FLOPs that cost as much
    assert calibration.flops_per_s == pytest.approx(
        2 / calibration.seconds_per_flop
    )  # of two passes that the model has
    assert calibration.block_s(500) == pytest.approx(
        (500 * (48 * d**2 + 96 * 16 * d) + 12 * 500**2 * d) / 1e9, rel=1e-6
    )
    capsys.readouterr()

    # What plans and predicts with it: a step of LoRA, which takes what was measured.
    plan = f"plan --data joint --topology g1n32 --d-model {d} --no-checkpoint --predictions -".split()
    assert main([*plan, "--calibration", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["mode"] == "lora"
    lengths = kf.DataMix.parse("joint").draw_lengths(0, 0, 32)
    slowest = max(sum(map(calibration.block_s, lens)) for lens in lengths)
    none = result["points"][0]
    assert none["token_s"] + none["attention_s"] == pytest.approx(57 * slowest)
    assert main([*plan, "--calibration", str(out), "--mode", "training"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["mode"] == "training"


@pytest.mark.nightly
def test_ranks_measure_their_all_to_all(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "knapformer", "calibrate", "--ranks", "2", "--model", "transformer-tiny",
        "--lengths", "64,128,256,512", "--repeats", "3", "--json", str(out),
    ]  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text("import flop_clock\nflop_clock.install()\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    calibration, details = Calibration.load(out), json.loads(out.read_text())
    # By a clock of FLOPs: of 22 l d^2 in the products of a block with half as many key/value heads, in four passes,
    # without the last product (8 l d^2) of the recomputation.
    assert calibration.gamma == pytest.approx(4 * 24 / (4 * 22 - 8)) and calibration.network is None
    points = details["measured_exchanges"]["node"]
    assert points["num_bytes"] == sorted(points["num_bytes"]) and min(points["seconds"]) > 0
    try:
        expected = fit_exchange(points["num_bytes"], points["seconds"], 2)
    except kf.StateError as error:  # a machine so busy that its times do not grow with the bytes
        assert calibration.node is None and any(str(error) in warning for warning in calibration.warnings)
    else:
        assert calibration.node is not None and calibration.node == expected
        assert "All-to-all inside the node, 2 ranks" in done.stdout
    # Whole steps: what they take beyond two blocks and FSDP.
    steps = details["measured_steps"]
    assert [sum(lens) for lens in steps["seq_lens"]] == [1024] * 4 and len(steps["seconds"][0]) == 3
    model = kf.TrainedModel(num_blocks=2, num_parameters=float(steps["num_parameters"]), element_size=4, shard_ranks=2)
    cluster = calibration.cluster(kf.Cluster("cpu")).replace(ranks_per_node=2)
    predicted, beside = [], []
    medians = [sorted(seconds)[1] for seconds in steps["seconds"]]
    for lens, median in zip(steps["seq_lens"], medians, strict=True):
        fsdp_s = kf.predict_micro_batch(
            kf.plan([lens, lens], "g1n2", d_model=32, gamma=calibration, cluster=cluster, model=model)
        ).fsdp_s
        work = sum(24 * n * 32**2 + calibration.gamma * 4 * n**2 * 32 for n in lens)
        blocks_s = 2 * calibration.seconds_per_flop * work
        predicted.append(blocks_s + fsdp_s)
        beside.append(median - blocks_s)
    assert beside == pytest.approx(beside[:1] * 4, rel=1e-6), "by a clock of FLOPs it is the same in all of them"
    # FSDP's part is predicted with the all-to-all's times, which the wall clock says.
    expected_fixed = fit_fixed(predicted, medians, 2)
    assert calibration.fixed is not None and calibration.fixed.num_ranks == 2
    assert calibration.fixed.seconds == pytest.approx(expected_fixed.seconds)
    assert calibration.fixed.relative_rms_error == pytest.approx(expected_fixed.relative_rms_error, abs=1e-9)
    assert "ms beside its blocks, on 2 ranks" in done.stdout


def exchanges_of_two_nodes(rank: int, world_size: int) -> Any:
    import torch.distributed as dist
    from knapformer.tools.calibrate import worker

    time_exchanges = worker.time_exchanges

    def timed(sizes: Any, device: torch.device, num_rounds: int, group: Any) -> Any:
        times = time_exchanges([1 << 14, 1 << 16], device, 2, group)
        return dist.get_process_group_ranks(group), times.num_bytes, times.seconds

    worker.time_exchanges = timed
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = worker._time_exchanges(torch.device("cpu"))
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return found, list(worker._time_exchanges(torch.device("cpu")))


@pytest.mark.nightly
def test_nodes_and_the_network_are_measured_apart() -> None:
    from distributed.ranks import run_ranks

    for rank, (found, alone) in enumerate(run_ranks(exchanges_of_two_nodes, 4)):
        (node, node_bytes, _), (network, network_bytes, seconds) = found["node"], found["network"]
        assert node == [rank // 2 * 2, rank // 2 * 2 + 1] and network == [rank % 2, rank % 2 + 2]
        # Half of a rank's rows go to the other one.
        assert node_bytes == network_bytes and node_bytes == pytest.approx([1 << 13, 1 << 15], rel=0.1)
        assert min(seconds) > 0 and alone == ["network"]
