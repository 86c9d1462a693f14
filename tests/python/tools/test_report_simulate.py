"""The report of a real run: what the simulator measured on two ranks."""

import json
import os
import statistics
import subprocess
import sys

import pytest

pytest.importorskip("plotly")
pytest.importorskip("torch")
pytest.importorskip("knapformer._torch")


def test_simulate_writes_what_it_measured(tmp_path):
    command = [
        sys.executable, "-m", "knapformer", "simulate", "--ranks", "2", "--model", "transformer-tiny", "--gamma", "0.5",
        "--data", "g1b1i64f1s0,g1b3i128f1s0", "--max-text-tokens", "20", "--steps", "3", "--warmup", "1",
        "--topology", "g2n1", "--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out.html").read_text()
    none, shared = json.loads((tmp_path / "out.json").read_text())["variants"]
    medians = [statistics.median(variant["fbl_per_step_s"]) for variant in (none, shared)]
    assert f"{medians[0]:.3g} → {medians[1]:.3g} s" in page
    assert "g2n1, measured" in page
    assert "predicted step" not in page
