"""SequenceBalancer on real ranks over Gloo. Oracle: computing without it. That outputs and gradients are those of one
process, test_exactness.py and tests/torch/attention_test.cpp show; that plans are those of `knapformer.plan`,
test_planning.py.

One spawn runs many checks: each check is a function of (rank, world_size), called on all ranks in the same order.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import LENS, Check, causal_free_attention, run_checks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from knapformer import ArgumentError, SequenceBalancer, StateError


def check_attention_alone_is_computed_again(rank: int, world_size: int) -> None:
    """Checkpointing of nothing but attention: torch ends a recomputation by an exception once it has what the forward
    pass saved, which attention without tokens need not do."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        return causal_free_attention(q, k, v, seq_lens) if len(q) else q * 1

    flat, nested = f"g{world_size}n1", "g2/1n1" if world_size == 2 else "g4/2/1n1"
    for topology in (flat, f"g1n{world_size}", nested):
        for lens in (LENS[world_size][rank], [3] if rank == 0 else []):
            balancer = SequenceBalancer(topology)
            x = torch.randn(sum(lens), 6, dtype=torch.float64, requires_grad=True)
            gradients = []
            for mode in ("kept", "blocks", "halves"):
                balancer.plan_routing(lens, 6)
                _, h, _ = balancer.route(x)
                q = h.unflatten(1, (3, 2))

                def in_halves(q: Tensor) -> Tensor:
                    seq_lens, q, k, v = balancer.pre_attn(q, q, q)  # noqa: B023
                    return balancer.post_attn(attend(q, k, v, seq_lens))[1]  # noqa: B023

                if mode == "kept":
                    o = balancer.attention(q, q, q, attend)
                elif mode == "blocks" or topology == nested:
                    o = checkpoint(balancer.attention, q, q, q, attend, use_reentrant=False)
                else:
                    o = checkpoint(in_halves, q, use_reentrant=False)
                balancer.reverse_route(o.flatten(1))[1].square().sum().backward()
                gradients.append(x.grad)
                x.grad = None
            assert all(torch.equal(gradients[0], again) for again in gradients[1:]), (topology, lens)


def check_log_sum_exp_and_edits_in_place(rank: int, world_size: int) -> None:
    """A kernel may return its log-sum-exp beside o; what comes back may be edited in place."""
    lens = LENS[world_size][rank]
    for topology in (f"g{world_size}n1", f"g{world_size}/1n1", f"g1n{world_size}"):
        balancer = SequenceBalancer(topology)
        balancer.plan_routing(lens, 8)
        x = torch.randn(sum(lens), 8, requires_grad=True)
        gradients = []
        for with_lse in (False, True):

            def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, with_lse: bool = with_lse) -> Any:
                o = causal_free_attention(q, k, v, seq_lens)
                return (o, q.new_zeros(q.shape[:2])) if with_lse else o

            _, h, _ = balancer.route(x)
            o = balancer.attention(*(h.view(-1, 4, 2),) * 3, attend)
            o += 1
            _, y = balancer.reverse_route(o.flatten(1))
            y *= 2
            gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
        assert torch.equal(*gradients), topology


def check_frozen_blocks_on_ranks_without_shared_rows(rank: int, world_size: int) -> None:
    """Equal calls of which some have gradients, on ranks that hold whole sequences only, or nothing."""
    few, many = {
        2: ([[1], []], [[6000], []]),
        4: ([[6000], [], [1500, 1500], [3000]], [[1000, 4000, 500], [500, 500], [300], [2000, 300]]),
    }[world_size]
    for steps in ([(few, True), (many, True)], [(many, True)], [(few, True), (few, False), (many, True)]):
        for topology in (f"g{world_size}n1", f"g{world_size}/1n1", "g4/2/1n1" if world_size == 4 else "g1n2"):
            balancer = SequenceBalancer(topology)
            blocks = torch.nn.ModuleList(torch.nn.Linear(4, 12) for _ in range(4))
            blocks[:2].requires_grad_(False)
            for lens, trains in steps:
                balancer.plan_routing(lens[rank], 3072)
                with torch.set_grad_enabled(trains):
                    _, x, _ = balancer.route(torch.randn(sum(lens[rank]), 4))
                    for block in blocks:
                        q, k, v = block(x).unflatten(1, (3, 1, 4)).unbind(1)
                        x = x + balancer.attention(q, k, v, lambda q, k, v, _: q + k + v).flatten(1)
                    _, y = balancer.reverse_route(x)
                if trains:
                    y.sum().backward()
                    assert [block.weight.grad is not None for block in blocks] == [False, False, True, True]


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    for event in profile.key_averages():
        if event.key.startswith("c10d::"):
            counts[event.key] += event.count


