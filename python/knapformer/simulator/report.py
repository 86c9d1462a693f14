"""What a simulation shows: progress while it runs, a table and a sentence at its end, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import knapformer
from knapformer.output import terminal_or_wide, write_atomically
from knapformer.simulator.results import sentence
from knapformer.simulator.settings import SimulationSettings

if TYPE_CHECKING:
    import torch

_SECONDS_BETWEEN_LINES = 15.0


class StepProgress:
    """A bar on a terminal, now and then a line elsewhere; on standard error. Silent unless enabled."""

    def __init__(self, settings: SimulationSettings, enabled: bool) -> None:
        num_rounds = settings.num_warmup_steps + settings.num_steps * settings.num_repeats
        self._total = num_rounds * (1 + len(settings.topologies))
        self._done = 0
        self._enabled = enabled
        self._last_line = 0.0
        self._text = "starting"
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if enabled and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._text, total=self._total)

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self._line()

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line()

    def _line(self) -> None:
        if self._enabled:
            self._last_line = time.monotonic()
            print(f"{self._text}, {self._done} of {self._total} done", file=sys.stderr, flush=True)


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit that figures belong to."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
        "knapformer": knapformer.__version__,
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the checkout that runs, or of the one that it was started in; None outside any."""
    for folder in (Path(__file__).parent, Path.cwd()):
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            made = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if made.returncode == 0:
            return made.stdout.strip()
    return None


def write_report(settings: SimulationSettings, results: dict[str, Any]) -> None:
    """Table and sentence on standard output; settings.json_path where asked for. `results` gains the sentence."""
    results["summary"] = sentence(results["variants"])
    if settings.json_path is not None:
        write_atomically(settings.json_path, json.dumps(results, indent=2, allow_nan=False) + "\n")
    console = terminal_or_wide()
    console.print(
        f"{settings.model_name} on {settings.num_ranks} ranks, data {settings.data}, {settings.num_steps} steps, "
        f"gamma {results['gamma']:.3g}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_table(settings, results))
    console.print(results["summary"], soft_wrap=True, highlight=False)


def _table(settings: SimulationSettings, results: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("balancer")
    for heading in ("WIR", "FBL s", "TPS", "speed-up", "promised", "tokens moved"):
        table.add_column(heading, justify="right")
    if settings.peak_tflops is not None:
        table.add_column("HFU", justify="right")
    for row in results["variants"]:
        cells = [
            row["topology"] or "none",
            "inf" if row["wir"] is None else f"{row['wir']:.2f}",
            f"{row['fbl_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speed_up']:.2f}",
            f"{row['promised_speed_up']:.2f}",
            f"{row['tokens_moved']:.0%}",
        ]
        table.add_row(*cells, *([f"{row['hfu']:.1%}"] if row["hfu"] is not None else []))
    return table
