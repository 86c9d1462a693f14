"""A few seconds of soak.py: nothing but memory may be more at the end, and results are those of a rank alone."""

from __future__ import annotations

import ctypes
import gc

from ranks import run_ranks
from soak import STEPS_OF_ROUND, growth, soak

from knapformer import SequenceBalancer

_FIELDS = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"


class _MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = _MallInfo2


def test_nothing_is_held_from_round_to_round() -> None:
    for held in run_ranks(soak, 2, 9 * STEPS_OF_ROUND, 1, 1e9, 0, timeout_s=110):
        grown = growth(held[2:])  # the first rounds make the groups of bags, and torch's threads
        assert (grown["threads"], grown["files"], grown["store_keys"]) == (0, 0, 0), held
        assert grown["resident_kib"] < 8192, held


def memory_of_planning_ahead(rank: int, world_size: int) -> float:
    """Bytes of malloc that a step leaves behind."""
    balancer = SequenceBalancer(f"g{world_size}/1n1")

    def held_after(num_steps: int) -> int:
        for _ in range(num_steps):
            balancer.finish_planning(balancer.start_planning([5, 7, 9], 8))
        gc.collect()
        info = mallinfo2()
        return int(info.uordblks + info.hblkhd)

    before = held_after(3000)  # what torch records of its last 2,000 collectives is full
    return (held_after(2000) - before) / 2000


def test_planning_ahead_leaves_no_memory_behind() -> None:
    for bytes_a_step in run_ranks(memory_of_planning_ahead, 2):
        assert bytes_a_step < 30, "c10d keeps about 120 bytes for each thread that has waited for a collective"
