"""The results of bench_solvers.py as the two tables of docs/benchmarks.md.

python bench/solver_tables.py build/bench/solvers.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_PEERS = {
    "longest first": "longest first",
    "karmarkar-karp": "Karmarkar-Karp",
    "milp": "FlexSP's program",
    "balanced low": "balanced, low effort",
    "balanced default": "balanced",
    "balanced high": "balanced, high effort",
}


def _lines(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def _ms(row: Row) -> str:
    return f"{row['ms']:,.0f}" if row["ms"] >= 100 else f"{row['ms']:.2g}"


def _by_workload(rows: list[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(f"{row['workload']} {row['gamma']}", []).append(row)
    return out


def _best(rows: list[Row], is_it: Callable[[str], bool]) -> Row | None:
    return min((row for row in rows if is_it(row["planner"])), key=lambda row: row["eff"], default=None)


def _is_greedy(planner: str) -> bool:
    return planner.startswith("greedy ")


def summary(rows: list[Row]) -> str:
    """eff, exchanged and ms by planner and workload; with the best topology where a planner has to be given one."""
    workloads = _by_workload(rows)
    planners: dict[str, Callable[[str], bool]] = {
        "greedy, best flat topology": _is_greedy,
        "published code, best of g4, g8": lambda planner: planner.startswith("published "),
        **{shown: name.__eq__ for name, shown in _PEERS.items()},
    }
    cells = []
    for shown, is_it in planners.items():
        its = [_best(of_workload, is_it) for of_workload in workloads.values()]
        cells.append([shown, *("-" if r is None else f"{r['eff']:.3f}, {r['exchanged']:.2f}, {_ms(r)}" for r in its)])
    return _lines(["eff, exchanged, ms", *workloads], cells)


def full(rows: list[Row]) -> str:
    """All rows, except those of flat topologies other than the best one and g8."""
    cells = []
    for of_workload in _by_workload(rows).values():
        best_flat = _best(of_workload, _is_greedy)
        for row in of_workload:
            planner, _, topology = row["planner"].partition(" ")
            is_flat = planner in ("greedy", "published")
            if is_flat and topology != "g8" and best_flat is not None and topology != best_flat["planner"].split()[1]:
                continue
            cells.append(
                [
                    row["workload"],
                    str(row["gamma"]),
                    row["planner"],
                    *(f"{row[measure]:.4f}" for measure in ("eff", "strict_eff", "max_over_mean")),
                    *(f"{row[measure]:.3f}" for measure in ("exchanged", "max_tokens_over_mean", "home")),
                    _ms(row),
                    str(row["seeds"]),
                ]
            )
    return _lines(
        ["workload", "gamma", "planner", "eff", "strict", "max/mean", "exchanged", "tokens", "home", "ms", "seeds"],
        cells,
    )


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text())["rows"]
    print(summary(results), full(results), sep="\n\n")