def check_collective_counts(rank: int, world_size: int) -> None:
    """By the profiler, which sees every collective that anyone starts."""
    for topology in {2: ["g2n1", "g1n2"], 4: ["g2n2", "g1n2+g2n1"]}[world_size]:
        balancer = SequenceBalancer(topology)
        lens = LENS[world_size][rank]
        bag = next(bag for bag in balancer.plan_routing(lens, 8).topology.bags if rank in bag)
        for step in range(2):
            with counted_collectives() as planning:
                balancer.plan_routing(lens, 8)
            assert planning == {"c10d::_allgather_base_": 1}, (step, planning)
            x = torch.randn(sum(lens), 8, requires_grad=True)
            side = torch.randn(len(lens), 2, requires_grad=True)
            with counted_collectives() as routing:
                _, h, _, (s,) = balancer.route(x, [torch.arange(sum(lens))], [side])
            with counted_collectives() as attending:
                o = balancer.attention(*(h.view(-1, 4, 2) for _ in range(3)), causal_free_attention)
            with counted_collectives() as returning:
                _, y = balancer.reverse_route(o.flatten(1))
            with counted_collectives() as backward:
                (y.sum() + s.sum()).backward()
            an_attention = 2 if len(bag) > 1 else 0
            assert routing == returning == {"c10d::alltoall_base_": 1}
            assert attending == ({"c10d::alltoall_base_": an_attention} if an_attention else {})
            assert backward == {"c10d::alltoall_base_": 2 + an_attention}


def check_metrics_and_profiler_ranges(rank: int, world_size: int) -> None:
    """Flat numbers that a logger takes; who was late is seen in who waited; a trace names what the balancer does."""
    balancer = SequenceBalancer(f"g{world_size}n1", gamma=0.5)
    store = dist.distributed_c10d._get_default_store()
    late_s = 3.0

    def step(late: bool = False) -> None:
        balancer.plan_routing(LENS[world_size][rank], 8)
        if late and rank == 1:  # when the others have come, and then some
            store.wait([f"about to route {other}" for other in range(world_size) if other != 1])
            time.sleep(late_s)
        elif late:
            store.set(f"about to route {rank}", "")
        _, h, _ = balancer.route(torch.randn(sum(LENS[world_size][rank]), 8), [])
        o = balancer.attention(*(h.view(-1, 4, 2),) * 3, causal_free_attention)
        balancer.reverse_route(o.flatten(1))

    step()
    begin = time.monotonic()
    step(late=True)
    elapsed_s = time.monotonic() - begin
    metrics = balancer.metrics()
    assert json.loads(json.dumps(metrics)) == metrics and all(name.startswith("balancer/") for name in metrics)
    assert all(type(value) in (int, float) for value in metrics.values())
    if rank == 1:
        assert metrics["balancer/waiting_s"] < elapsed_s - late_s
    else:
        assert late_s / 4 < metrics["balancer/waiting_s"] < elapsed_s
    assert metrics["balancer/num_collectives"] == 5 and metrics["balancer/bytes_sent"] > 0
    assert metrics["balancer/gamma"] == balancer.plan.workload.gamma == 0.5
    made = balancer.plan
    for name in ("wir_before", "wir_after", "max_over_mean_before", "max_over_mean_after", "tokens_moved"):
        assert metrics[f"balancer/{name}"] == getattr(made, name)
    for name in ("tokens_before", "tokens_after"):
        assert metrics[f"balancer/{name}"] == getattr(made, name)[rank]
    assert (
        metrics["balancer/attention_tokens_moved"] == made.attention_tokens_moved and metrics["balancer/planning_s"] > 0
    )
    balancer.observe(0.25)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    names = {event.name for event in profiler.events()}
    assert {"knapformer::plan_routing", "knapformer::make_plan", "knapformer::start route(x)"} <= names
    assert any(name.startswith("knapformer::wait attention(q") for name in names)
    assert any(name.startswith("knapformer::wait reverse_route(x)") for name in names)


