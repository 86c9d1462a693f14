"""Where output goes: files, which are checked before the work starts, and the console."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console, Group
from rich.table import Table

from knapformer import ArgumentError

TABLE_WIDTH = 80  # of a terminal, in columns of text


class OutputError(OSError):
    """A file could not be written: strerror says why, filename which one."""


def check_outputs(args: argparse.Namespace) -> None:
    """Raises ArgumentError, naming the option, where a file that a command is to write could not be written, or another
    one goes to the same place. '-' is standard output."""
    options: dict[str, str] = {}  # by the file that is written
    for option in ("--json", "--predictions", "--report"):
        path = getattr(args, option[2:], None)
        if path is None:
            continue
        if path != "-" and not _may_be_written(path):
            raise ArgumentError(f"{option}: got {path!r}, expected a file that may be written, in a folder that exists")
        if (other := options.setdefault(os.path.realpath(path) if path != "-" else path, option)) != option:
            raise ArgumentError(f"{option}: got {path!r}, expected another file than {other} writes")
        if option == "--report" and importlib.util.find_spec("plotly") is None:
            raise ArgumentError(
                "--report: needs plotly, which this environment lacks: pip install 'knapformer[report]'"
            )


def _may_be_written(path: str) -> bool:
    if os.path.exists(path):
        return not os.path.isdir(path) and os.access(path, os.W_OK)
    folder = os.path.dirname(os.path.realpath(path))
    return not path.endswith(os.sep) and os.path.isdir(folder) and os.access(folder, os.W_OK)


def write_json(path: str | None, value: Any) -> None:
    """As `write`."""
    write(path, json.dumps(value, indent=1, allow_nan=False))


def write(path: str | None, text: str) -> None:
    """To standard output for '-', nowhere for None. Who reads a file finds the old content or the new, never a part.
    Raises OutputError."""
    if path is None:
        return
    if path == "-":
        print(text)
        return
    target = Path(os.path.realpath(path))
    # Not beside a device or a pipe.
    written = target if target.exists() and not target.is_file() else Path(f"{target}.{os.getpid()}")
    try:
        written.write_text(f"{text}\n", encoding="utf-8")
        if target.exists():
            shutil.copymode(target, written)
        written.replace(target)
    except OSError as error:
        raise OutputError(error.errno, error.strerror, path) from error
    finally:
        if written != target:
            written.unlink(missing_ok=True)


def cells_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    """A row's texts by heading. columns: by heading, "KEY:FORMAT" or "KEY:FORMAT:TEXT", with the text of a value that
    is missing (default '-')."""
    cells = {}
    for heading, of in columns.items():
        key, style, missing = (*of.split(":"), "-")[:3]
        cells[heading] = missing if row[key] is None else format(row[key], style)
    return cells


def table_of(
    rows: Iterable[Mapping[str, str]], *, left: str = "", keys: tuple[str, ...] = (), caption: str | None = None
) -> Group:
    """Tables, one below the other, of at most TABLE_WIDTH columns of text where their cells allow it.

    rows: at least one, each with its cells by heading. left: the heading of the column of words; the others hold
    numbers. keys: the columns that identify a row, which every table repeats (default: left).
    """
    rows = list(rows)
    widths = {heading: max(len(heading), *(len(row[heading]) for row in rows)) + 3 for heading in rows[0]}
    keys = keys or tuple(filter(None, [left]))
    parts = [list(keys)]
    for heading in (of for of in rows[0] if of not in keys):
        if len(parts[-1]) > len(keys) and sum(widths[of] for of in [*parts[-1], heading]) + 1 > TABLE_WIDTH:
            parts.append(list(keys))
        parts[-1].append(heading)
    tables = []
    for part in parts:
        table = Table()
        for heading in part:
            table.add_column(heading, justify="left" if heading == left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[heading] for heading in part))
        tables.append(table)
    return Group(*tables, *([] if caption is None else [caption]))


def show(*parts: str | Group) -> None:
    """Prints on standard output, as wide as the terminal; in a file or pipe, so wide that no table or text is cut."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


class Progress(rich.progress.Progress):
    """How far a command has come, on standard error: on a terminal one line that changes, elsewhere a line for each
    stage. Silent unless enabled. total: of what `count` counts."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        console, text = Console(stderr=True), "{task.description}, {task.completed} of {task.total} done"
        # Without a thread of its own, which would take time from what is measured.
        super().__init__(
            text, console=console, auto_refresh=False, transient=True, disable=not (enabled and console.is_terminal)
        )
        self._task = self.add_task("", total=total)
        self._prints_stages = enabled and not console.is_terminal

    def describe(self, text: str) -> None:
        if self._prints_stages and text != self.tasks[0].description:
            self.console.print(text)
        self.update(self._task, description=text, refresh=True)

    def count(self) -> None:
        self.update(self._task, advance=1, refresh=True)
