"""`knapformer plan`: what it prints, writes and draws."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from knapformer.tools.ways import micro_batches_of_step
from printed import MIXED, run

from knapformer import Cluster, DataMix, Plan, TrainedModel, plan, predict_step, rank_topologies


def test_plan_of_a_mix_as_json_is_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    args = ["plan", "--topology", "g8n4", *MIXED, "--gamma", "0.41", "--seed", "7"]
    status, out, err = run(capsys, *args, "--json", str(path))
    lengths = DataMix.parse("mixed").draw_lengths(7, 0, 32)
    assert (status, err) == (0, "")
    assert Plan.from_json(path.read_text()) == plan(lengths, "g8n4", d_model=3072, gamma=0.41)
    assert os.listdir(tmp_path) == ["plan.json"]
    assert "g8n4, 32 ranks" in out
    status, out, err = run(capsys, *args, "--json", "-")
    assert (status, err, out) == (0, "", path.read_text())


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_plan_of_a_whole_step(sync: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    args = ["plan", "--topology", "g1n32", *MIXED, "--micro-batches", "3", "--sync", sync]
    limit = ["--max-tokens-per-rank", "60000"]
    status, out, err = run(capsys, *args, *limit, "--json", str(path))
    batches = [DataMix.parse("mixed").draw_lengths(0, k, 32) for k in range(3)]
    step = [[length for batch in batches for length in batch[rank]] for rank in range(32)]
    made = plan(step, "g1n32", d_model=3072, micro_batches=3, sync=sync, max_tokens_per_rank=60000)
    assert (status, err) == (0, "") and Plan.from_json(path.read_text()) == made
    assert f"g1n32, 32 ranks, 3 micro-batches, {made.num_sequences:,} sequences, {made.num_tokens:,} tokens" in out
    assert f"Predicted: {made.predicted_time:.4g} s a step" in out
    assert ("once a step" if sync == "step" else "in every micro-batch") in out


def test_a_whole_step_keeps_to_the_fullest_rank_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless --max-tokens-per-rank says otherwise."""
    args = ["plan", "--topology", "g1n32", "--data", "joint", "--micro-batches", "4", "--json", "-"]
    batches = [DataMix.parse("joint").draw_lengths(0, k, 32) for k in range(4)]
    peak = max(plan(lens, "g1n32", d_model=3072).max_tokens for lens in batches)
    _, out, _ = run(capsys, *args)
    kept = Plan.from_json(out)
    step = [[length for batch in batches for length in batch[rank]] for rank in range(32)]
    assert (
        kept == plan(step, "g1n32", d_model=3072, micro_batches=4, max_tokens_per_rank=peak) and kept.max_tokens <= peak
    )
    _, out, _ = run(capsys, *args, "--max-tokens-per-rank", "60000")
    assert Plan.from_json(out).max_tokens > peak


def test_a_plan_from_a_file_is_predicted_on_another_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert run(capsys, "plan", "--topology", "g8n4", *MIXED, "--micro-batches", "3", "--json", str(path))[0] == 0
    step = Plan.from_json(path.read_text())
    _, out, _ = run(capsys, "plan", "--from", str(path), "--cluster", "a100", "--json", "-")
    on_a100 = sum(predict_step(of, "a100").total_s for of in step.plans)
    assert Plan.from_json(out).predicted_time == pytest.approx(on_a100) and on_a100 > 1.5 * step.predicted_time


def test_what_a_plan_gains_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[[10, 2000], [30], []]")
    status, out, _ = run(capsys, "plan", "--topology", "g1n1+g2n1", "--lengths", str(path), "--d-model", "8")
    made = plan([[10, 2000], [30], []], "g1n1+g2n1", d_model=8)
    gain = max(made.workload_before) / max(made.workload_after)
    said = f"The slowest rank has {gain:.2f} times less to compute. Of the tokens {made.tokens_moved / 2040:.1%} change"
    assert status == 0 and said in " ".join(out.split())
    assert f"holds {made.max_tokens:,}, {made.max_tokens / 680:.2f} times the mean" in out


