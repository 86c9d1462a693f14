"""How few launches an exchange takes on an accelerator."""

from __future__ import annotations

import functools

from accelerator.cases import TOPOLOGIES, each_topology
from accelerator.launch_ranks import Launches, launches_of_calls
from distributed.ranks import run_ranks


@functools.cache
def launches(world: int) -> list[dict[str, dict[str, Launches]]]:
    return run_ranks(launches_of_calls, world, TOPOLOGIES[world])


@each_topology
def test_two_launches_for_an_exchange(world: int, topology: str) -> None:
    """And none beside them: the packing kernel writes the levels of a nested bag where they belong."""
    for of_rank in launches(world):
        for name, of_call in of_rank[topology].items():
            for launched in of_call:
                assert set(launched) <= {"knapformer::move_rows"}, (name, launched)
                assert len(launched) <= (4 if name == "attention" else 2), (name, launched)
    for name in ("route", "reverse_route", "attention"):
        parts = zip(*(of_rank[topology][name] for of_rank in launches(world)), strict=True)
        # One rank alone has no exchange, nor has attention in bags of one rank.
        shares = world > 1 and (name != "attention" or topology not in ("g1n2", "g1n3"))
        assert all(any("knapformer::move_rows" in launched for launched in part) == shares for part in parts), name
