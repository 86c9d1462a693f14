"""Ranks that write into each other's memory, for test_peer_memory."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import simulated_device as sim
import torch
from accelerator.device_ranks import attend, lens_to_share
from torch import Tensor

from knapformer import SequenceBalancer


def a_mistake_where_memory_grows(rank: int, world: int) -> tuple[str, str, float, list[str]]:
    """Rank 1 fails where both would get more memory that peers write to. What this rank raises, after how long, and its
    waits for the device until then."""
    balancer = SequenceBalancer("g2n1", group=sim.new_group(timeout_s=45), peer_memory=True)
    begin, raised = 0.0, ("", "", 0.0)
    with sim.counted() as counted:
        try:
            for num_tokens in (64, 64, 100_000):
                balancer.plan_routing([num_tokens], 24)
                fails = rank == 1 and num_tokens == 100_000
                q = torch.ones(int(balancer.chunk_lens.sum()) + fails, 2, 8, device="sim")
                begin = time.monotonic()
                balancer.attention(q, q, q, lambda q, *_: q)
        except Exception as error:
            raised = type(error).__name__, str(error), time.monotonic() - begin
    return *raised, counted.syncs


def transports_agree(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of attention in float32, by all-to-all and by peer memory. Its one key/value head goes to
    all ranks. Steps take turns on three streams, on which nothing is done before something waits for it. Odd ranks keep
    the results on the device to the end, beside later ones."""
    group, results = sim.new_group(), []
    sim.register().hold_late_work(True)
    streams = [contextlib.nullcontext(), torch.Stream(device="sim"), torch.Stream(device="sim")]
    for peer_memory in (False, True):
        balancer = SequenceBalancer("g4/2/1n1", group=group, peer_memory=peer_memory)
        values: list[Tensor] = []
        for step, lens in enumerate([[[400, 20], [30], [1000], [300]], [[9], [64, 2000], [50], [5, 5]]] * 4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            num_tokens = balancer.plan_routing(lens[rank], 1024).tokens_after[rank]
            with streams[step % len(streams)]:
                q, k, v = (
                    torch.randn(num_tokens, heads, 8, generator=generator).to("sim").requires_grad_()
                    for heads in (4, 1, 1)
                )
                o = balancer.attention(q, k, v, attend)
                (o * o.detach().sin()).sum().backward()
                values += [t.detach() if rank % 2 else t.detach().cpu() for t in (o, q.grad, k.grad, v.grad)]
        torch.accelerator.synchronize()
        results.append([t.cpu() for t in values])
    sim.register().hold_late_work(False)
    return results[0], results[1]


class _CountsWaits(torch.autograd.Function):
    """Returns q, and lists the waits that the device has not come past, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, waits: list[int]) -> Tensor:
        ctx.waits = waits
        waits.append(sim.register().num_waits_left())
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.waits.append(sim.register().num_waits_left())
        return gradients[0], None


def whole_sequences_attend_meanwhile(rank: int, world: int) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """How many barriers of peer memory the device has not come past when sequences attend that are whole here, forward
    and backward. And gradients of q, k and v by peer memory, and by all-to-all."""
    group, waits, results = sim.new_group(), [], []
    sim.register().hold_late_work(True)
    for peer_memory in (True, False):
        balancer = SequenceBalancer(f"g{world}/1n1", group=group, peer_memory=peer_memory)
        num_tokens = balancer.plan_routing(lens_to_share(rank), 3072).tokens_after[rank]
        q, k, v = ((torch.arange(num_tokens * 24.0).view(-1, 6, 4).sin() + i).to("sim") for i in range(3))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        seen: list[int] = []

        def counting(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, seen: list[int] = seen) -> Tensor:
            o = attend(q, k, v, lens)
            return _CountsWaits.apply(o, seen) if q.shape[1] == 6 else o  # all heads: whole here

        balancer.attention(q, k, v, counting).square().sum().backward()
        results.append([t.grad.cpu() for t in leaves if t.grad is not None])
        if peer_memory:
            waits = seen
    sim.register().hold_late_work(False)
    return waits, results[0], results[1]


def attention_raises_meanwhile(rank: int, world: int) -> tuple[list[int], int]:
    """How many barriers the device has not come past when attention on whole sequences raises, and once the exchange is
    dropped."""
    balancer = SequenceBalancer(f"g{world}/1n1", group=sim.new_group(), peer_memory=True)
    num_tokens = balancer.plan_routing([[300, 20], [20]][rank], 3072).tokens_after[rank]
    waits: list[int] = []

    def out_of_memory(*_: Tensor) -> Tensor:
        waits.append(sim.register().num_waits_left())
        raise MemoryError

    sim.register().hold_late_work(True)
    with torch.Stream(device="sim"), torch.no_grad():
        q = torch.ones(num_tokens, 6, 4, device="sim")
        with contextlib.suppress(MemoryError):
            balancer.attention(q, q, q, out_of_memory)
    left = sim.register().num_waits_left()
    sim.register().hold_late_work(False)
    return waits, left


def another_stream_is_left_alone(rank: int, world: int) -> list[bool]:
    """Whether attention on the default stream has waited for what another stream was given before it, in four steps.
    A result of attention on that other stream is dropped behind the second."""
    balancer = SequenceBalancer(f"g{world}n1", group=sim.new_group(), peer_memory=True)
    num_tokens = balancer.plan_routing([64], 24).tokens_after[rank]
    q = torch.ones(num_tokens, 2, 8, device="sim")
    other, waited = torch.Stream(device="sim"), []
    sim.register().hold_late_work(True)
    with other:
        kept = [balancer.attention(q, q, q, attend)]
    for step in range(4):
        if step == 2:
            kept.clear()
        with other:
            copied = torch.ones(3).pin_memory().to("sim", non_blocking=True)
        balancer.attention(q, q, q, attend)
        waited.append(bool(copied.cpu().sum() == 3))
    sim.register().hold_late_work(False)
    return waited


def peer_memory_without_the_kernel(rank: int, world: int) -> str:
    """What a rank raises whose device has symmetric memory, but no packing kernel."""
    balancer = SequenceBalancer("g2n1", group=sim.new_group(), engine="device", peer_memory=True)
    balancer.plan_routing([4], 4)
    try:
        q = torch.ones(balancer.chunk_lens.sum(), 2, 2, device="sim")
        balancer.attention(q, q, q, lambda q, *_: q)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
