"""How few launches an exchange takes on an accelerator, and how few bytes it moves there."""

from __future__ import annotations

import functools
from typing import NamedTuple

from accelerator.cases import TOPOLOGIES, each_topology
from accelerator.launch_ranks import (
    HEAD_BYTES,
    NUM_HEADS,
    ROUTED_BYTES,
    Launches,
    PackedBytes,
    launches_of_calls,
    packed_bytes_of_calls,
)
from distributed.ranks import run_ranks

from knapformer import Plan


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


@functools.cache
def packed_bytes(world: int) -> list[dict[str, tuple[Plan, dict[str, PackedBytes]]]]:
    return run_ranks(packed_bytes_of_calls, world, TOPOLOGIES[world])


class Moved(NamedTuple):
    """Bytes that one exchange takes and gives on a rank, and those of both that stay there."""

    taken: int
    given: int
    staying: int

    def back(self) -> Moved:
        return Moved(self.given, self.taken, self.staying)

    def packed(self) -> int:
        """What is taken is read once, and what comes by the wire once more."""
        return self.taken + self.given - self.staying


def routed(plan: Plan, rank: int) -> Moved:
    homes = [home for home, lens in enumerate(plan.seq_lens) for _ in lens]
    staying = sum(tokens for sequence, on, _, tokens in plan.chunks if on == rank == homes[sequence])
    return Moved(*(ROUTED_BYTES * n for n in (plan.tokens_before[rank], plan.tokens_after[rank], staying)))


def shared_and_whole(plan: Plan, rank: int) -> tuple[Moved, int]:
    """Of heads, from the rank's rows to the sequences that it shares; and the bytes of its other sequences."""
    lens = [length for of_home in plan.seq_lens for length in of_home]
    rows = {sequence: tokens for sequence, on, _, tokens in plan.chunks if on == rank}
    moved, whole = [0, 0, 0], 0
    for sequence, (first, degree) in enumerate(zip(plan.first_rank_of_sequence, plan.degree_of_sequence, strict=True)):
        if degree == 1:
            whole += HEAD_BYTES * NUM_HEADS * rows.get(sequence, 0)
        elif first <= rank < first + degree:
            of_rows, own_heads = HEAD_BYTES * rows.get(sequence, 0), NUM_HEADS // degree
            for i, num_bytes in enumerate(
                (of_rows * NUM_HEADS, HEAD_BYTES * lens[sequence] * own_heads, of_rows * own_heads)
            ):
                moved[i] += num_bytes
    return Moved(*moved), whole


@each_topology
def test_each_byte_is_packed_once(world: int, topology: str) -> None:
    """On each side of the wire. Attention reads what is whole on a rank where it lies; what it gives for that is copied
    beside the rest."""
    for rank, of_rank in enumerate(packed_bytes(world)):
        plan, packed = of_rank[topology]
        route, (heads, whole) = routed(plan, rank), shared_and_whole(plan, rank)
        there, back = heads.packed(), heads.back().packed() + whole
        expected = {
            "route": PackedBytes(route.packed(), route.back().packed()),
            "reverse_route": PackedBytes(route.back().packed(), route.packed()),
            "attention": PackedBytes(3 * there + back, there + 3 * back),  # q, k, v and their output
        }
        if world == 1:
            expected = dict.fromkeys(expected, PackedBytes(0, 0))
        elif heads == Moved(0, 0, 0):  # a bag of one rank
            expected["attention"] = PackedBytes(0, 0)
        assert packed == expected, (rank, plan.chunks)
