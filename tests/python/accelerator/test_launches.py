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
    """And none beside them, but in nested bags one that joins o of all levels, and three that join its gradients."""
    for of_rank in launches(world):
        for name, of_call in of_rank[topology].items():
            for launched, levels_joined in zip(of_call, (1, 3), strict=True):
                packed = launched.count("knapformer::move_rows")
                assert packed <= (4 if name == "attention" else 2), (name, launched)
                joins = name == "attention" and "/" in topology
                assert launched.count("aten::cat") == len(launched) - packed == joins * levels_joined, (name, launched)
    for name in ("route", "reverse_route", "attention"):
        parts = zip(*(of_rank[topology][name] for of_rank in launches(world)), strict=True)
        # One rank alone has no exchange, nor has attention in bags of one rank.
        shares = world > 1 and (name != "attention" or topology not in ("g1n2", "g1n3"))
        assert all(any("knapformer::move_rows" in launched for launched in part) == shares for part in parts), name
