"""What SequenceBalancer plans on real ranks, from lengths, masks and given work. Oracle: `knapformer.plan`.

One spawn runs many checks: each check is a function of (rank, world_size), called on all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from balancer_checks import LENS, Check, causal_free_attention, run_checks
from knapformer.attention.kernels import PackedAttention
from knapformer.models.packed_step import PackedStep

from knapformer import ArgumentError, SequenceBalancer, StateError, WorkloadModel, plan


def check_lengths_of_every_kind(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer(f"g{world_size}n1")
    lens = LENS[world_size][rank]
    plans = [
        balancer.plan_routing(form, 8)
        for form in (
            lens,
            tuple(lens),
            iter(lens),
            torch.tensor(lens, dtype=torch.int64),
            torch.tensor(lens, dtype=torch.int32),
            torch.tensor(lens * 2, dtype=torch.int16)[: len(lens)],
            torch.tensor([[n, 0] for n in lens], dtype=torch.int64).reshape(-1, 2)[:, 0],
            np.array(lens, dtype=np.int64),
        )
    ]
    assert all(plan == plans[0] for plan in plans)
    assert balancer.plan == plans[0]


def check_a_refused_plan_is_not_the_end(rank: int, world_size: int) -> None:
    """Lengths that cannot keep the limit of tokens: an error on all ranks, and other lengths are planned as before."""
    balancer = SequenceBalancer(f"g{world_size}/1n1", max_tokens_per_rank=20)
    for _ in range(2):
        for plan_it in (
            balancer.plan_routing,
            lambda lens, width: balancer.finish_planning(balancer.start_planning(lens, width)),
        ):
            with pytest.raises(ArgumentError, match="max_tokens_per_rank: got 20, expected at least 60"):
                plan_it([60], 4)
            with pytest.raises(StateError, match="plan_routing: has made no plan"):
                balancer.plan  # noqa: B018
            plan_it([10], 4)
            x = torch.randn(10, 4)
            assert torch.equal(balancer.reverse_route(balancer.route(x)[1])[1], x)
    balancer.plan_routing([10] * 2, 4, micro_batches=2)
    with pytest.raises(StateError, match="follow: has not been called, expected after several micro-batches"):
        balancer.plan  # noqa: B018
    balancer.plan_routing(torch.tensor([10] if rank == 0 else []), 4)  # floats, where a rank has none
    assert balancer.plan.seq_lens == [[10]] + [[]] * (world_size - 1)
    with pytest.raises(ArgumentError, match="max_tokens_per_rank: got 20"):
        balancer.plan_routing([60] * 2, 4, micro_batches=2)
    with pytest.raises(StateError, match="plan_routing: has made no plan"):
        balancer.plan  # noqa: B018


def check_masks(rank: int, world_size: int) -> None:
    """As knapformer.plan has them: one for all, or of each sequence, from some ranks or all."""
    lens, topology = LENS[world_size], f"g{world_size}n1"
    names = [["causal", "full", "window:2:0", "prefix:1"][: len(own_lens)] for own_lens in lens]
    balancer = SequenceBalancer(topology)
    assert balancer.plan_routing(lens[rank], 8, names[rank]) == plan(lens, topology, d_model=8, masks=names)
    assert balancer.plan_routing(lens[rank], 8) == plan(lens, topology, d_model=8)
    balancer = SequenceBalancer(topology, mask="causal")
    assert balancer.plan_routing(lens[rank], 8) == plan(lens, topology, d_model=8, masks="causal")
    some = [names[0], *(["causal"] * len(own_lens) for own_lens in lens[1:])]
    own_masks = names[rank] if rank == 0 else None
    assert balancer.plan_routing(lens[rank], 8, own_masks) == plan(lens, topology, d_model=8, masks=some)
    ahead = balancer.start_planning(lens[rank], 8, masks=own_masks)
    assert balancer.finish_planning(ahead) == plan(lens, topology, d_model=8, masks=some)


def check_the_mask_of_the_kernel(rank: int, world_size: int) -> None:
    """A kernel that applies another mask than the plan counts with is an error on every rank, by every way to it."""
    lens, topology = LENS[world_size], f"g{world_size}n1"
    mixed = [["causal" if n > 5 else "full" for n in of_rank] for of_rank in lens]
    causal = plan(lens, topology, d_model=8, masks="causal")
    with_work = {"work": [float(n) for n in lens[rank]]}

    def balancer(mask: str = "full", **options: Any) -> SequenceBalancer:
        made = SequenceBalancer(topology, mask=mask)
        made.plan_routing(lens[rank], 8, **options)
        return made

    def follower() -> SequenceBalancer:
        made = SequenceBalancer(topology)
        made.follow(causal)
        return made

    def attention(kernel: Any = causal_free_attention, *mask: str) -> Callable[[SequenceBalancer], Any]:
        return lambda b: b.attention(*(torch.ones(int(b.chunk_lens.sum()), 4, 2),) * 3, kernel, *mask)

    def in_halves(*mask: str) -> Callable[[SequenceBalancer], Any]:
        return lambda b: b.pre_attn(*(torch.ones(int(b.chunk_lens.sum()), 4, 2),) * 3, *mask)

    def step(mask: str) -> Callable[[SequenceBalancer], Any]:
        def run(b: SequenceBalancer) -> None:
            of_model = PackedStep(lens[rank], 8, b, mask, planned=True)
            of_model.attention(*(of_model.enter(torch.ones(sum(lens[rank]), 8), [], [])[0].view(-1, 4, 2),) * 3)

        return run

    longest = max(n for of_rank in lens for n in of_rank)
    unlike = "mask: got 'full', which leaves {}.* expected 'causal', which leaves {}"
    for make, attend, words in (
        (partial(balancer, "causal"), attention(), unlike),
        (partial(balancer, "causal"), in_halves(), unlike),
        (partial(balancer, "causal"), step("full"), unlike),
        (partial(balancer, "causal"), attention(causal_free_attention, "window:3:3"), "got 'window:3:3', .*'causal'"),
        (partial(balancer, "causal"), attention(PackedAttention("full")), unlike),
        (partial(balancer, "causal"), attention(PackedAttention("full"), "causal"), "'full', as attend.mask says"),
        (partial(balancer, masks=mixed[rank]), attention(), unlike),
        (balancer, step("causal"), "mask: got 'causal'.* expected 'full'"),
        (follower, attention(), unlike),
        (partial(balancer, "causal", **with_work), attention(), unlike),
        (partial(balancer, **with_work), attention(causal_free_attention, "causal"), "got 'causal'.* expected 'full'"),
        (partial(balancer, **with_work), attention(PackedAttention("window:3:3")), "'window:3:3'.* expected 'full'"),
        (partial(balancer, "causal"), attention(causal_free_attention, "causal"), ""),
        (partial(balancer, "causal"), in_halves("causal"), ""),
        (partial(balancer, "causal"), attention(PackedAttention("causal")), ""),
        (partial(balancer, "causal"), step("causal"), ""),
        (follower, attention(causal_free_attention, "causal"), ""),
        (partial(balancer, masks=mixed[rank]), attention(causal_free_attention, "planned"), ""),
        (partial(balancer, f"window:{longest}:{longest}"), attention(), ""),  # as large as full attention
    ):
        made = make()
        dist.barrier()  # a rank that is late in make() would learn there of the error of one that is further
        if not words:
            attend(made)
            continue
        with pytest.raises(ArgumentError, match=words.format(r"\d+", r"\d+")):
            attend(made)
        dist.barrier()


def check_given_work(rank: int, world_size: int) -> None:
    """As knapformer.plan has it, also under nested bags, of whole steps, and where a plan is followed; and tokens and
    gradients are those of any plan."""
    lens, topology = LENS[world_size], f"g{world_size}/1n1"
    work = [[1e6 * (7 * r + 3 * i + 1) for i in range(len(of_rank))] for r, of_rank in enumerate(lens)]
    balancer = SequenceBalancer(topology)
    given = plan(lens, topology, d_model=8, work=work)
    assert balancer.plan_routing(lens[rank], 8, work=work[rank]) == given != plan(lens, topology, d_model=8)
    x = torch.randn(sum(lens[rank]), 8, dtype=torch.float64, requires_grad=True)
    _, moved, _ = balancer.route(x, [])
    _, back = balancer.reverse_route(2 * moved)
    assert torch.equal(back, 2 * x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    ahead = balancer.start_planning(lens[rank], 8, work=work[rank])
    assert balancer.finish_planning(ahead) == given
    steps = balancer.plan_routing(lens[rank], 8, micro_batches=2, work=work[rank])
    assert steps == plan(lens, topology, d_model=8, micro_batches=2, work=work)
    balancer.follow(given)
    assert balancer.plan == given
    assert balancer.plan_routing(lens[rank], 8) == plan(lens, topology, d_model=8)
    # Work of the formula's own values changes nothing.
    formula = WorkloadModel(0.41)
    same = [formula.work(n, 8) for n in lens[rank]]
    of_formula = balancer.plan_routing(lens[rank], 8, work=same)
    assert of_formula.chunks == plan(lens, topology, d_model=8).chunks


CHECKS: list[Check] = [
    check_lengths_of_every_kind,
    check_a_refused_plan_is_not_the_end,
    check_masks,
    check_the_mask_of_the_kernel,
    check_given_work,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_plans_on_real_ranks(world_size: int) -> None:
    run_checks(CHECKS, world_size)
