"""Lines of the sources that name CUDA, and the table of docs/gpu.md that gives the reason for each file of them."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Matches code that names CUDA or a library of it.
CUDA = re.compile(r"cuda|nccl|nvrtc", re.IGNORECASE)
_TABLE = re.compile(r"^\| `([\w/.]+\.(?:cpp|h|py))` \| (\d+) \| (.+) \|$", re.MULTILINE)


def listed_files() -> dict[str, int]:
    """How many lines of each file name CUDA, according to docs/gpu.md."""
    return {file: int(count) for file, count, _ in _TABLE.findall((ROOT / "docs/gpu.md").read_text(encoding="utf-8"))}


def files_that_name_cuda() -> dict[str, int]:
    """The same, counted in the sources: in code, but not in comments or in texts for people."""
    sources = [*(ROOT / "knapformer").rglob("*.h"), *(ROOT / "knapformer").rglob("*.cpp")]
    counts = {path: len(_lines_of_cpp(path.read_text(encoding="utf-8"))) for path in sources}
    python = (ROOT / "python/knapformer").rglob("*.py")
    counts |= {path: len(_lines_of_python(path.read_text(encoding="utf-8"))) for path in python}
    return {str(path.relative_to(ROOT)): count for path, count in counts.items() if count > 0}


def _lines_of_cpp(text: str) -> set[int]:
    code = (line.partition("//")[0] for line in text.splitlines())
    return {number for number, line in enumerate(code, 1) if CUDA.search(line)}


def _lines_of_python(text: str) -> set[int]:
    """Looks at names, and at strings without a space: other strings are messages and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0] for t in tokens if t.type != tokenize.COMMENT and " " not in t.string and CUDA.search(t.string)}
