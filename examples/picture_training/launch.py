"""Starts the example as its users do, and kills it as machines do: for its test and for the page about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_EXAMPLE = Path(__file__).parents[1] / "train_images.py"


def start(out: Path, *options: str, num_ranks: int = 2) -> subprocess.Popen[str]:
    """Starts the training, with one thread a rank. The launcher's standard error is a pipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(_EXAMPLE), "--out", str(out), *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)


def finish(launcher: subprocess.Popen[str], timeout_s: float | None = None) -> None:
    try:
        _, errors = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # which takes its ranks with it
        launcher.communicate()
        raise
    if launcher.returncode != 0:
        raise RuntimeError(errors)


def kill_after(launcher: subprocess.Popen[str], out: Path, num_steps: int, timeout_s: float = 600) -> None:
    """Sends SIGKILL to all ranks once the log has num_steps steps. Finds the ranks in /proc."""
    log, deadline = out / "log.jsonl", time.monotonic() + timeout_s
    while not log.exists() or log.read_text(encoding="utf-8").count("\n") < num_steps:
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.terminate()
            raise RuntimeError(f"ended before step {num_steps}: {launcher.communicate()[1]}")
        time.sleep(0.02)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # a process that has just ended
            continue
        if parent == launcher.pid:
            os.kill(int(stat.parent.name), signal.SIGKILL)
    launcher.communicate(timeout=60)
