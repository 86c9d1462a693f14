"""How far a measurement has come."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 15.0


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False  # it stays: an interrupt ends the command at once, and nobody would bring it back


class Progress:
    """A bar on a terminal, now and then a line elsewhere; on standard error. Silent unless enabled."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        console = _Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal))
        self._task = self._bar.add_task("starting", total=total)
        self._prints = enabled and not console.is_terminal
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # a disabled bar would end a line that it has not begun
            self._bar.stop()

    def describe(self, text: str) -> None:
        if text != self._bar.tasks[0].description:
            self._bar.update(self._task, description=text)
            self._line()

    def advance(self) -> None:
        self._bar.advance(self._task)
        if time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line()

    def _line(self) -> None:
        if self._prints:
            self._last_line = time.monotonic()
            task = self._bar.tasks[0]
            print(f"{task.description}, {task.completed:.0f} of {task.total:.0f} done", file=sys.stderr, flush=True)
