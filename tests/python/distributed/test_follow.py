"""Plans that a balancer follows without gathering lengths. Oracle: numbered tokens, of which plans say what arrives."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import GROUP_TIMEOUT_S, run_ranks
from torch import Tensor

import knapformer
from knapformer import ArgumentError, Plan, SequenceBalancer, StateError

D_MODEL = 8
LENGTHS = [[3, 70], [], [9], [1, 2, 5]]


def numbers_of(sequence: int, begin: int, end: int) -> Tensor:
    return 1000 * sequence + torch.arange(begin, end)


def at_home(plan: Plan, rank: int) -> Tensor:
    first = sum(len(lens) for lens in plan.seq_lens[:rank])
    own = [numbers_of(first + i, 0, length) for i, length in enumerate(plan.seq_lens[rank])]
    return torch.cat([torch.empty(0, dtype=torch.int64), *own])


def in_chunks(plan: Plan, rank: int) -> Tensor:
    """In the order of rows: by degree, then by sequence."""
    degrees = plan.degree_of_sequence
    held = sorted((degrees[s], s, first, n) for s, r, first, n in plan.chunks if r == rank)
    rows = [numbers_of(s, first, first + n) for _, s, first, n in held]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rows])


def moves_as(balancer: SequenceBalancer, plan: Plan) -> None:
    rank = balancer.rank
    assert balancer.plan == plan
    home, chunks = at_home(plan, rank), in_chunks(plan, rank)
    assert int(balancer.seq_lens.sum()) == len(home) and int(balancer.chunk_lens.sum()) == len(chunks)
    chunk_lens, x, _ = balancer.route(home)
    assert torch.equal(x, chunks) and torch.equal(chunk_lens, balancer.chunk_lens)
    assert torch.equal(balancer.reverse_route(x)[1], home)


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ArgumentError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check(rank: int, world_size: int) -> dict[str, str]:
    for topology in ("g4n1", "g2n2", "g4/2/1n1"):
        balancer = SequenceBalancer(topology, sync="step")
        plans = [knapformer.plan(lens, topology, d_model=D_MODEL) for lens in (LENGTHS, LENGTHS[::-1], [[]] * 4)]
        for plan in (*plans, plans[0]):
            balancer.follow(plan)
            moves_as(balancer, plan)
        balancer.follow(plans[1])  # and nothing moves
        # Beside plans that are gathered, and steps.
        balancer.plan_routing(LENGTHS[rank], D_MODEL)
        moves_as(balancer, plans[0])
        step = balancer.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=3)
        assert step == knapformer.plan(LENGTHS, topology, d_model=D_MODEL, micro_batches=3, sync="step")
        for micro_batch in (0, 1, 2, 1):
            balancer.follow(step, micro_batch)
            moves_as(balancer, step.plans[micro_batch])
        assert balancer.metrics()["balancer/num_collectives"] == 2  # there and back: following takes none

    told = {}

    def fresh() -> SequenceBalancer:
        made = SequenceBalancer("g4n1", group=dist.new_group(list(range(4))))
        dist.barrier()  # a rank that is still making it would raise there what others say of their next call
        return made

    plan = knapformer.plan(LENGTHS, "g4n1", d_model=D_MODEL)
    other = knapformer.plan([[3, 70], [], [9], [1, 2, 6]], "g4n1", d_model=D_MODEL)
    balancer = fresh()
    balancer.follow(other if rank == 2 else plan)
    told["other plan"] = message_of(lambda: balancer.route(at_home(other if rank == 2 else plan, rank)))
    balancer = fresh()
    told["topology"] = message_of(lambda: balancer.follow(knapformer.plan(LENGTHS, "g2n2", d_model=D_MODEL)))
    balancer = fresh()
    told["ranks"] = message_of(lambda: balancer.follow(knapformer.plan(LENGTHS * 2, "g4n1", d_model=D_MODEL)))
    balancer = fresh()
    told["not a step"] = message_of(lambda: balancer.follow(plan, 1))
    balancer = fresh()
    step = balancer.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=2)
    told["micro-batch"] = message_of(lambda: balancer.follow(step, 2))
    balancer = fresh()
    told["steps differ"] = message_of(
        lambda: balancer.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=2 + rank // 3)
    )
    balancer = fresh()
    step = balancer.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=2)
    begin = time.monotonic()
    told["another micro-batch"] = message_of(lambda: balancer.follow(step, rank // 3))
    assert time.monotonic() - begin < GROUP_TIMEOUT_S / 2
    balancer = fresh()
    told["other call"] = message_of(
        lambda: balancer.follow(plan) if rank else balancer.plan_routing(LENGTHS[rank], D_MODEL)
    )
    return told


def test_follow_on_real_ranks() -> None:
    expected = {
        "other plan": "plan: got one on rank 2 that differs from that on rank 0, expected the same plan on all ranks",
        "topology": "plan: got one of g2n2 on 4 ranks, expected one of g4n1 on 4 ranks",
        "ranks": "plan: got one of g4n1 on 8 ranks, expected one of g4n1 on 4 ranks",
        "not a step": "micro_batch: got 1, expected 0 to 0",
        "micro-batch": "micro_batch: got 2, expected 0 to 1",
        "steps differ": "micro_batches: got ",
        "another micro-batch": "follow(",
        "other call": "follow",
    }
    for of_rank in run_ranks(check, 4):
        assert of_rank.keys() == expected.keys()
        for case, words in expected.items():
            assert words in of_rank[case], (case, of_rank[case])


def test_one_rank_alone() -> None:
    balancer = SequenceBalancer("g1n1")
    plan = knapformer.plan([[4, 2]], "g1n1", d_model=D_MODEL)
    balancer.follow(plan)
    moves_as(balancer, plan)
    step = balancer.plan_routing([4, 2, 1], D_MODEL, micro_batches=2)
    for micro_batch in range(2):
        balancer.follow(step, micro_batch)
        moves_as(balancer, step.plans[micro_batch])
    with pytest.raises(ArgumentError, match="micro_batches: got 0, expected an integer from 1 to"):
        balancer.plan_routing([4], D_MODEL, micro_batches=0)
