"""The launcher itself."""

import time

import pytest
import torch.distributed as dist
from ranks import run_ranks


def keys_after_the_first_rank_is_done(rank: int, world_size: int) -> str:
    if rank == 0:
        return "done"
    time.sleep(1)
    store = dist.distributed_c10d._get_default_store()
    store.set("late", "here")
    return store.get("late").decode()


def raise_on_the_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError(f"rank {rank} says no")


def test_the_store_outlives_the_rank_that_serves_it() -> None:
    assert run_ranks(keys_after_the_first_rank_is_done, 2) == ["done", "here"]


def test_a_rank_that_raises_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: [\s\S]*ValueError: rank 1 says no"):
        run_ranks(raise_on_the_last, 2)
