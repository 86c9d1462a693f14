"""bench/gpu.py on the CPU: the lines that a GPU runs, at tiny sizes; what it keeps and says of what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench/gpu.py"


def run(out: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    path = out / "gpu.json"
    return done.returncode, done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else {}


def test_items_write_their_figures(tmp_path: Path) -> None:
    status, output, found = run(tmp_path, "packing", "waits", "step", "memory", "kernels")
    assert status == 0, output
    assert list(found["items"]) == ["packing", "waits", "step", "memory", "kernels"]
    figures = {(row["item"], row["what"]): row for row in found["figures"]}
    bits = figures["packing", "20 plans, forward and backward: other bits than the CPU"]
    assert (bits["value"], bits["met"], bits["must"]) == (0, True, True)
    assert all((tmp_path / "gpu.txt").read_text().count(row["what"]) == 1 for row in found["figures"])
    variants = json.loads((tmp_path / "simulate.json").read_text())["variants"]
    seconds = [row["value"] for row in found["figures"] if row["item"] == "step" and row["unit"] == "s"]
    assert seconds == [variant["fbl_s"] for variant in variants]
    assert "1 of 1 results are right" in output


def test_a_failed_item_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    (tmp_path / "simulate.json").mkdir()  # where the command writes
    status, output, found = run(tmp_path, "step", "packing")
    assert status == 1, output
    assert found["items"]["step"].startswith("failed, status 1")
    assert found["items"]["packing"].startswith("done")


def test_a_wrong_result_and_a_missed_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import argparse

    import gpu

    args = argparse.Namespace(out=tmp_path, item="step", device="cpu")
    gpu.record(args, "speed", 0.5, at_least=0.8)
    assert gpu.summary(args, {"step": "done, 1 s"})
    gpu.record(args, "result", 0.5, at_most=0.1, must=True)
    assert not gpu.summary(args, {"step": "done, 1 s"})
    text = (tmp_path / "gpu.txt").read_text()
    assert "at least 0.8  missed" in text and "at most 0.1  WRONG" in text
    assert not gpu.summary(args, {"step": "stopped, out of time, 9 s"})


def test_out_of_time(tmp_path: Path) -> None:
    status, output, found = run(tmp_path, "--seconds", "1", "packing")
    assert (status, found["items"]) == (1, {"packing": "not begun"}), output


def test_unknown_item(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, "speed")
    assert status == 2
    assert "got speed, expected some of packing, correctness, " in output
