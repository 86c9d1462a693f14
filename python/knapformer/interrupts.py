"""Ctrl-C ends the command `knapformer` at once and without a word, also while it imports. Imported before all else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

# The word that started this process: a script's path, or the module after -m.
_started = os.path.basename("".join(sys.orig_argv[-len(sys.argv) :][:1]))
# In others' programs Ctrl-C is theirs; and where it is ignored, it stays so.
if _started == "knapformer" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt in the command too: what was begun can be undone."""
    ends_at_once = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if ends_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends_at_once:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
