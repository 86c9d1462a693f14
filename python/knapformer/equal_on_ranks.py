"""Ranks make sure that what must be equal on all of them is, through the default group's store. Needs torch.

Neither a collective of a backend nor a device takes part, so ranks may come here between any collectives of FSDP and
others. A rank makes five calls of the store.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from knapformer._core import StateError

_EQUAL = "equal"


def check_equal_on_ranks(what: str, own: dict[str, str]) -> None:
    """Raises StateError on all ranks: where a value differs on one, with its name and both values; where one does not
    come within the store's timeout, with its number.

    Collective over the default group: all ranks call it equally often for each `what`, which the error names.
    """
    world = dist.group.WORLD
    assert world is not None
    rank, num_ranks = world.rank(), world.size()
    shared: Any = world.get_group_store()  # torch's stubs lack some of its methods
    store: Any = PrefixStore(f"knapformer/{what}", shared.clone())  # a client that waits serves nobody else
    store.set_timeout(shared.timeout)
    number = store.add(f"calls of rank {rank}", 1)  # in the store, as the group may be made again on the same one
    keys = [f"{number}/{key}" for key in ("first", "difference", "verdict", "compared", "late", "left")]
    first, difference, verdict, compared, late, left = keys
    try:
        if rank == 0:
            store.set(first, json.dumps(own))
        elif differing := _differing(json.loads(store.get(first)), own, rank):
            store.compare_set(difference, "", differing)
        if store.add(compared, 1) == num_ranks:
            store.compare_set(verdict, "", store.compare_set(difference, "", _EQUAL).decode())
        said = store.get(verdict).decode()
    except RuntimeError as error:  # the timeout
        if store.add(late, 1) == 1:  # one rank asks for all
            missing = [other for other in range(num_ranks) if store.add(f"calls of rank {other}", 0) < number]
            told = f"{what}: waited {store.timeout.total_seconds():g} s for ranks {missing} to begin number {number}"
            store.compare_set(verdict, "", f"{told}, expected all ranks to begin each ({error})")
        said = store.get(verdict).decode()
    if said != _EQUAL:
        raise StateError(said)
    if store.add(left, 1) == num_ranks:
        for key in keys:
            store.delete_key(key)


def _differing(first: dict[str, str], own: dict[str, str], rank: int) -> str:
    names = [name for name in first | own if first.get(name) != own.get(name)]
    return "; ".join(f"{name}: rank 0 has {first.get(name)}, rank {rank} has {own.get(name)}" for name in names)
