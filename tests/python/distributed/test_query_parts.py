"""Ranks that share queries as well as heads, on real ranks. Oracle: each rank's own sequences, attended to alone."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import Check, causal_free_attention, run_checks
from knapformer.adapters.chunks import OfSequences
from knapformer.attention.kernels import PackedAttention, varlen_attention
from ranks import error_of, run_ranks
from saved_bytes import saved_bytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from knapformer import Cluster, SequenceBalancer, TrainedModel, plan

LENS = [[30, 3, 41], [1, 17]]
HEADS, KV_HEADS, DIM = 3, 1, 4
# A network on which keys come in stages.
SLOW = Cluster(flops_per_s=1e6, node_bytes_per_s=1e5, node_latency_s=0)
MODEL = TrainedModel(num_heads=HEADS, num_kv_heads=KV_HEADS, cuts_queries=True)
CLUSTER = Cluster(flops_per_s=1e6, node_latency_s=0)  # on which sharing costs little
COST: dict[str, Any] = {"d_model": 12, "model": MODEL, "cluster": CLUSTER}


def inputs_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = sum(LENS[rank])
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(tokens, n, DIM, dtype=dtype, generator=generator).requires_grad_() for n in heads]


def check_attention(rank: int, world_size: int) -> None:
    cases = [("g2n1", "full", SLOW), *itertools.product(("g2n1", "g2/1n1"), ("full", "causal"), (CLUSTER,))]
    for topology, mask, cluster in cases:
        for way in ("plain", "checkpointed", "bfloat16", "another kernel", "narrower values"):
            check_way(rank, topology, mask, cluster, way)


class Whole:
    """A kernel that takes parts of queries, and no stages."""

    cuts_queries = True

    def __init__(self, attend: PackedAttention) -> None:
        self.mask, self._attend = attend.mask, attend

    def __call__(self, *arguments: Any) -> Tensor:
        return self._attend(*arguments)


def check_way(rank: int, topology: str, mask: str, cluster: Cluster, way: str) -> None:
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float64
    inputs, attend = inputs_of(rank, dtype), PackedAttention(mask)
    if way == "narrower values":
        inputs[2] = inputs[2].detach()[..., :3].clone().requires_grad_()
    expected = varlen_attention(*inputs, LENS[rank], mask)
    weight = torch.arange(expected.numel(), dtype=dtype).view_as(expected).sin()
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)

    balancer = SequenceBalancer(topology, mask=mask, **(COST | {"cluster": cluster}))
    made = balancer.plan_routing(LENS[rank])
    assert 2 in made.degree_of_sequence and (made.stages[2] > 1) == (cluster is SLOW)
    if way == "another kernel":
        attend = Whole(attend)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return balancer.attention(q, k, v, attend)

    _, q, (k, v) = balancer.route(inputs[0], inputs[1:])
    o = checkpoint(attention, q, k, v, use_reentrant=False) if way == "checkpointed" else attention(q, k, v)
    _, o = balancer.reverse_route(o)
    got = torch.autograd.grad((o * weight).sum(), inputs)
    rtol = 2e-2 if way == "bfloat16" else 1e-11
    torch.testing.assert_close([o, *got], [expected, *wanted], rtol=rtol, atol=rtol)


def check_refusals(rank: int, world_size: int) -> None:
    """On all ranks, and with what to do."""
    cases = [
        (lambda b, x: b.attention(x, x, x, causal_free_attention), "attend: got a kernel of whole sequences"),
        (lambda b, x: b.pre_attn(x, x, x), "pre_attn: got the topology g2n1, whose ranks share queries"),
    ]
    for call, expected in cases:
        balancer = SequenceBalancer("g2n1", **COST)
        made = balancer.plan_routing(LENS[rank])
        kind, message, _ = error_of(lambda: call(balancer, torch.zeros(made.tokens_after[rank], 3, 2)))  # noqa: B023
        assert expected in message, (kind, message)


def check_facts_of_sequences(rank: int, world_size: int) -> None:
    """Each call of a kernel gets the rows of its own sequences, also where a rank has no queries at all, and their keys
    in the sequences' order, also where these came in stages."""
    cases = [([[1], []], "g2n1"), ([[30, 3, 41], [1, 17]], "g2/1n1"), (LENS, "g2n1")]
    for cluster, (lens, topology) in itertools.product((CLUSTER, SLOW), cases):
        balancer = SequenceBalancer(topology, **(COST | {"cluster": cluster}))
        balancer.plan_routing(lens[rank])
        row_of = torch.tensor(lens[rank], dtype=torch.int64).unsqueeze(1)
        places = torch.cat([torch.zeros(0), *map(torch.arange, lens[rank])])
        _, x, _, (of_chunks,) = balancer.route(places.view(-1, 1, 1).repeat(1, HEADS, DIM), [], [row_of])
        seen: list[int] = []
        num_queries = torch.zeros(1, dtype=torch.int64)

        def attend(q: Tensor, k: Tensor, v: Tensor, rows: list[int], spans: list[tuple[int, int]]) -> Tensor:
            assert all(first + count <= length for length, (first, count) in zip(rows, spans, strict=True))
            for of_tokens in (k, v):
                assert of_tokens[:, 0, 0].tolist() == [place for length in rows for place in range(length)]
            seen.extend(rows)  # noqa: B023
            num_queries.add_(len(q))  # noqa: B023
            return torch.zeros_like(q)

        facts = OfSequences(of_chunks, lambda rows, spans, _: (rows.flatten().tolist(), spans))
        assert facts.attention(balancer, x, x, x, attend).shape == x.shape
        of_rest = iter(of_chunks.flatten().tolist())
        assert all(length in of_rest for length in seen), "in the order of the chunks"
        dist.all_reduce(num_queries)
        assert num_queries.item() == sum(map(sum, lens)), "each query on one rank"


