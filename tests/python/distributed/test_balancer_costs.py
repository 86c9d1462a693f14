"""What a balancer costs on real ranks over Gloo: collectives and process groups; and what it reports of itself."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from balancer_checks import LENS, Check, causal_free_attention, own, run_checks

from knapformer import SequenceBalancer


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
        lens = own(LENS[world_size], rank)
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


def check_groups_are_made_once(rank: int, world_size: int) -> None:
    counts = []
    for _ in range(3):
        for topology in ("g2n2", "g1n2+g2n1") if world_size == 4 else ("g1n2",):
            balancer = SequenceBalancer(topology)
            balancer.plan_routing(own(LENS[world_size], rank), 8)
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    assert counts[0] == counts[1] == counts[2]


def check_metrics_and_profiler_ranges(rank: int, world_size: int) -> None:
    """Flat numbers that a logger takes; who was late is seen in who waited; a trace names what the balancer does."""
    balancer = SequenceBalancer(f"g{world_size}n1", gamma=0.5)
    store = dist.distributed_c10d._get_default_store()
    late_s = 3.0

    def step(late: bool = False) -> None:
        balancer.plan_routing(own(LENS[world_size], rank), 8)
        if late and rank == 1:  # when the others have come, and then some
            store.wait([f"about to route {other}" for other in range(world_size) if other != 1])
            time.sleep(late_s)
        elif late:
            store.set(f"about to route {rank}", "")
        _, h, _ = balancer.route(torch.randn(sum(own(LENS[world_size], rank)), 8), [])
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


CHECKS: list[Check] = [check_collective_counts, check_groups_are_made_once, check_metrics_and_profiler_ranges]


@pytest.mark.parametrize("world_size", [2, 4])
def test_costs_on_real_ranks(world_size: int) -> None:
    run_checks(CHECKS, world_size)
