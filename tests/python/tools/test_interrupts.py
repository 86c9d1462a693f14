"""Ctrl-C ends a command quietly, whenever it comes: as it imports, as it works, as it starts its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="sees in /proc what a process has loaded")

RANKS = ["--ranks", "2", "--device", "cpu"]
COMMANDS = (
    ["doctor", "--data", "joint", "--steps", "5000"],
    ["plan", "--mix", "joint", "--ranks", "256", "--topology", "g8n*", "--steps", "5000"],
    ["replay", "--data", "joint", "--topology", "g8n4", "--model", "flux-tiny", "--device", "cpu", "--steps", "500"],
    ["simulate", *RANKS, "--data", "g2b2i256f1s0", "--topology", "g2n1", "--model", "flux-tiny", "--steps", "5000"],
    ["calibrate", *RANKS, "--model", "flux-tiny", "--repeats", "5000"],
)


def _runs_ours(pid: int) -> bool:
    """Whether the process is past the interpreter's own start, which nobody can silence."""
    return "knapformer/_core" in Path(f"/proc/{pid}/maps").read_text()


def _has_ranks(pid: int) -> bool:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text() != ""


@pytest.mark.parametrize(
    ("command", "has_come_to", "delay_s"),
    [(command, _runs_ours, 0) for command in COMMANDS]
    + [(COMMANDS[0], _runs_ours, 0.3), (COMMANDS[3], _runs_ours, 0.3), (COMMANDS[4], _has_ranks, 0.1)],
)
def test_ctrl_c(command: list[str], has_come_to: Callable[[int], bool], delay_s: float, tmp_path: Path) -> None:
    script, temporary = tmp_path / "knapformer", tmp_path / "temporary"
    script.write_text("import sys\nfrom knapformer.tools.cli import main\nsys.exit(main())\n")  # as pip writes it
    temporary.mkdir()
    started_as = [str(script)] if delay_s == 0.3 else ["-m", "knapformer"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    run = subprocess.Popen(
        [sys.executable, *started_as, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    while not has_come_to(run.pid):
        assert run.poll() is None, run.communicate()
        time.sleep(0.001)
    time.sleep(delay_s)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=300)  # returns once no rank holds the pipes
    assert run.returncode in (130, -signal.SIGINT)
    assert (
        out == "" and err in ("", f"knapformer {command[0]}: interrupted\n") and not list(temporary.glob("knapformer*"))
    )
