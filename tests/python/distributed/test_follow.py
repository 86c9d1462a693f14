"""Plans that a balancer follows without gathering lengths. Oracle: numbered tokens, of which plans say what arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from balancer_checks import Call, check_errors, errors_of, run_checks
from ranks import run_ranks
from torch import Tensor

import knapformer
from knapformer import ArgumentError, Plan, SequenceBalancer

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


def check_plans_that_are_followed(rank: int, world_size: int) -> None:
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


PLAN = knapformer.plan(LENGTHS, "g4n1", d_model=D_MODEL)


def _other_plan(balancer: SequenceBalancer, rank: int) -> None:
    other = knapformer.plan([[3, 70], [], [9], [1, 2, 6]], "g4n1", d_model=D_MODEL)
    balancer.follow(other if rank == 2 else PLAN)
    balancer.route(at_home(other if rank == 2 else PLAN, rank))


def _follow_of_two(micro_batch: Callable[[int], int]) -> Call:
    return lambda b, rank: b.follow(b.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=2), micro_batch(rank))


# What ranks do -> the words of the error on all of them.
MISTAKES: dict[str, tuple[Call, str]] = {
    "other plan": (
        _other_plan,
        "plan: got one on rank 2 that differs from that on rank 0, expected the same plan on all ranks",
    ),
    "topology": (
        lambda b, _: b.follow(knapformer.plan(LENGTHS, "g2n2", d_model=D_MODEL)),
        "plan: got one of g2n2 on 4 ranks, expected one of g4n1 on 4 ranks",
    ),
    "ranks": (
        lambda b, _: b.follow(knapformer.plan(LENGTHS * 2, "g4n1", d_model=D_MODEL)),
        "plan: got one of g4n1 on 8 ranks, expected one of g4n1 on 4 ranks",
    ),
    "not a step": (lambda b, _: b.follow(PLAN, 1), "micro_batch: got 1, expected 0 to 0"),
    "micro-batch": (_follow_of_two(lambda rank: 2), "micro_batch: got 2, expected 0 to 1"),
    "another micro-batch": (_follow_of_two(lambda rank: rank // 3), r"follow\("),
    "steps differ": (
        lambda b, rank: b.plan_routing(LENGTHS[rank], D_MODEL, micro_batches=2 + rank // 3),
        "micro_batches: got ",
    ),
    "other call": (lambda b, rank: b.follow(PLAN) if rank else b.plan_routing(LENGTHS[rank], D_MODEL), "follow"),
}


def _mistakes(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    return errors_of(rank, {name: call for name, (call, _) in MISTAKES.items()}, "g4n1")


def test_follow_on_real_ranks() -> None:
    run_checks([check_plans_that_are_followed], 4)


def test_mistakes_are_errors_on_all_ranks() -> None:
    check_errors(run_ranks(_mistakes, 4), {name: ("", words) for name, (_, words) in MISTAKES.items()})


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
