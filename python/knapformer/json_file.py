"""JSON files that users give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from knapformer._core import ArgumentError


def parse_json(content: bytes, argument: str) -> Any:
    """Where `content` is no JSON, raises ArgumentError, whose message begins with `argument`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{argument}: not readable as JSON: {error}") from None


def line_value(line: str) -> Any:
    """What a line of JSON holds. If it is none (a run was killed as it wrote), the line itself, for a message."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.strip()


def read_json(path: str | Path, argument: str) -> Any:
    """Like parse_json, for a file. Raises OSError where the file cannot be read."""
    return parse_json(Path(path).read_bytes(), f"{argument}: {path}")
