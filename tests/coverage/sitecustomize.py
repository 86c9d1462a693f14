"""Runs in every Python process that `make coverage` starts: counts lines, even if the process ends by os._exit."""

from __future__ import annotations

import ctypes
import os
import sys

import coverage

coverage.process_startup()
_exit = os._exit


def _keep_counts_and_exit(status: int) -> None:
    for name in ("knapformer._core", "knapformer._torch"):
        if (module := sys.modules.get(name)) is not None:
            ctypes.CDLL(str(module.__file__)).knapformer_keep_counts()
    _exit(status)


os._exit = _keep_counts_and_exit  # type: ignore[assignment]