def check_a_kernel_that_needs_no_tokens(rank: int, world_size: int) -> None:
    """Its result for no tokens may depend on nothing; the rank still takes part in the exchanges of gradients."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        return causal_free_attention(q, k, v, seq_lens) if len(q) else q.new_zeros(0, q.shape[1], v.shape[2])

    lens: list[list[int]] = [[] for _ in range(world_size - 1)] + [[13]]
    for topology in (f"g1n{world_size}", f"g{world_size}/1n1", f"g{world_size}n1"):
        balancer = SequenceBalancer(topology)
        embed = torch.nn.Linear(8, 8)
        balancer.plan_routing(lens[rank], 8)
        _, x, _ = balancer.route(embed(torch.randn(sum(lens[rank]), 8)))
        o = balancer.attention(*(x.view(-1, 2, 4),) * 3, attend)
        balancer.reverse_route(o.flatten(1))[1].sum().backward()
        assert embed.weight.grad is not None
        balancer.plan_routing([3], 8)


def check_groups_are_made_once(rank: int, world_size: int) -> None:
    counts = []
    for _ in range(3):
        for topology in ("g2n2", "g1n2+g2n1") if world_size == 4 else ("g1n2",):
            balancer = SequenceBalancer(topology)
            balancer.plan_routing(LENS[world_size][rank], 8)
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    assert counts[0] == counts[1] == counts[2]


CHECKS: list[Check] = [
    check_attention_alone_is_computed_again,
    check_log_sum_exp_and_edits_in_place,
    check_frozen_blocks_on_ranks_without_shared_rows,
    check_a_kernel_that_needs_no_tokens,
    check_groups_are_made_once,
    check_collective_counts,
    check_metrics_and_profiler_ranges,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_balancer_on_real_ranks(world_size: int) -> None:
    run_checks(CHECKS, world_size)


def test_a_rank_alone_needs_no_group() -> None:
    balancer = SequenceBalancer("g1n1")
    plan = balancer.plan_routing([3, 4], 8)
    assert plan.num_sequences == 2
    x = torch.randn(7, 8)
    chunk_lens, y, (ids,) = balancer.route(x, [torch.arange(7)])
    assert (
        chunk_lens.tolist() == [3, 4]
        and torch.equal(x, y)
        and y.data_ptr() == x.data_ptr()
        and ids.tolist() == list(range(7))
    )
    q = y.view(7, 4, 2)
    o = balancer.attention(q, q, q, causal_free_attention)
    torch.testing.assert_close(o, causal_free_attention(q, q, q, chunk_lens))
    assert torch.equal(balancer.reverse_route(y)[1], x)


def test_a_copied_model_has_the_same_balancer() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.balancer = SequenceBalancer("g1n1")

    model = Holder()
    average = torch.optim.swa_utils.AveragedModel(model).module
    assert average.balancer is model.balancer and average.linear is not model.linear


@pytest.mark.parametrize("routed", [True, False])
def test_a_rank_alone_hears_of_a_recomputation_under_another_plan(routed: bool) -> None:
    """Without reverse_route, one recomputation holds all attentions of a step."""
    balancer = SequenceBalancer("g1n1")
    total = torch.zeros(())
    for lens in ([3, 4], [4, 3]):
        balancer.plan_routing(lens, 8)
        x = torch.randn(7, 8, requires_grad=True)

        def block(x: Tensor) -> Tensor:
            return balancer.attention(*(x.view(7, 4, 2),) * 3, lambda q, k, v, seq_lens: q * k * seq_lens[0]).flatten(1)

        y = checkpoint(block, balancer.route(x)[1] if routed else x, use_reentrant=False)
        total = total + (balancer.reverse_route(y)[1] if routed else y).sum()
    with pytest.raises(StateError, match="attention: computed again in the backward pass of an earlier plan"):
        total.backward()


def test_seconds_in_another_unit_are_left_out_with_a_warning() -> None:
    balancer = SequenceBalancer("g1n1")
    with pytest.raises(StateError, match="plan_routing: has made no plan"):
        balancer.observe(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            balancer.plan_routing([100, 200 + step], 64)
            balancer.observe(250.0 if step in (20, 30) else 0.25)
    assert [str(warning.message) for warning in caught if "observe: got 250 on rank 0" in str(warning.message)]
    assert sum("observe" in str(warning.message) for warning in caught) == 1
    for seconds in (1e13, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"seconds: got {re.escape(f'{seconds:g}')}, expected a number from"):
            balancer.observe(seconds)


@pytest.mark.parametrize("attended", [(1,), (1, 2, 3), [torch.zeros(7, 4, 2)]])
def test_what_a_kernel_may_return(attended: Any) -> None:
    balancer = SequenceBalancer("g1n1")
    balancer.plan_routing([3, 4], 8)
    q = torch.randn(7, 4, 2)
    with pytest.raises(ArgumentError, match="attend's result: got"):
        balancer.attention(q, q, q, lambda *_: attended)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"topology": "g2n1"}, "topology: got"),
        ({"gamma": -1.0}, "gamma: got -1"),
        ({"solver": "magic"}, "solver: got 'magic'"),
        ({"topology": "g2\0n1"}, "topology: got 'g2\\x00n1', expected text"),
        ({"gamma": "x"}, "gamma: got 'x', expected a number"),
        ({"solver": 3}, "solver: got 3, expected text"),
        ({"cost": 3}, "cost: got 3, expected a knapformer.Cost"),
        ({"effort": 2.5}, "effort: got 2.5, expected 'low'"),
        ({"mask": "zip"}, "mask: got 'zip'"),
        ({"cluster": "fast"}, "cluster: got 'fast', expected one of 'h100'"),
        ({"cluster": 5}, "cluster: got 5, expected a Cluster"),
        ({"model": "flux"}, "model: got 'flux', expected a TrainedModel"),
        ({"num_heads": 2.5}, "num_heads: got 2.5, expected an integer"),
        ({"rank_speed": 3}, "rank_speed: got 3, expected a list"),
        ({"max_tokens_per_rank": 9.5}, "max_tokens_per_rank: got 9.5, expected"),
    ],
)
def test_bad_options_are_value_errors(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SequenceBalancer(**{"topology": "g1n1", **arguments})
