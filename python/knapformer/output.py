"""Where output goes: files, checked before the work starts and written whole or not at all; and the console."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console

from knapformer import ArgumentError


def check_output_path(argument: str, path: str | None) -> None:
    """Raises ArgumentError, naming `argument`, where a file could not be written at `path`. None: none is asked for."""
    if path is None:
        return
    target = Path(path)
    folder = target.parent
    if not path or target.is_dir():
        raise ArgumentError(f"{argument}: got {path!r}, expected the path of a file")
    if not folder.is_dir():
        raise ArgumentError(f"{argument}: got {path!r}, expected a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"{argument}: got {path!r}, expected a file in a folder that may be written to")


def write_atomically(path: str, content: str | bytes) -> None:
    """Whoever looks at `path` sees the old content or the new, never a part. Raises OSError."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; give it the mode that open() would have given.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def terminal_or_wide() -> Console:
    """Standard output: as wide as the terminal; into a file or pipe wide enough that no table is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
