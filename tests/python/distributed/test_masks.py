"""The planned masks of sequences, whole and shared by heads and queries, on real ranks. Oracle: dense masks, written
out from their definitions, over each rank's own sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from balancer_checks import Check, run_checks
from knapformer.attention.masked import MaskedAttention
from masks import dense_attention, dense_mask, packed_mask, random_mask
from ranks import error_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from knapformer import BalancedBatchSampler, Cluster, SequenceBalancer, TrainedModel, plan

DIM = 4
CLUSTER = Cluster(flops_per_s=1e6, node_latency_s=0)  # on which sharing costs little
WAYS = ["plain", "checkpointed", "bfloat16", "ahead", "by each rank"]


def cost_of(heads: int) -> dict[str, Any]:
    model = TrainedModel(num_heads=heads, num_kv_heads=1, cuts_queries=True)
    return {"d_model": heads * DIM, "model": model, "cluster": CLUSTER}


def draw_step(seed: int, world_size: int) -> tuple[list[list[int]], list[list[str]]]:
    draw = random.Random(seed)
    lens = [[draw.choice([1, 5, 17, 41]) for _ in range(draw.randint(0, 2))] for _ in range(world_size)]
    lens[draw.randrange(world_size)].append(90)
    return lens, [[random_mask(draw, n) for n in of_rank] for of_rank in lens]


def check(rank: int, world_size: int, topology: str, heads: int, seed: int, way: str) -> bool:
    """Whether queries were cut into parts."""
    lens, masks = draw_step(seed, world_size)
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float64
    generator = torch.Generator().manual_seed(rank)
    shapes = [(sum(lens[rank]), n, DIM) for n in (heads, 1, 1)]
    inputs = [torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    expected = dense_attention(*inputs, packed_mask(lens[rank], masks[rank]))
    weight = torch.arange(expected.numel(), dtype=dtype).view(expected.shape).sin()
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)

    balancer = SequenceBalancer(topology, mask="causal", **cost_of(heads))
    if way == "ahead":
        balancer.finish_planning(balancer.start_planning([3], masks=["c1 f2"]))
        balancer.attention(*(torch.zeros(balancer.plan.tokens_after[rank], n, DIM) for n in (heads, 1, 1)))
        balancer.finish_planning(balancer.start_planning(lens[rank], masks=masks[rank]))
    elif way == "by each rank":
        balancer.follow(plan(lens, balancer.topology, masks=masks, **cost_of(heads)))
    else:
        balancer.plan_routing(lens[rank], masks=masks[rank])
    texts = [mask for of_rank in masks for mask in of_rank]
    assert balancer.plan.masks == ([] if set(texts) == {"full"} else texts)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return balancer.attention(q, k, v)

    _, q, (k, v) = balancer.route(inputs[0], inputs[1:])
    o = checkpoint(attention, q, k, v, use_reentrant=False) if way == "checkpointed" else attention(q, k, v)
    _, o = balancer.reverse_route(o)
    got = torch.autograd.grad((o * weight).sum(), inputs)
    tolerance = 4e-2 if way == "bfloat16" else 1e-12
    torch.testing.assert_close([o, *got], [expected, *wanted], rtol=tolerance, atol=tolerance)
    return max(balancer.plan.query_parts.values(), default=1) > 1


def check_all(rank: int, world_size: int) -> None:
    topologies = {1: ["g1n1"], 2: ["g2n1", "g2/1n1"]}.get(world_size, [f"g{world_size}n1", f"g{world_size}/1n1"])
    num_cut = seed = 0
    for topology in topologies:
        for heads in (4, 3):
            for way in WAYS:
                seed += 1
                num_cut += check(rank, world_size, topology, heads, seed, way)
    assert world_size == 1 or num_cut >= len(WAYS)


def check_refusals(rank: int, world_size: int) -> None:
    """On all ranks, and before a kernel computes another mask than the planned one."""
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        (["density:0.5"], {}, "mask: got 'density:0.5', expected a mask that says which keys"),
        (["c5 f5"], {"attend": MaskedAttention([10], ["causal"])}, "mask: got 'full', which leaves 100 (query, key)"),
        (["c5 f5"], {"attend": lambda q, k, v, lens: q, "mask": "f5 c5"}, "sequence 0 (10 tokens), expected 'c5 f5'"),
    ]  # fmt: skip
    for masks, arguments, expected in cases:
        balancer = SequenceBalancer("g1n2", d_model=8)
        balancer.plan_routing([10] if rank == 0 else [], masks=masks if rank == 0 else [])
        x = torch.zeros(balancer.plan.tokens_after[rank], 3, 2)
        kind, message, _ = error_of(lambda: balancer.attention(x, x, x, **arguments))  # noqa: B023
        assert expected in message, (kind, message)
    balancer = SequenceBalancer("g1n2", d_model=8)
    kind, message, _ = error_of(lambda: balancer.plan_routing([10, 11], masks=["full", "c5 f5"]))
    assert (kind, "mask: got 'c5 f5' for a sequence of 11 tokens, expected one of 10" in message) == (
        "ArgumentError",
        True,
    )


def check_sampler(rank: int, world_size: int) -> None:
    """Ranks load what they compute of samples with masks of their own; each sample's rows against dense attention."""
    draw, num_shared = random.Random(0), 0
    lens = [draw.choice([1, 5, 17, 41, 90]) for _ in range(24)]
    masks, cost = [random_mask(draw, n) for n in lens], cost_of(4)
    samples = [torch.randn(3, n, 4, DIM, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in lens]
    sampler = BalancedBatchSampler(lens, batch_size=2, micro_batches=2, topology="g2/1n1", masks=masks, **cost)
    balancer = SequenceBalancer("g2/1n1", **cost)
    for i, indices in enumerate(sampler):
        step, chunks = balancer.step(sampler.plan(*divmod(i, 2))), sampler.chunks(*divmod(i, 2))
        assert indices == [index for index, _, _ in chunks]
        q, k, v = torch.cat([samples[index][:, begin:end] for index, begin, end in chunks], 1)
        expected = [
            dense_attention(of[0], of[1][:, :1], of[2][:, :1], dense_mask(masks[index], lens[index]))[begin:end]
            for index, begin, end in chunks
            for of in [samples[index]]
        ]
        torch.testing.assert_close(step.attention(q, k[:, :1], v[:, :1]), torch.cat(expected), rtol=0, atol=1e-12)
        num_shared += sum(end - begin < lens[index] for index, begin, end in chunks)
    assert num_shared > 0


CHECKS: list[Check] = [check_all, check_refusals, check_sampler]


def test_on_two_ranks() -> None:
    run_checks(CHECKS, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_on_other_numbers_of_ranks(world_size: int) -> None:
    run_checks([check_all], world_size)
