"""A few seconds of soak.py: nothing but memory may be more at the end, and results are those of a rank alone."""

from __future__ import annotations

from ranks import run_ranks
from soak import STEPS_OF_ROUND, growth, soak


def test_nothing_is_held_from_round_to_round() -> None:
    for held in run_ranks(soak, 2, 9 * STEPS_OF_ROUND, 1, 1e9, 0, timeout_s=110):
        grown = growth(held[2:])  # the first rounds make the groups of bags, and torch's threads
        assert (grown["threads"], grown["files"], grown["store_keys"]) == (0, 0, 0), held
        assert grown["resident_kib"] < 8192, held
