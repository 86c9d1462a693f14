"""Checks the order of the folders of the sources, for C++ and Python (part of `make lint`).

    python tests/include_order.py [ROOT]

ROOMS has them from the bottom to the top. A file may include files of its own room and of those below it. Fails, with
file and line, where one includes a file of a room above, and where a layer includes a library that it must not know.
Left out is the package's own __init__.py, which imports names of all rooms when they are asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# A room is a folder without the rooms inside it, or a file.
ROOMS = [
    "knapformer/core/util", "knapformer/core/model", "knapformer/core/plan", "knapformer/core/cost",
    "knapformer/core/planners/greedy", "knapformer/core/planners/balanced", "knapformer/core/planners",
    "knapformer/core/planners/whole_step", "knapformer/torch/comm", "knapformer/torch/exchange", "knapformer/torch",
    "knapformer/bindings",
    "python/knapformer/_core", "python/knapformer/_torch", "python/knapformer/attention",
    "python/knapformer", "python/knapformer/models", "python/knapformer/adapters", "python/knapformer/tools",
    "python/knapformer/tools/measure", "python/knapformer/tools/calibrate",
    "python/knapformer/tools/doctor", "python/knapformer/tools/plan", "python/knapformer/tools/simulate",
    "python/knapformer/tools/replay", "python/knapformer/tools/cli", "python/knapformer/__main__",
]  # fmt: skip
# Libraries that a layer must not know, by the beginning of the header's name.
FORBIDDEN = {
    "knapformer/core": ("torch/", "ATen/", "c10/", "pybind11/", "Python.h"),
    "knapformer/torch": ("pybind11/", "Python.h", "torch/extension.h", "torch/python.h", "torch/csrc/utils/pybind.h"),
}
# What a line includes: of C++ a header, of Python a module, with the names that are taken from it.
_CPP = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)')
_PYTHON = re.compile(r"\s*(?:from|import) (knapformer[\w.]*)(?: import \(?([\w, ]*))?")


def room_of(path: str) -> int:
    """The number of the innermost room that holds a file or module."""
    while path not in ROOMS:
        if "/" not in path:
            raise SystemExit(f"tests/include_order.py: a file lies in no room of ROOMS: {path}")
        path = path.rpartition("/")[0]
    return ROOMS.index(path)


def included(root: Path, file: Path, line: str) -> Iterator[str]:
    if file.suffix != ".py":
        yield from (match[1] for match in [_CPP.match(line)] if match)
    elif match := _PYTHON.match(line):
        module = "python/" + match[1].replace(".", "/")
        names = [f"{module}/{name.split()[0]}" for name in (match[2] or "").split(",") if name.strip()]
        yield from (name for name in names if (root / name).with_suffix(".py").exists() or (root / name).is_dir())
        if module != "python/knapformer":
            yield module


def problems(root: Path) -> Iterator[str]:
    files = [f for top in ("knapformer", "python/knapformer") for f in sorted((root / top).rglob("*"))]
    sources = [f for f in files if f.suffix in (".h", ".cpp", ".py") and f != root / "python/knapformer/__init__.py"]
    if not sources:
        yield f"{root}: no sources found; expected knapformer/ and python/knapformer/ in it"
    for file in sources:
        unit = file.relative_to(root).with_suffix("").as_posix()
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            for target in included(root, file, line):
                if target.startswith(("knapformer/", "python/")) and room_of(target) > room_of(unit):
                    yield f"{file}:{number}: {ROOMS[room_of(unit)]} may not include {target}, which lies above it"
                elif target.startswith(FORBIDDEN.get("/".join(unit.split("/")[:2]), ())):
                    yield f"{file}:{number}: {'/'.join(unit.split('/')[:2])} must not know <{target}>"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    sys.exit(1 if found else 0)
