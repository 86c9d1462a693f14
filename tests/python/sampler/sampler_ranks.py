"""What the ranks of test_sampler_on_ranks do. Apart from it, so that a started rank imports nothing of pytest."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from knapformer import BalancedBatchSampler

LENGTHS = [40, 7, 64, 5, 9, 30, 300, 12, 21] * 4
COMMON = {"lengths": LENGTHS, "batch_size": 2, "d_model": 64}


def begun(arguments: dict[str, Any], epoch: int = 0, first: int = 0) -> Any:
    """Collective. The lists of a pass, or the error."""
    sampler = BalancedBatchSampler(**(COMMON | arguments))
    sampler.load_state_dict(sampler.state_dict() | {"epoch": epoch, "next_sample": first})
    try:
        return list(sampler)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def passes(rank: int, num_ranks: int, cases: list[dict[int, dict[str, Any]]]) -> list[Any]:
    """Collective. A case gives a rank arguments, and `epoch` and `first`."""
    outcomes = []
    for case in cases:
        own = dict(case.get(rank, {}))
        outcomes.append(begun(epoch=own.pop("epoch", 0), first=own.pop("first", 0), arguments=own))
    num_keys = []
    for _ in range(2):
        for _ in range(10):
            begun({})
        dist.barrier()
        num_keys.append(dist.group.WORLD.get_group_store().num_keys())
        dist.barrier()
    assert num_keys[0] == num_keys[1]
    return outcomes


def one_is_late(rank: int, num_ranks: int) -> tuple[str, float]:
    begin = time.monotonic()
    if rank == 1:
        time.sleep(9)
    return begun({}), time.monotonic() - begin
