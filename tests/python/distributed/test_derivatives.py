"""Derivatives of derivatives through the exchanges; what is no gradient is an error; how long what they need lives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from balancer_checks import causal_free_attention, run_checks
from ranks import run_ranks
from torch import Tensor

from knapformer import ArgumentError, SequenceBalancer

LENS = [[3, 9, 1], [14]]
HEADS, HEAD_DIM = 4, 2
WIDTH = HEADS * HEAD_DIM


def _model(h: Tensor, attention_lens: Tensor | None, balancer: SequenceBalancer | None) -> Tensor:
    q = (h * h).reshape(-1, HEADS, HEAD_DIM)
    if balancer is None:
        assert attention_lens is not None
        return causal_free_attention(q, q.sin(), q, attention_lens).flatten(1) + h
    return balancer.attention(q, q.sin(), q, causal_free_attention).flatten(1) + h


def _balanced(balancer: SequenceBalancer, x: Tensor) -> Tensor:
    _, h, _ = balancer.route(x)
    return balancer.reverse_route(_model(h, None, balancer))[1]


def second_derivatives_are_those_of_one_process(rank: int, world_size: int) -> None:
    """Where a rank has whole and shared sequences: its levels are rows of one tensor."""
    lens_of = [[300, 20], [30]]
    balancer = SequenceBalancer("g2/1n1")
    plan = balancer.plan_routing(lens_of[rank], 3072)  # as if for so wide a model, in which sharing the longest pays
    assert sorted(plan.degree_of_sequence) == [1, 1, 2]
    x = torch.randn(350, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    lens, own = torch.tensor([300, 20, 30]), slice(*[(0, 320), (320, 350)][rank])

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


def _dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with fwd.dual_level(), torch.no_grad():
        return call(fwd.make_dual(x, x))


def _batched(call: Callable[[Tensor], Tensor], x: Tensor) -> object:
    y = call(x.requires_grad_())
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


# Of a call of one tensor.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "make_dual": _dual,
    "is_grads_batched": _batched,
}
REFUSED = "(inside torch.func or vmap|with tangents), expected plain ones: take gradients one by one"


def what_is_no_gradient_is_refused_in_one_line(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)))
    for transform in TRANSFORMS.values():
        balancer = SequenceBalancer("g2/1n1", group=group)
        balancer.plan_routing([4], WIDTH)
        with pytest.raises(ArgumentError, match=rf"route.*\(x.*\): got tensors {REFUSED}") as caught:
            if rank == 0:
                transform(lambda x, b=balancer: b.route(x)[1], torch.ones(4, WIDTH))
            else:  # is told
                balancer.route(torch.ones(4, WIDTH, requires_grad=True))[1].sum().backward()
        assert "\n" not in str(caught.value)


def test_two_ranks() -> None:
    run_checks([second_derivatives_are_those_of_one_process, what_is_no_gradient_is_refused_in_one_line], 2)


def test_four_ranks() -> None:
    run_checks([second_derivatives_where_a_rank_has_no_rows_at_a_level], 4)


def _backward_outlives_the_balancer(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer("g2/1n1")
    balancer.plan_routing(LENS[rank], WIDTH)
    x = torch.randn(sum(LENS[rank]), WIDTH, requires_grad=True)
    y = _balanced(balancer, x)
    del balancer
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def _no_keys_stay(rank: int, world_size: int) -> list[int]:
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    counts = []
    for topology in ["g2n1", "g2/1n1", "g1n2", "g2n1", "g2/1n1"]:
        balancer = SequenceBalancer(topology)
        balancer.plan_routing(LENS[rank], WIDTH)
        balancer.route(torch.zeros(sum(LENS[rank]), WIDTH))
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
    for counts in run_ranks(_life_and_end, 2, timeout_s=60):
        assert len(set(counts[1:])) == 1, counts  # the first one makes the groups of bags