def test_plan_takes_the_options_of_the_solver(capsys: pytest.CaptureFixture[str]) -> None:
    speed = [2.0] + [1.0] * 31
    status, out, err = run(
        capsys, "plan", "--topology", "g8/4/2/1n4", *MIXED, "--effort", "500", "--mask", "causal",
        "--max-tokens-per-rank", "9000", "--rank-speed", ",".join(map(str, speed)),
        "--cluster", "published", "--ranks-per-node", "4", "--heads", "24", "--mode", "lora", "--json", "-",
    )  # fmt: skip
    made = plan(
        DataMix.parse("mixed").draw_lengths(0, 0, 32), "g8/4/2/1n4", d_model=3072, effort=500, masks="causal",
        max_tokens_per_rank=9000, rank_speed=speed,
        cluster=Cluster.published(ranks_per_node=4), model=TrainedModel(num_heads=24, mode="lora"),
    )  # fmt: skip
    assert (status, err) == (0, "") and Plan.from_json(out) == made
    assert made.max_tokens <= 9000 and made.solver == "balanced"


def test_auto_is_the_best_topology(capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--solver", "greedy"]):
        status, out, _ = run(capsys, "plan", "--topology", "auto", *MIXED, *extra, "--json", "-")
        lengths = DataMix.parse("mixed").draw_lengths(0, 0, 32)
        made = Plan.from_json(out)
        assert status == 0 and made == plan(lengths, str(made.topology), d_model=3072, solver=made.solver)
        assert made.solver == "greedy" or str(made.topology) == rank_topologies([lengths], d_model=3072)[0].topology
        assert made.topology.is_flat == (made.solver == "greedy")


def test_plan_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[[], []]")
    status, out, err = run(capsys, "plan", "--topology", "g2n1", "--lengths", str(path))
    assert (status, err) == (0, "") and "nothing to balance" in out


def test_nothing_is_written_where_no_step_is_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a file without points."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "step": plan([[40, 3], [5]], "g2n1", d_model=8, micro_batches=2).to_json(), "lengths": "[[], []]",
        "steps": "[[40, 3], [5]]",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    lengths = ["--lengths", "lengths.json", "--topology", "g2n1"]
    step = ["--lengths", "steps.json", "--topology", "g2n1", "--micro-batches", "2", "--sync", "step"]
    for source, got in (
        (["--from", "step.json"], "one beside a plan"), (lengths, "one where nothing is predicted"),
        ([*lengths, "--micro-batches", "2"], "one where nothing"), (step, "one where nothing is predicted"),
    ):  # fmt: skip
        status, out, err = run(capsys, "plan", *source, "--predictions", "x.json", "--json", "plan.json")
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert f"knapformer plan: --predictions: got {got}" in err
        assert len(os.listdir(tmp_path)) == len(contents)
    status, out, _ = run(capsys, "plan", "--from", "step.json", "--json", "-")
    assert status == 0 and out.strip() == contents["step"].strip()


def test_lengths_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[[5, 6], [7]]")))
    status, out, _ = run(capsys, "plan", "--topology", "g2n1", "--lengths", "-", "--json", "-")
    assert status == 0 and Plan.from_json(out).seq_lens == [[5, 6], [7]]


def test_a_step_is_cut_into_micro_batches_as_the_planner_cuts_the_given_order():
    lengths = [[1, 2, 3, 4, 5, 6, 7, 8], [9], []]
    assert micro_batches_of_step(lengths, 3) == [[[1, 2, 3], [9], []], [[4, 5, 6], [], []], [[7, 8], [], []]]
    sizes = [len(part[0]) for part in micro_batches_of_step(lengths, 5)]
    assert sizes == [2, 2, 2, 1, 1]
