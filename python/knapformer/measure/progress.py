"""How far a measurement has come."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """A bar on a terminal, now and then a line elsewhere; on standard error. Silent unless enabled."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self._total = total
        self._done = 0
        self._enabled = enabled
        self._last_line = 0.0
        self._text = "starting"
        self._bar: Bar | None = None
        console = Console(stderr=True)
        if enabled and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._text, total=self._total)

    def __enter__(self) -> Progress:
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
