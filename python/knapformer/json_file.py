"""Files of JSON that users give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from knapformer._core import ArgumentError


def parse_json(content: bytes, argument: str) -> Any:
    """Raises ArgumentError, beginning with `argument`, where it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{argument}: not readable as JSON: {error}") from None


def read_json(path: str | Path, argument: str) -> Any:
    """As parse_json, of a file. Raises OSError where it cannot be read."""
    return parse_json(Path(path).read_bytes(), f"{argument}: {path}")
