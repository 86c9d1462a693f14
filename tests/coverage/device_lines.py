"""Lines of ours that no test runs, and those of them behind a branch for a device: the last step of `make coverage`.

    python tests/coverage/device_lines.py --cpp build/coverage/cpp.json --python build/coverage/python.json

cpp.json is gcovr's, python.json that of coverage.py. A line is behind a branch for a device if it names a device (see
DEVICE), or if a line that leads to it does: one above it in its function that is indented less, or an `if` before it
whose body leaves. docs/gpu.md lists the files with such lines, with reasons; one in another file gives exit status 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from gpu_lines import DEVICE, listed_files  # noqa: E402

_IF = re.compile(r"\s*if\b")
_LEAVES = re.compile(r"\b(return|raise|throw|continue)\b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpp", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    args = parser.parse_args()
    listed, unlisted = listed_files(), 0
    print(f"{'lines':>7} {'not run':>8} {'of a device':>12}  file")
    for path, (num_lines, missed) in sorted({**of_cpp(args.cpp), **of_python(args.python)}.items()):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        behind = [number for number in missed if is_behind_device(lines, number)]
        print(f"{num_lines:7} {len(missed):8} {len(behind):12}  {path}")
        for number in behind:
            mark = "" if path in listed else "  <- not in docs/gpu.md"
            unlisted += path not in listed
            print(f"{'':31}{number}: {lines[number - 1].strip()}{mark}")
    return 1 if unlisted else 0


def of_cpp(report: Path) -> dict[str, tuple[int, list[int]]]:
    """By file: how many lines it has that could run, and which did not."""
    found = {}
    for file in json.loads(report.read_text())["files"]:
        counted = [line for line in file["lines"] if not line.get("gcovr/noncode", False)]
        # A line that is compiled several times (a header's, a template's) has run where one of them has.
        runs: dict[int, int] = {}
        for line in counted:
            runs[line["line_number"]] = runs.get(line["line_number"], 0) + line["count"]
        found[file["file"]] = (len(runs), sorted(number for number, count in runs.items() if count == 0))
    return found


def of_python(report: Path) -> dict[str, tuple[int, list[int]]]:
    found = {}
    for name, file in json.loads(report.read_text())["files"].items():
        path = "python/knapformer/" + name.rpartition("knapformer/")[2]
        found[path] = (file["summary"]["num_statements"], file["missing_lines"])
    return found


def is_behind_device(lines: list[str], number: int) -> bool:
    return any(DEVICE.search(line) for line in leading_to(lines, number))


def leading_to(lines: list[str], number: int) -> Iterator[str]:
    """The line itself, the lines above it that it is inside of, and each `if` before it whose body leaves."""
    yield lines[number - 1]
    depth = _indentation(lines[number - 1])
    last = ""  # the last line of the deeper body below `line`, or empty
    for line in reversed(lines[: number - 1]):
        if not line.strip() or depth == 0:
            continue
        here = _indentation(line)
        if here < depth or (here == depth and _IF.match(line) and _LEAVES.search(last or line)):
            yield line
        last = (last or line) if here > depth else ""
        depth = min(depth, here)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


if __name__ == "__main__":
    sys.exit(main())
