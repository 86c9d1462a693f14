"""Checks the order between the folders of the sources: which may include which (part of `make lint`).

    python tests/include_order.py [ROOT]

Reads the includes of the C++ sources and the imports of the Python package, also those inside functions and those for
type checkers. It skips the `if TYPE_CHECKING:` block of the package's own __init__.py: the package imports these names
only when they are asked for, so they may come from rooms above it. Fails, with file and line, where

- a file includes a file of a room that its own room may not include (MAY_INCLUDE);
- a layer includes a library that it must not know (FORBIDDEN);
- files include each other in a circle; a header and its source count as one;
- a file lies in no room;
- a layer has more arrows than MAX_ARROWS. An arrow goes from a room to one that it includes, by any number of files.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Each room, and the rooms that its files may include. A room is a folder, without the rooms inside it, or one file. The
# order is that of the layers: from the core to what users call.
_CORE = "core/util core/model core/plan core/cost"
_TORCH = f"{_CORE} core/planners core/planners/whole_step torch/comm torch/exchange"
_FLOOR = "python python/models python/adapters python/tools/shared python/tools/measure"
MAY_INCLUDE = {
    "core/util": "",
    "core/model": "core/util",
    "core/plan": "core/util core/model",
    "core/cost": "core/util core/model core/plan",
    "core/planners/greedy": _CORE,
    "core/planners/balanced": f"{_CORE} core/planners/greedy",
    "core/planners": f"{_CORE} core/planners/greedy core/planners/balanced",
    "core/planners/whole_step": f"{_CORE} core/planners/balanced core/planners",
    "torch/comm": "core/util core/model core/plan",
    "torch/exchange": "core/util core/model core/plan torch/comm",
    "torch": _TORCH,
    "bindings": f"{_TORCH} torch",
    "python": "",
    "python/models": "python",
    "python/adapters": "python python/models",
    "python/tools/shared": "python python/models python/adapters",
    "python/tools/measure": "python python/models python/adapters python/tools/shared",
    "python/tools/report": _FLOOR,
    "python/tools/doctor": f"{_FLOOR} python/tools/report",
    "python/tools/calibrate": _FLOOR,
    "python/tools/plan": f"{_FLOOR} python/tools/report",
    "python/tools/simulate": f"{_FLOOR} python/tools/report python/tools/calibrate python/tools/doctor",
    "python/tools/replay": f"{_FLOOR} python/tools/report python/tools/simulate",
    "python/tools": f"{_FLOOR} python/tools/doctor python/tools/plan python/tools/calibrate python/tools/simulate "
    "python/tools/replay",
}
# Files whose room is not their folder: modules that the commands share, and the entry point of the commands.
ROOM_OF_FILE = {
    "python/tools/cli_args": "python/tools/shared",
    "python/tools/columns": "python/tools/shared",
    "python/tools/cost_args": "python/tools/shared",
    "python/tools/files": "python/tools/shared",
    "python/tools/launch": "python/tools/shared",
    "python/tools/presets": "python/tools/shared",
    "python/tools/sample_files": "python/tools/shared",
    "python/tools/trainer_caches": "python/tools/shared",
    "python/tools/ways": "python/tools/shared",
    "python/__main__": "python/tools",
}
# Libraries that a layer must not know, by the beginning of the header's name.
FORBIDDEN = {
    "core": ("torch/", "ATen/", "c10/", "pybind11/", "Python.h"),
    "torch": ("pybind11/", "Python.h", "torch/extension.h", "torch/python.h", "torch/csrc/utils/pybind.h"),
}
# For the core, arrows between its five folders; for the torch layer, between its rooms and to the core's folders.
MAX_ARROWS = {"core": 10, "torch": 12}

_INCLUDE = re.compile(r'\s*#\s*include\s*(?:"knapformer/(?P<own>[^"]+)"|[<"](?P<other>[^>"]+)[>"])')


class Include(NamedTuple):
    """A line of `file`, which is `unit`, that includes `target`. Both are like "core/plan/plan"; `target` may also be
    another library's header."""

    file: Path
    line: int
    unit: str
    target: str
    is_own: bool


def cpp_includes(root: Path) -> Iterator[Include]:
    for file in sorted((root / "knapformer").rglob("*")):
        if file.suffix in (".h", ".cpp"):
            unit = file.relative_to(root / "knapformer").with_suffix("").as_posix()
            for line, text in enumerate(file.read_text().splitlines(), start=1):
                if match := _INCLUDE.match(text):
                    target = match["own"].rsplit(".", 1)[0] if match["own"] else match["other"]
                    yield Include(file, line, unit, target, bool(match["own"]))


