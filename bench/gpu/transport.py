"""Attention's exchanges over a bag of all ranks: by the all-to-all, and by writing to the peers' memory.

Both ways exchange the same tensors, forward, there and back; each round measures each way once. Times are for ranks
with a device each. The part `correctness` checks that both give the same bits, also for two ranks that share a device.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from driver import Check, at_most, on_ranks
from packing import HEAD_DIM, HEADS
from settings import backend_of, rank_device, seconds_left, sizes_of

if TYPE_CHECKING:
    import torch

WAYS = {"all-to-all": False, "peer memory": True}


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured = on_ranks(measure_rank, args, args.ranks, backend_of(args, args.ranks), seconds_left(args))
    ratio = measured["exchange_s"]["peer memory"] / measured["exchange_s"]["all-to-all"]
    checks: list[Check] = [{"name": "peer memory: seconds over the all-to-all's", **at_most(ratio, 1.0)}]
    return {**measured, "checks": checks, "done": list(WAYS), "left_out": []}


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each way: the median over rounds, on the slowest rank of each round."""
    import torch
    import torch.distributed as dist
    from knapformer.tools.measure.timing import measured_rounds

    makers = [lambda call=call: call for call in exchanges(args, sizes_of(args).packed_tokens)]
    with torch.no_grad():
        times = torch.tensor(measured_rounds(makers, rank_device(args), sizes_of(args).transport_repeats))
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return {"exchange_s": dict(zip(WAYS, map(statistics.median, times.tolist()), strict=True))}


def compare_rank(args: argparse.Namespace) -> int:
    """How many numbers differ between both ways, over all ranks."""
    import torch
    import torch.distributed as dist

    if dist.get_world_size() > args.num_devices:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # else torch refuses ranks that share a device
    with torch.no_grad():
        by_all_to_all, by_peers = (call() for call in exchanges(args, 1000))
        differences = (by_all_to_all != by_peers).sum().cpu()
    dist.all_reduce(differences)
    return int(differences)


def exchanges(args: argparse.Namespace, num_tokens: int) -> list[Callable[[], torch.Tensor]]:
    """A call for each way: both exchanges of attention, with almost no computation between them."""
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    device, num_ranks, rank = rank_device(args), dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(rank)
    calls = []
    for peer_memory in WAYS.values():
        balancer = SequenceBalancer(f"g{num_ranks}n1", solver="greedy", peer_memory=peer_memory)
        plan = balancer.plan_routing([num_tokens], HEADS * HEAD_DIM)
        shape = (plan.tokens_after[rank], HEADS, HEAD_DIM)
        if not calls:  # the plans are the same
            q, k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(3))
        calls.append(functools.partial(balancer.attention, q, k, v, lambda q, k, v, seq_lens: q + k - v))
    return calls
