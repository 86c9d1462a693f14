"""A balancer whose topology is "auto": that of the first lengths, on all ranks alike, for good."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from balancer_checks import Check, causal_free_attention, own, run_checks
from ranks import run_ranks

import knapformer
from knapformer import BalancedLoader, BalancedStepLoader, Cluster, SequenceBalancer, StateError

WIDTH = 12
# Slow enough that one long sequence is worth sharing.
SLOW = Cluster(flops_per_s=1e6, node_latency_s=0, network_latency_s=0, fixed_s=0)
LONG = {2: [[300, 5], [7]], 4: [[300, 5], [], [7, 40], [9]]}
SHORT = {2: [[30], [30]], 4: [[30]] * 4}


def best_of(lens: list[list[int]], **settings: object) -> str:
    topology: str = knapformer.rank_topologies([lens], d_model=WIDTH, cluster=SLOW, **settings)[0].topology  # type: ignore[arg-type]
    return topology


def check_first_lengths_choose(rank: int, world_size: int) -> None:
    lens = LONG[world_size]
    best = best_of(lens)
    assert best.startswith(f"g{world_size}") and best != best_of(SHORT[world_size])
    balancer = SequenceBalancer("auto", cluster=SLOW, d_model=WIDTH)
    for _ in range(2):  # nothing to choose by
        assert balancer.plan_routing([], WIDTH).num_sequences == 0
        with pytest.raises(StateError, match="topology: is chosen from the first lengths"):
            _ = balancer.topology
    assert balancer.plan_routing(own(lens, rank), WIDTH) == knapformer.plan(lens, best, d_model=WIDTH, cluster=SLOW)
    assert balancer.topology == best
    # Attention in its bags is that of each rank alone.
    torch.manual_seed(rank)
    x = torch.randn(sum(own(lens, rank)), 6, 2, dtype=torch.float64)
    _, moved, _ = balancer.route(x)
    _, back = balancer.reverse_route(balancer.attention(moved, moved, moved, causal_free_attention))
    alone = causal_free_attention(x, x, x, torch.tensor(own(lens, rank)))
    torch.testing.assert_close(back, alone, rtol=1e-12, atol=1e-12)
    # Others would choose another; it stays.
    of_short = balancer.plan_routing(own(SHORT[world_size], rank), WIDTH)
    assert str(of_short.topology) == best == balancer.topology
    balancer.follow(knapformer.plan(lens, best, d_model=WIDTH))


def check_steps_choose(rank: int, world_size: int) -> None:
    lens = LONG[world_size]
    balancer = SequenceBalancer("auto", cluster=SLOW, d_model=WIDTH)
    steps = balancer.plan_routing(own(lens, rank), WIDTH, micro_batches=2)
    assert steps == knapformer.plan(lens, balancer.topology, d_model=WIDTH, cluster=SLOW, micro_batches=2)
    assert balancer.topology == best_of(lens)


def check_a_loader_chooses(rank: int, world_size: int) -> None:
    """Also where the first lists of a rank are empty, and ahead of their use."""
    lens = LONG[world_size]
    balancer = SequenceBalancer("auto", cluster=SLOW, d_model=WIDTH)
    batches = [{"seq_lens": own(lens, rank)}, {"seq_lens": own(SHORT[world_size], rank)}]
    plans = [plan for _, plan in BalancedLoader(batches, balancer, empty=lambda: {"seq_lens": []})]
    best = best_of(lens)
    assert plans == [knapformer.plan(of, best, d_model=WIDTH, cluster=SLOW) for of in (lens, SHORT[world_size])]

    balancer = SequenceBalancer("auto", cluster=SLOW, d_model=WIDTH)
    samples = [[{"x": torch.full((n, 2), float(n))} for n in own(lens, rank)], []]
    loader = BalancedStepLoader(samples, balancer, 2, per_token=["x"])
    tokens = sum(len(sample["x"]) for micro_batch, _ in loader for sample in micro_batch)
    counts = [0] * world_size
    dist.all_gather_object(counts, tokens)
    assert sum(counts) == sum(map(sum, lens)) and balancer.topology == best


def check_what_cannot_be_planned_is_refused(rank: int, world_size: int) -> None:
    """By the limit of the best topology; and the balancer goes on."""
    balancer = SequenceBalancer("auto", cluster=SLOW, max_tokens_per_rank=20, d_model=WIDTH)
    with pytest.raises(knapformer.ArgumentError, match="max_tokens_per_rank: got 20"):
        balancer.plan_routing(own(LONG[world_size], rank), WIDTH)
    assert balancer.plan_routing([3], WIDTH).num_sequences == world_size


def check_plans_to_follow_come_after(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer("auto", group=dist.new_group(list(range(world_size))), d_model=WIDTH)
    dist.barrier()  # a rank that were still making its balancer would hear of the mistake there
    with pytest.raises(StateError, match="topology: is chosen from the first lengths"):
        balancer.follow(knapformer.plan([[5]] * world_size, f"g1n{world_size}", d_model=WIDTH))


CHECKS: list[Check] = [
    check_first_lengths_choose,
    check_steps_choose,
    check_a_loader_chooses,
    check_what_cannot_be_planned_is_refused,
    check_plans_to_follow_come_after,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_first_lengths_choose_the_topology(world_size: int) -> None:
    run_checks(CHECKS, world_size)


def _one_of_two(rank: int, world_size: int) -> str:
    try:
        SequenceBalancer("auto" if rank == 0 else "g1n2", d_model=WIDTH)
    except Exception as error:
        return str(error)
    return ""


def test_it_is_auto_on_all_ranks_or_on_none() -> None:
    for error in run_ranks(_one_of_two, 2):
        assert "topology: got g1n2 on rank 1, expected auto, as on rank 0" in error


def test_a_process_alone_has_a_bag_of_one() -> None:
    assert SequenceBalancer("auto", d_model=WIDTH).topology == "g1n1"
