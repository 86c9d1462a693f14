"""Steps held as values, over real Gloo groups: ranks that move tensors by steps of different plans or micro-batches all
raise an error that names the steps. In steps that repeat, comparing them costs no word in the group's store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import causal_free_attention, check_errors, errors_of, new_group
from knapformer._torch import PlanningAhead
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from knapformer import SequenceBalancer, Step

# Two plans of as many rows on every rank, and of other rows for every peer.
LENS = {2: ([[9], [4, 5]], [[4, 5], [9]]), 4: ([[9], [4, 5], [9], [2, 7]], [[4, 5], [9], [2, 7], [9]])}


@pytest.mark.parametrize("call", ["route", "reverse_route", "pre_attn", "post_attn", "attention"])
def test_the_balancers_calls_take_what_a_steps_do(call: str) -> None:
    assert inspect.signature(getattr(SequenceBalancer, call)) == inspect.signature(getattr(Step, call))


def _x(step: Step) -> Tensor:
    return torch.ones(int(step.seq_lens.sum()), 4, requires_grad=True)


def _attend(step: Step, h: Tensor) -> Tensor:
    q = h.view(-1, 4, 1)
    return step.attention(q, q, q, causal_free_attention).flatten(1)


def _whole(step: Step) -> None:
    step.reverse_route(_attend(step, step.route(_x(step), [])[1]))[1].sum().backward()


def _routed(steps: list[Step], mine: int) -> tuple[Step, Tensor]:
    return steps[mine], [step.route(_x(step), [])[1] for step in steps][mine]


# (steps of two plans, that which this rank takes: 1 on rank 1, else 0) -> what is named.
CALLS: dict[str, tuple[Callable[[list[Step], int], Any], str]] = {
    "route": (lambda steps, mine: steps[mine].route(_x(steps[mine]), []), "route: step: "),
    "attention": (lambda steps, mine: _attend(*_routed(steps, mine)), "attention: step: "),
    "pre_attn": (lambda steps, mine: _pre_attn(*_routed(steps, mine)), "pre_attn: step: "),
    "reverse_route": (lambda steps, mine: steps[mine].reverse_route(_routed(steps, mine)[1]), "reverse_route: step: "),
    "backward": (lambda steps, mine: _routed(steps, mine)[1].sum().backward(), "route backward: step: "),
}  # fmt: skip


def _pre_attn(step: Step, h: Tensor) -> None:
    step.pre_attn(*(h.view(-1, 4, 1),) * 3)


def _two_plans(balancer: SequenceBalancer, rank: int) -> list[Step]:
    return [balancer.step(balancer.plan_routing(lens[rank], 8)) for lens in LENS[balancer.num_ranks]]


def _two_micro_batches(balancer: SequenceBalancer, rank: int) -> list[Step]:
    plan = balancer.plan_routing([9] * 4, 8, micro_batches=2)
    return [balancer.step(plan, k) for k in range(2)]


def _two_own_plans(balancer: SequenceBalancer, rank: int) -> list[Step]:
    """As plans that every rank made by itself."""
    plans = [step.plan for step in _two_plans(SequenceBalancer(balancer.topology, group=new_group()), rank)]
    return [balancer.step(plan) for plan in plans]


WAYS = (_two_plans, _two_micro_batches, _two_own_plans)


def _differ(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    def call_of(call: Any, two_steps: Any, warm_steps: int) -> Any:
        def run(balancer: SequenceBalancer, rank: int) -> None:
            for step in [step for _ in range(warm_steps) for step in two_steps(balancer, rank)]:
                _whole(step)
            call(two_steps(balancer, rank), int(rank == 1))
            balancer.plan_routing([3], 8)  # a rank whose own calls went through meets the others here

        return run

    calls = {
        f"{name}, {two_steps.__name__}, {warm_steps}": call_of(call, two_steps, warm_steps)
        for name, (call, _) in CALLS.items()
        for two_steps in WAYS
        for warm_steps in (0, 2)
    }
    return errors_of(rank, calls, f"g2n{world_size // 2}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_that_differ_are_an_error_on_all_ranks(world_size: int) -> None:
    by_rank = run_ranks(_differ, world_size, timeout_s=300)
    expected = {case: CALLS[case.split(",")[0]][1] + "got number .*expected number " for case in by_rank[0]}
    check_errors(by_rank, {case: ("ArgumentError", words) for case, words in expected.items()})


def _announced(group: dist.ProcessGroup) -> list[str]:
    """The last calls that were announced, in the stores of a balancer's two groups."""
    bags = [
        bag for bag, name in dist.distributed_c10d._world.pg_names.items() if name.startswith(f"{group.group_name}/")
    ]
    return [
        of.get_group_store().get(f"knapformer/number 1/{name}/last_announced").decode()
        for name, of in [("all", group), *(("bag", bag) for bag in bags)]
    ]


def _repeat(rank: int, world_size: int) -> dict[str, tuple[list[str], list[str]]]:
    """The last calls that were announced before and after steps that repeat, by kind of step."""
    lens, other_lens = (lens[rank] for lens in LENS[world_size])

    def one_after_another(balancer: SequenceBalancer) -> None:
        plan = balancer.plan_routing(lens * 2, 8, micro_batches=4)
        for k in range(4):
            _whole(balancer.step(plan, k))

    def pipelined(balancer: SequenceBalancer) -> None:
        plan = balancer.plan_routing(lens * 2, 8, micro_batches=4)
        steps = [balancer.step(plan, k) for k in range(4)]
        for loss in [_attend(step, step.route(_x(step), [])[1]).sum() for step in steps]:
            loss.backward()

    def evaluated(balancer: SequenceBalancer) -> None:
        step = balancer.step(balancer.plan_routing(lens, 8))
        loss = _attend(step, step.route(_x(step), [])[1]).sum()
        _whole(balancer.step(balancer.plan_routing(other_lens, 8)))
        loss.backward()

    def recomputed(balancer: SequenceBalancer) -> None:
        step = balancer.step(balancer.plan_routing(lens, 8))
        h = checkpoint(_attend, step, step.route(_x(step), [])[1], use_reentrant=False)
        balancer.plan_routing(other_lens, 8)
        h.sum().backward()

    ahead: list[PlanningAhead] = []

    def planned_ahead(balancer: SequenceBalancer) -> None:
        while len(ahead) < 3:
            ahead.append(balancer.start_planning(lens * 2, 8, micro_batches=2))
        plan = balancer.finish_planning(ahead.pop(0))
        for k in range(2):
            _whole(balancer.step(plan, k))

    announced = {}
    for kind in (one_after_another, pipelined, evaluated, recomputed, planned_ahead):
        group = new_group()
        balancer = SequenceBalancer(f"g2n{world_size // 2}", group=group)
        for _ in range(3):
            kind(balancer)
        dist.barrier()
        before = _announced(group)
        dist.barrier()
        for _ in range(4):
            kind(balancer)
        dist.barrier()
        announced[kind.__name__] = (before, _announced(group))
        dist.barrier()
    return announced


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_that_repeat_are_compared_without_a_word(world_size: int) -> None:
    for announced in run_ranks(_repeat, world_size, timeout_s=120):
        assert all(before == after for before, after in announced.values()), str(announced)