def python_imports(root: Path) -> Iterator[Include]:
    """A package is the unit of its __init__.py; the extension modules, which are no files here, are left out."""
    package = root / "python/knapformer"
    files = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py")}
    units = {
        name.removesuffix(".__init__"): name.replace(".", "/").replace("knapformer", "python", 1)
        for name in files.values()
    }
    for file, name in sorted(files.items()):
        tree = ast.parse(file.read_text())
        if name == "knapformer.__init__":
            tree.body = [node for node in tree.body if ast.unparse(node).partition("\n")[0] != "if TYPE_CHECKING:"]
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for imported in _imported_names(node, name.split(".")):
                # `from knapformer.tools import plan` imports a module, `from knapformer import Plan` a package's name.
                module = imported if imported in units else imported.rpartition(".")[0]
                if module in units and imported.rpartition(".")[2] not in ("_core", "_torch"):
                    yield Include(file, node.lineno, units[name.removesuffix(".__init__")], units[module], True)


def _imported_names(node: ast.Import | ast.ImportFrom, importer: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = importer[: -node.level] if node.level else []
    return [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]


def room_of(unit: str) -> str | None:
    """The innermost room that holds a unit, or None."""
    if unit in ROOM_OF_FILE:
        return ROOM_OF_FILE[unit]
    while unit and unit not in MAY_INCLUDE:
        unit = unit.rpartition("/")[0]
    return unit or None


def wrong_includes(includes: Iterable[Include]) -> Iterator[str]:
    for include in includes:
        room, layer = room_of(include.unit), include.unit.split("/")[0]
        where = f"{include.file}:{include.line}: "
        if not include.is_own:
            if include.target.startswith(FORBIDDEN.get(layer, ())):
                yield f"{where}{layer} must not know <{include.target}>"
            continue
        target = room_of(include.target)
        if room is None or target is None:
            lost = include.unit if room is None else include.target
            yield f"{where}{lost} lies in no room of MAY_INCLUDE (tests/include_order.py)"
        elif target != room and target not in MAY_INCLUDE[room].split():
            yield f"{where}{room} may not include {include.target} (only: {MAY_INCLUDE[room] or 'nothing'})"


def circles(includes: Iterable[Include]) -> Iterator[str]:
    """At least one circle of every group of units that include each other."""
    edges: dict[str, dict[str, Include]] = {}
    for include in includes:
        if include.is_own and include.target != include.unit:
            edges.setdefault(include.unit, {}).setdefault(include.target, include)
    finished: set[str] = set()
    path: list[str] = []

    def visit(unit: str) -> Iterator[str]:
        path.append(unit)
        for target in edges.get(unit, {}):
            if target in path:
                circle = [*path[path.index(target) :], target]
                steps = [edges[a][b] for a, b in itertools.pairwise(circle)]
                yield "circle: " + ", ".join(f"{step.file}:{step.line} includes {step.target}" for step in steps)
            elif target not in finished:
                yield from visit(target)
        finished.add(path.pop())

    for unit in sorted(edges):
        if unit not in finished:
            yield from visit(unit)


def arrows(includes: Iterable[Include]) -> dict[str, dict[str, set[str]]]:
    """By layer and room, the other rooms that its files include. Rooms in a folder of the core count as that folder."""

    def folder(unit: str) -> str:
        return "/".join(unit.split("/")[:2]) if unit.startswith("core/") else room_of(unit) or unit

    layers: dict[str, dict[str, set[str]]] = {}
    for include in includes:
        start, end = folder(include.unit), folder(include.target)
        if include.is_own and start != end:
            layers.setdefault(start.split("/")[0], {}).setdefault(start, set()).add(end)
    return layers


def main(root: Path) -> int:
    includes = [*cpp_includes(root), *python_imports(root)]
    problems = [*dict.fromkeys(wrong_includes(includes)), *circles(includes)]
    for layer, rooms in arrows(includes).items():
        count, limit = sum(map(len, rooms.values())), MAX_ARROWS.get(layer)
        print(f"{layer}: {count} arrows between rooms" + (f", at most {limit}" if limit else ""))
        for room, targets in sorted(rooms.items()):
            print(f"    {room} -> {' '.join(sorted(targets))}")
        if limit and count > limit:
            problems.append(f"{layer}: {count} arrows between rooms, where at most {limit} are allowed")
    if not includes:
        problems.append(f"{root}: no includes found; expected knapformer/ and python/knapformer/ in it")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
