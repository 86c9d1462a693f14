"""How far a measurement has come: a line on a terminal, now and then one elsewhere; on standard error."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Silent unless enabled."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self._total, self._done, self._text, self._enabled = total, 0, "starting", enabled
        self._is_terminal, self._last_s = sys.stderr.isatty(), -_SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled and self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def describe(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._show()

    def advance(self) -> None:
        self._done += 1
        if time.monotonic() - self._last_s > (0.1 if self._is_terminal else _SECONDS_BETWEEN_LINES):
            self._show()

    def _show(self) -> None:
        if not self._enabled:
            return
        self._last_s = time.monotonic()
        said = f"{self._text}, {self._done} of {self._total} done"
        if self._is_terminal:
            print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)
        else:
            print(said, file=sys.stderr, flush=True)
