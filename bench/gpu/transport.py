"""Attention's exchanges over a bag of all ranks: by the all-to-all, and by reading the peers' memory.

The same tensors either way, forward, there and back, in rounds that measure each once. Without a group the time of a
collective is nothing, so this part is for several ranks.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from driver import Check, at_most, on_ranks
from packing import HEAD_DIM, HEADS
from settings import backend_of, rank_device, seconds_left, sizes_of

WAYS = {"all-to-all": False, "peer memory": True}


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured = on_ranks(measure_rank, args, args.ranks, backend_of(args, args.ranks), seconds_left(args))
    seconds = measured["exchange_s"]
    faster = at_most(seconds["peer memory"] / seconds["all-to-all"], 1.0)
    differences = {"name": "peer memory: values unlike the all-to-all's", "correctness": True}
    checks: list[Check] = [
        {**differences, **at_most(measured["differences"], 0)},
        {"name": "peer memory: seconds over the all-to-all's", **faster},
    ]
    return {**measured, "checks": checks, "done": list(WAYS), "left_out": []}


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds: of the slowest rank, the median of the rounds."""
    import torch
    import torch.distributed as dist
    from knapformer.tools.measure.timing import measured_rounds

    from knapformer import SequenceBalancer

    device, num_ranks, rank = rank_device(args), dist.get_world_size(), dist.get_rank()
    num_tokens = sizes_of(args).packed_tokens
    generator = torch.Generator(device).manual_seed(rank)
    balancers = [SequenceBalancer(f"g{num_ranks}n1", solver="greedy", peer_memory=peers) for peers in WAYS.values()]
    for balancer in balancers:
        balancer.plan_routing([num_tokens], HEADS * HEAD_DIM)
    q, k, v = (
        torch.randn(balancers[0].plan.tokens_after[rank], HEADS, HEAD_DIM, generator=generator, device=device)
        .bfloat16() for _ in range(3)
    )  # fmt: skip

    def exchanges(balancer: Any) -> torch.Tensor:
        result: torch.Tensor = balancer.attention(q, k, v, lambda q, k, v, seq_lens: q + k - v)
        return result

    with torch.no_grad():
        by_all_to_all, by_peers = (exchanges(balancer) for balancer in balancers)
        differences = (by_all_to_all != by_peers).sum().cpu()
        makers = [lambda b=b: lambda: exchanges(b) for b in balancers]
        times = torch.tensor(measured_rounds(makers, device, sizes_of(args).repeats))
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    dist.all_reduce(differences)
    medians = [statistics.median(of_way) for of_way in times.tolist()]
    return {"exchange_s": dict(zip(WAYS, medians, strict=True)), "differences": differences.item()}
