"""torch.func and forward-mode differentiation through the exchanges, against one process that holds all sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from balancer_checks import causal_free_attention, run_checks
from torch import Tensor

from knapformer import ArgumentError, SequenceBalancer

LENS = {2: [[3, 9, 1], [14]], 4: [[5, 2, 8], [], [30, 1], [7]]}
TOPOLOGIES = {2: ["g1n2", "g2n1", "g2/1n1"], 4: ["g2n2", "g4/2/1n1"]}
HEADS, HEAD_DIM = 4, 2
WIDTH = HEADS * HEAD_DIM


def _model(h: Tensor, attention_lens: Tensor | None, balancer: SequenceBalancer | None) -> Tensor:
    q = (h * h).reshape(-1, HEADS, HEAD_DIM)
    if balancer is None:
        assert attention_lens is not None
        return causal_free_attention(q, q.sin(), q, attention_lens).flatten(1) + h
    return balancer.attention(q, q.sin(), q, causal_free_attention).flatten(1) + h


def _everyones(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, slice]:
    """Tokens and directions of all ranks, the same on each; lengths; this rank's rows."""
    generator = torch.Generator().manual_seed(3)
    lens = LENS[world_size]
    counts = [sum(own) for own in lens]
    x, v = (torch.randn(sum(counts), WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    first = sum(counts[:rank])
    return x, v, torch.tensor([n for own in lens for n in own]), slice(first, first + counts[rank])


def _balanced(balancer: SequenceBalancer, x: Tensor) -> Tensor:
    _, h, _ = balancer.route(x)
    return balancer.reverse_route(_model(h, None, balancer))[1]


def jvp_is_that_of_one_process(rank: int, world_size: int) -> None:
    x, v, lens, own = _everyones(rank, world_size)
    _, expected = torch.func.jvp(lambda x: _model(x, lens, None), (x,), (v,))
    for topology in TOPOLOGIES[world_size]:
        balancer = SequenceBalancer(topology)
        balancer.plan_routing(LENS[world_size][rank], WIDTH)
        for _ in range(2):  # the second time as predicted
            value, tangent = torch.func.jvp(lambda x, b=balancer: _balanced(b, x), (x[own],), (v[own],))
            torch.testing.assert_close(tangent, expected[own])
            torch.testing.assert_close(value, _model(x, lens, None)[own])
        with fwd.dual_level(), torch.no_grad():
            tangent = fwd.unpack_dual(_balanced(balancer, fwd.make_dual(x[own], v[own]))).tangent
            torch.testing.assert_close(tangent, expected[own])


def derivatives_where_a_rank_has_whole_and_shared_sequences(rank: int, world_size: int) -> None:
    """Its levels are rows of one tensor: by tangents, and by a gradient of a gradient."""
    lens_of = [[300, 20], [30]]
    balancer = SequenceBalancer("g2/1n1")
    plan = balancer.plan_routing(lens_of[rank], 3072)  # as if for so wide a model, in which sharing the longest pays
    assert sorted(plan.degree_of_sequence) == [1, 1, 2]
    generator = torch.Generator().manual_seed(5)
    x, v = (torch.randn(350, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    lens, own = torch.tensor([300, 20, 30]), slice(*[(0, 320), (320, 350)][rank])

    _, expected = torch.func.jvp(lambda x: _model(x, lens, None), (x,), (v,))
    _, tangent = torch.func.jvp(lambda x: _balanced(balancer, x), (x[own],), (v[own],))
    torch.testing.assert_close(tangent, expected[own])

    def second(x: Tensor, model: Callable[[Tensor], Tensor]) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (of_first,) = torch.autograd.grad(first.sin().sum(), x)
        return of_first

    of_one = second(x, lambda x: _model(x, lens, None))
    torch.testing.assert_close(second(x[own], lambda x: _balanced(balancer, x)), of_one[own])


def second_derivatives_where_a_rank_has_no_rows_at_a_level(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer("g4/2/1n1")
    lens_of = [[30, 4000, 1000], [1000], [30, 300, 300], [300]]
    num_tokens = balancer.plan_routing(lens_of[rank], 1024).tokens_after[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, 4, 2, generator=generator, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return q.sin() * k * v

    def second(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x)[0]

    # Of each token alone, so that no rank needs others to compute it.
    torch.testing.assert_close(second(balancer.attention(x, x, x, attend)), second(attend(x, x, x, x)))


def tangents_where_a_rank_has_no_rows_at_a_level(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer("g4/2/1n1")
    lens_of = [[100, 20], [3000, 800], [30, 700], [6000]]
    plan = balancer.plan_routing(lens_of[rank], 3072)
    assert sorted(plan.degree_of_sequence) == [1, 1, 1, 1, 1, 2, 4]
    x = torch.full((plan.tokens_after[rank], 4, 2), 2.0 + rank)
    with fwd.dual_level():
        q = fwd.make_dual(x, torch.ones_like(x))
        o = balancer.attention(q, q, q, lambda q, k, v, _: q * k * v)
        torch.testing.assert_close(fwd.unpack_dual(o).tangent, 3 * x.square())


def a_rank_without_rows_follows_tangents(rank: int, world_size: int) -> None:
    """Its own tensor of no rows has none, and the others' exchange needs it all the same."""
    balancer = SequenceBalancer("g2n1" if world_size == 2 else "g4n1")
    balancer.plan_routing([6] if rank == 0 else [], WIDTH)
    x = torch.randn(6 if rank == 0 else 0, WIDTH)
    with fwd.dual_level():
        _, h, (ids,) = balancer.route(fwd.make_dual(x, x * 2) if rank == 0 else x, [torch.arange(len(x))])
        torch.testing.assert_close(fwd.unpack_dual(h).tangent, fwd.unpack_dual(h).primal * 2)
        assert fwd.unpack_dual(ids).tangent is None


def gradients_of_tangents_are_those_of_one_process(rank: int, world_size: int) -> None:
    """Reverse over forward."""
    x, v, lens, own = _everyones(rank, world_size)
    whole = x.clone().requires_grad_(True)
    torch.func.jvp(lambda x: _model(x, lens, None), (whole,), (v,))[1].square().sum().backward()
    assert whole.grad is not None
    balancer = SequenceBalancer(TOPOLOGIES[world_size][-1])
    balancer.plan_routing(LENS[world_size][rank], WIDTH)
    mine = x[own].clone().requires_grad_(True)
    torch.func.jvp(lambda x: _balanced(balancer, x), (mine,), (v[own],))[1].square().sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[own])


def other_transforms_are_refused_in_one_line(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)))
    transforms = {
        "torch.func.vmap": lambda f, x: torch.func.vmap(f)(x[None]),
        "torch.func.grad or vjp": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    }
    for name, transform in transforms.items():
        balancer = SequenceBalancer(TOPOLOGIES[world_size][-1], group=group)
        balancer.plan_routing([4], WIDTH)
        with pytest.raises(ArgumentError, match=rf"route\(x\): got tensors inside {name}, expected plain") as caught:
            transform(lambda x, b=balancer: b.route(x)[1], torch.zeros(4, WIDTH))
        assert "\n" not in str(caught.value)


CHECKS = [
    jvp_is_that_of_one_process,
    derivatives_where_a_rank_has_whole_and_shared_sequences,
    second_derivatives_where_a_rank_has_no_rows_at_a_level,
    tangents_where_a_rank_has_no_rows_at_a_level,
    a_rank_without_rows_follows_tangents,
    gradients_of_tangents_are_those_of_one_process,
    other_transforms_are_refused_in_one_line,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_function_transforms(world_size: int) -> None:
    # On 4 ranks one has no tokens, and cannot follow gradients through a wrapped tensor: that is an error on all ranks.
    not_here: list[object] = [
        second_derivatives_where_a_rank_has_no_rows_at_a_level, tangents_where_a_rank_has_no_rows_at_a_level,
    ]  # fmt: skip
    if world_size == 4:
        not_here = [
            gradients_of_tangents_are_those_of_one_process, derivatives_where_a_rank_has_whole_and_shared_sequences,
        ]  # fmt: skip
    run_checks([check for check in CHECKS if check not in not_here], world_size)


def _backward_outlives_the_balancer(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer("g2/1n1")
    balancer.plan_routing(LENS[2][rank], WIDTH)
    x = torch.randn(sum(LENS[2][rank]), WIDTH, requires_grad=True)
    y = _balanced(balancer, x)
    del balancer
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def _no_keys_stay(rank: int, world_size: int) -> list[int]:
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    counts = []
    for topology in ["g2n1", "g2/1n1", "g1n2", "g2n1", "g2/1n1"]:
        balancer = SequenceBalancer(topology)
        balancer.plan_routing(LENS[2][rank], WIDTH)
        balancer.route(torch.zeros(sum(LENS[2][rank]), WIDTH))
        del balancer
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def _life_and_end(rank: int, world_size: int) -> list[int]:
    _backward_outlives_the_balancer(rank, world_size)
    dist.barrier()
    return _no_keys_stay(rank, world_size)


def test_the_graph_outlives_the_balancer_and_its_keys_do_not() -> None:
    from ranks import run_ranks

    for counts in run_ranks(_life_and_end, 2, timeout_s=60):
        assert len(set(counts[1:])) == 1, counts  # the first one makes the groups of bags
