"""The groups of bags: how they are made among other groups, and how they end with them."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from balancer_checks import of_all_ranks
from ranks import run_ranks

from knapformer import SequenceBalancer

TIMEOUT = datetime.timedelta(seconds=20)


def _step(balancer: SequenceBalancer, backward: bool = False) -> None:
    """There and back, through attention that passes the values on: rows come home as they were."""
    rank = dist.get_rank()
    lens = [3 + 5 * rank, 2]
    x = (torch.arange(sum(lens) * 8.0).view(-1, 8) + 1000 * rank).requires_grad_(backward)
    balancer.finish_planning(balancer.start_planning(lens, 8))  # by a thread, which a forked process does not have
    _, y, _ = balancer.route(x)
    qkv = y.view(-1, 4, 2)
    o = balancer.attention(qkv, qkv, qkv, lambda q, k, v, lens: v * 1)
    _, home = balancer.reverse_route(o.flatten(1))
    assert torch.equal(home, x)
    if backward:
        home.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]


def _bag_groups() -> list[dist.ProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if group.group_desc.startswith("knapformer bag ")]


def _make_among_other_groups(rank: int, world_size: int) -> None:
    dist.new_group([0])  # from here on ranks are members of different numbers of groups
    for topology in ("g2n2", "g1n2+g2n1", "g1n1+g3n1", "g2n2"):
        _step(SequenceBalancer(topology))

    # Ranks outside of a parent take no part; ranks 2 and 3 are a bag of two parents.
    parents = {ranks: dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in ((1, 2, 3), (0, 1, 2))}
    world = dist.group.WORLD
    assert world is not None
    # A default group bound to a device splits its communicator for new groups, if allowed: that takes all its ranks.
    device = torch.device("cuda", 0)
    world.bound_device_id = device
    for ranks, parent in parents.items():
        for _ in range(2 if rank in ranks else 0):
            _step(SequenceBalancer("g1n1+g2n1", group=parent))
    assert world.bound_device_id == device
    world.bound_device_id = None

    groups = _bag_groups()
    assert of_all_ranks(len(groups)) == [1, 3, 4, 3]
    for group in groups:
        assert group.bound_device_id is None
        assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    # They are groups like others to torch.
    dist.barrier(groups[0])
    assert dist.get_process_group_ranks(groups[0]) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_rank(groups[0]) == rank % 2


def test_bags_among_other_groups() -> None:
    run_ranks(_make_among_other_groups, 4, group_timeout_s=TIMEOUT.total_seconds(), timeout_s=90)


def _has_worker_threads() -> bool:
    """Of Gloo: they run collectives, and drop what those held."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            if name.read_text().strip() == "pt_gloo_runloop":
                return True
    return False


def _init_again(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    prefixed = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=TIMEOUT)


def _end_with_the_groups(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    # A balancer that outlives the default group holds the last of it: its threads end with it, while this one would
    # keep them from the interpreter, which they need to drop what a backward pass left in its collectives.
    for i in range(8):
        balancer = SequenceBalancer("g1n1+g2n1")
        for _ in range(2):
            _step(balancer, backward=True)
        assert len(_bag_groups()) == (rank > 0)
        dist.destroy_process_group()
        del balancer
        assert not _has_worker_threads()
        _init_again(store, f"again {i}", rank, world_size)

    # One that is there until the process ends lets them go before the interpreter does, after which they would abort.
    balancer = SequenceBalancer("g1n1+g2n1")
    _step(balancer, backward=True)
    dist.destroy_process_group()
    assert _has_worker_threads()
    atexit._run_exitfuncs()
    assert not _has_worker_threads()
    try:
        balancer.plan_routing([1], 8)
    except RuntimeError as error:
        assert "the process ends" in str(error)
    else:
        raise AssertionError("planned without a group")


def test_groups_end_with_the_balancer_and_the_process() -> None:
    run_ranks(_end_with_the_groups, 3, group_timeout_s=TIMEOUT.total_seconds(), timeout_s=120)


def _ends_well_in_a_fork(let_go: Callable[[], None]) -> bool:
    """Whether a forked process comes through this."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a process that waits
        # So many threads make the system give back the memory of those that the parent had.
        together = threading.Barrier(12)
        threads = [threading.Thread(target=together.wait) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        let_go()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _drop_in_forks(rank: int, world_size: int) -> list[bool]:
    holder = [SequenceBalancer("g1n1+g2n1")]
    _step(holder[0], backward=True)
    ends_well = [_ends_well_in_a_fork(holder.clear)]
    _step(holder[0])  # which goes on here
    dist.barrier()
    dist.destroy_process_group()  # so that the balancer holds the last of the groups
    return ends_well + [_ends_well_in_a_fork(let_go) for let_go in (holder.clear, atexit._run_exitfuncs)]


def test_a_forked_process_may_drop_the_balancer() -> None:
    """As a worker of a DataLoader does where it collects an old balancer, and as any process does at its end."""
    assert run_ranks(_drop_in_forks, 3) == [[True, True, True]] * 3


def _on_a_group_of_its_own(rank: int, world_size: int) -> None:
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _step(SequenceBalancer("g2n1", group=group))


def test_a_group_that_torch_distributed_did_not_make() -> None:
    run_ranks(_on_a_group_of_its_own, 2)