def check_memory(rank: int, world_size: int) -> None:
    """What a rank holds until its backward pass, beside the output, is what docs/sharing.md counts."""
    length, dim = 4000, 64
    for cluster in (CLUSTER, SLOW):
        balancer = SequenceBalancer("g2n1", **(COST | {"cluster": cluster}))
        rows = balancer.plan_routing([length] if rank == 0 else []).tokens_after[rank]
        q, k, v = (torch.randn(rows, n, dim, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
        o, kept = saved_bytes(partial(balancer.attention, q, k, v, PackedAttention()))
        of_queries, of_keys = rows * HEADS * dim * 4, 2 * length * KV_HEADS * dim * 4
        assert o.requires_grad
        assert kept == pytest.approx(of_keys + 2 * of_queries, rel=0.1)


CHECKS: list[Check] = [check_attention, check_facts_of_sequences, check_memory, check_refusals]


def test_on_two_ranks() -> None:
    run_checks(CHECKS, 2)


def test_a_plan_says_how_queries_are_cut() -> None:
    made = plan([[100], [], [], []], "g4n1", **COST, mask="causal")
    assert made.query_parts == {4: 4} and made.stages == {4: 1}
    assert plan([[100], []], "g2n1", d_model=12, model=TrainedModel(num_heads=4, cuts_queries=True)).query_parts == {
        2: 1
    }
    assert plan([[100], []], "g2n1", d_model=12, num_heads=3).query_parts == {}


@pytest.mark.parametrize("heads", [1, 5, 12, 24])
@pytest.mark.parametrize("degree", [2, 7, 8, 32])
def test_no_rank_idles_and_none_has_a_third_more(heads: int, degree: int) -> None:
    lens = [[100_000], *[[]] * (degree - 1)]
    made = plan(lens, f"g{degree}n1", d_model=3072, model=TrainedModel(num_heads=heads, cuts_queries=True))
    assert made.wir_after < 4 / 3


def _of_heads(rank: int, world_size: int, num_heads: int, kv_heads: int, told: int) -> list[str]:
    balancer = SequenceBalancer("g2n1", d_model=num_heads, num_heads=told)
    balancer.plan_routing([8] if rank == 0 else [], num_heads)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            q, k, v = (torch.ones(4, heads, 1) for heads in (num_heads, kv_heads, kv_heads))
            balancer.attention(q, k, v, PackedAttention())
    return [str(of.message) for of in found]


def test_heads_that_the_plan_does_not_know_are_told_of_where_ranks_get_unequal_numbers() -> None:
    for heads, kv_heads, told, count in ((4, 2, 0, 0), (3, 3, 3, 0), (3, 3, 0, 1), (6, 3, 0, 1)):
        for found in run_ranks(_of_heads, 2, heads, kv_heads, told):
            words = f"num_heads: got none, for {heads} heads ({kv_heads} of keys), which 2 ranks share unevenly"
            assert len(found) == count and all(words in of for of in found)
