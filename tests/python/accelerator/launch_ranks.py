"""What calls of the balancer launch on the simulated accelerator, and how many bytes they pack, for test_launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import simulated_device as sim
import torch
from accelerator.device_ranks import lens_to_share, reads_all
from torch import Tensor

from knapformer import Plan, SequenceBalancer


class Launches(NamedTuple):
    """What one call launched on the device, by name, without the user's kernel."""

    forward: list[str]
    backward: list[str]


def launches_of_calls(rank: int, world: int, topologies: list[str]) -> dict[str, dict[str, Launches]]:
    """By topology, the launches of route, reverse_route and attention, with duplicates of rows and of heads."""
    group = sim.new_group()
    return {topology: _launches(SequenceBalancer(topology, group=group), rank) for topology in topologies}


def _launches(balancer: SequenceBalancer, rank: int) -> dict[str, Launches]:

    def rows(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(count, *shape, dtype=dtype).to("sim").requires_grad_(dtype.is_floating_point)

    def counted(call: Callable[[], list[Tensor]]) -> Launches:
        return Launches(*(of_pass.launched for of_pass in _counted_passes(call, leaves)))

    lens = lens_to_share(rank)
    balancer.plan_routing(lens, 3072)
    total = sum(lens)
    leaves = [
        rows(total, 24), rows(total, 3, dtype=torch.bfloat16), rows(total, dtype=torch.bool), rows(len(lens), 5),
        rows(len(lens), 3, dtype=torch.float16),
    ]  # fmt: skip
    x, half, flags, per_sequence, half_per_sequence = leaves
    routed: list[Tensor] = []

    def route() -> list[Tensor]:
        _, y, more, of_chunk = balancer.route(x, [half, flags], sequence_features=[per_sequence, half_per_sequence])
        routed.extend([y, *more, *of_chunk])
        return routed

    of_route = counted(route)
    rows_here = routed[0].shape[0]
    leaves = [rows(rows_here, 24)]
    of_return = counted(lambda: [balancer.reverse_route(leaves[0])[1]])
    leaves = [rows(rows_here, 6, 4), rows(rows_here, 2, 4), rows(rows_here, 2, 4)]
    q, k, v = leaves
    of_attention = counted(lambda: [balancer.attention(q, k, v, reads_all)])
    return {"route": of_route, "reverse_route": of_return, "attention": of_attention}


def _counted_passes(call: Callable[[], list[Tensor]], leaves: list[Tensor]) -> tuple[sim.Counted, sim.Counted]:
    """What forward and backward counted. Gradients are made before the backward begins, so that only the exchanges are
    counted."""
    with sim.counted() as forward:
        outputs = [t for t in call() if t.requires_grad]
    gradients = [torch.ones(t.shape).to(t.dtype).to("sim") for t in outputs]
    inputs = [t for t in leaves if t.requires_grad]
    with sim.counted() as backward:
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return forward, backward


# For packed_bytes_of_calls: bytes of a routed token, which no wide word divides; heads, which all degrees divide.
ROUTED_BYTES, NUM_HEADS, HEAD_BYTES = 24 * 4 + 3 * 2, 12, 5 * 2


class PackedBytes(NamedTuple):
    """The bytes that the packing kernel read in one call on the device."""

    forward: int
    backward: int


def packed_bytes_of_calls(
    rank: int, world: int, topologies: list[str]
) -> dict[str, tuple[Plan, dict[str, PackedBytes]]]:
    """By topology: the plan, and the bytes that each call packed, without duplicates of rows or heads."""
    group = sim.new_group()
    return {topology: _packed_bytes(SequenceBalancer(topology, group=group), rank) for topology in topologies}


def _packed_bytes(balancer: SequenceBalancer, rank: int) -> tuple[Plan, dict[str, PackedBytes]]:
    def rows(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(count, *shape, dtype=dtype).to("sim").requires_grad_()

    def counted(call: Callable[[], list[Tensor]], leaves: list[Tensor]) -> PackedBytes:
        return PackedBytes(*(of_pass.packed_bytes for of_pass in _counted_passes(call, leaves)))

    plan = balancer.plan_routing(lens_to_share(rank), 3072)
    x, half = rows(plan.tokens_before[rank], 24, dtype=torch.float32), rows(plan.tokens_before[rank], 3)
    y, *qkv = (rows(plan.tokens_after[rank], *shape) for shape in ((ROUTED_BYTES // 2,), *[(NUM_HEADS, 5)] * 3))

    def route() -> list[Tensor]:
        _, routed, features = balancer.route(x, [half])
        return [routed, *features]

    return plan, {
        "route": counted(route, [x, half]),
        "reverse_route": counted(lambda: [balancer.reverse_route(y)[1]], [y]),
        "attention": counted(lambda: [balancer.attention(*qkv, reads_all)], qkv),
    }
