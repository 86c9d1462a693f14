"""Bandwidth of packing and unpacking an exchange, beside that of a plain copy on the same device.

There are two ranks: one has the device to itself, the other computes on the host, so that the kernels of one process
alone are timed. Both are in one Gloo group, which stages device memory through the host. Every sequence is shared: a
rank keeps half of its rows (or heads) and sends the other half. Of S bytes, packing reads and writes all S, and
unpacking the S / 2 that arrived. On the CPU, which has no launches, the whole call is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from driver import Check, at_least, on_ranks
from settings import Agenda, rank_device, seconds_left, sizes_of

GOAL = 0.8  # of the copy's bandwidth
_COPIES = 10  # timed together, so that their launch by the host does not count
HEADS, HEAD_DIM = 24, 128  # of FLUX


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = on_ranks(measure_rank, args, 2, limit_s=seconds_left(args))
    return measured


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    device = rank_device(args) if dist.get_rank() == 0 else torch.device("cpu")
    num_tokens, repeats = sizes_of(args).packed_tokens, sizes_of(args).packing_repeats
    width = HEADS * HEAD_DIM
    balancer = SequenceBalancer("g2n1", solver="greedy")  # even chunks
    balancer.plan_routing([num_tokens], width)
    x = torch.ones(num_tokens, width, dtype=torch.bfloat16, device=device)
    q, k, v = torch.ones(3, num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device).unbind(0)
    with torch.no_grad():
        routed = balancer.route(x)[1]
        o = balancer.pre_attn(q, k, v)[1]
        # Each byte is read and written: S twice in packing, S / 2 twice in unpacking.
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "route": (3 * x.nbytes, lambda: balancer.route(x)),
            "reverse_route": (3 * x.nbytes, lambda: balancer.reverse_route(routed)),
            "pre_attn": (9 * x.nbytes, lambda: balancer.pre_attn(q, k, v)),
            "post_attn": (3 * x.nbytes, lambda: balancer.post_attn(o)),
        }
        target = torch.empty_like(q)

        def copy() -> None:
            for _ in range(_COPIES):
                target.copy_(q)

        copy_s = statistics.median(_seconds(copy, device) for _ in range(repeats + 2)) / _COPIES
        copy_rate, agenda = 2 * q.nbytes / copy_s, Agenda(args)
        rates, checks = dict[str, float](), list[Check]()
        measured = {
            "bytes_per_s": rates, "copy_bytes_per_s": copy_rate, "tensor_bytes": x.nbytes, "checks": checks,
        }  # fmt: skip
        for name, (size, call) in calls.items():
            if agenda.begins(name):
                rates[name] = size / kernel_seconds(call, device, repeats)
                checks.append({"name": f"{name}: bandwidth over the copy's", **at_least(rates[name] / copy_rate, GOAL)})
                agenda.keep(measured)
    return {**measured, **agenda.result()}


def kernel_seconds(call: Callable[[], object], device: Any, repeats: int) -> float:
    """Seconds of our kernels in a call, the mean of `repeats` calls after one that warms up. Collective. On the CPU the
    median of whole calls."""
    import torch

    call()
    if device.type == "cpu":
        return statistics.median(_seconds(call, device) for _ in range(repeats))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    seconds = [
        event.time_range.elapsed_us() / 1e6
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("knapformer_")
    ]
    if not seconds:
        raise RuntimeError("no launch of a kernel of ours was seen: a warning above says why it is not in use")
    return sum(seconds) / repeats


def _seconds(call: Callable[[], object], device: Any) -> float:
    from knapformer.tools.measure.timing import seconds_of

    return seconds_of(call, device)
