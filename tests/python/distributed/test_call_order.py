"""Calls out of order where a balancer has two groups, its own and those of its bags, over real Gloo groups.

Expected: an exception on every rank that names the calls, soon and not after the group's timeout; after the timeout
where a rank makes no call at all, with the word which one that is.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from torch import Tensor

from knapformer import SequenceBalancer

WORLD_SIZE = 4
TIMEOUT_S = 60
SOON_S = 30  # far from both, so that a busy machine does not matter
NO_CALL_TIMEOUT_S = 8

LENS = [[3, 4], [5], [9], [2, 2]]


def _routed(balancer: SequenceBalancer, rank: int) -> Tensor:
    balancer.plan_routing(LENS[rank], 8)
    x = torch.ones(sum(LENS[rank]), 4, requires_grad=True)
    return balancer.route(x)[1]


def _attended(balancer: SequenceBalancer, h: Tensor) -> Tensor:
    q = h.view(-1, 4, 1)
    return balancer.post_attn(balancer.pre_attn(q, q, q)[1])[1].flatten(1)


def _step(balancer: SequenceBalancer, rank: int) -> None:
    balancer.reverse_route(_attended(balancer, _routed(balancer, rank)))[1].sum().backward()


def _whole_group_first(balancer: SequenceBalancer, rank: int) -> None:
    balancer.reverse_route(_routed(balancer, rank))


def _no_backward(balancer: SequenceBalancer, rank: int) -> None:
    balancer.reverse_route(_attended(balancer, _routed(balancer, rank)))
    _step(balancer, rank)


def _no_return(balancer: SequenceBalancer, rank: int) -> None:
    _attended(balancer, _routed(balancer, rank)).sum().backward()
    _step(balancer, rank)


def _waits_for_a_plan(balancer: SequenceBalancer, rank: int) -> None:
    _routed(balancer, rank)
    balancer.finish_planning(balancer.start_planning(LENS[rank], 8))


def _other_heads(balancer: SequenceBalancer, rank: int) -> None:
    q = _routed(balancer, rank).view(-1, 4, 1)
    balancer.pre_attn(q.view(-1, 2, 2), q, q)


# What rank 1 does instead of a step -> what every rank must raise.
MISTAKES: dict[str, tuple[Callable[[SequenceBalancer, int], None], str]] = {
    "whole_group_first": (_whole_group_first, "(?=.*reverse_route)(?=.*pre_attn)"),
    "no_backward": (_no_backward, "(?=.*plan_routing)(?=.*reverse_route backward)"),
    "no_return": (_no_return, "(?=.*reverse_route)(?=.*backward)"),
    "other_heads": (_other_heads, "k: got 4 heads, expected a divisor of q's 2 heads"),  # the other bag hears, too
    "waits_for_a_plan": (_waits_for_a_plan, "(?=.*start_planning)(?=.*(pre_attn|reverse_route))"),
}


def _new_group(world_size: int, timeout_s: float = TIMEOUT_S) -> dist.ProcessGroup:
    return dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=timeout_s))


_kept: list[SequenceBalancer] = []


def _make_mistakes(rank: int, world_size: int, warm_steps: int) -> dict[str, tuple[str, str, float]]:
    outcomes = {}
    for name, (mistake, _) in MISTAKES.items():
        balancer = SequenceBalancer("g2n2", group=_new_group(world_size))
        for _ in range(warm_steps):
            _step(balancer, rank)
        dist.barrier()

        def call(mistake: Callable[..., None] = mistake, balancer: SequenceBalancer = balancer) -> None:
            (mistake if rank == 1 else _step)(balancer, rank)
            _step(balancer, rank)  # a rank whose own calls went through meets the others here

        outcomes[name] = error_of(call)
        dist.barrier()
    # A rank that makes no call: the others hear of it at the timeout, and of the rank.
    balancer = SequenceBalancer("g2n2", group=_new_group(world_size, NO_CALL_TIMEOUT_S))
    for _ in range(warm_steps):
        _step(balancer, rank)
    dist.barrier()
    _kept.append(balancer)  # of rank 1, which lives on without a word until the others are done
    if rank != 1:
        outcomes["no_call"] = error_of(lambda: _step(balancer, rank))
    return outcomes


@pytest.mark.parametrize("warm_steps", [0, 3], ids=["first_step", "after_steps"])
def test_a_call_out_of_order_is_named_on_all_ranks(warm_steps: int) -> None:
    by_rank = run_ranks(_make_mistakes, WORLD_SIZE, warm_steps, timeout_s=120, group_timeout_s=TIMEOUT_S)
    wrong = []
    for rank, outcomes in enumerate(by_rank):
        for name, (kind, message, seconds) in outcomes.items():
            words = MISTAKES[name][1] if name != "no_call" else r"plan_routing.*rank 1 \(in no call\)"
            limit = SOON_S if name != "no_call" else TIMEOUT_S
            if not kind or not re.search(words, message) or seconds > limit:
                wrong.append(f"rank {rank}, {name}: {kind} after {seconds:.1f} s: {message!r} lacks {words!r}")
    assert not wrong, "\n".join(wrong)
