"""What calls of the balancer launch on the simulated accelerator, for test_launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import simulated_device as sim
import torch
from accelerator.device_ranks import lens_to_share, reads_all
from torch import Tensor

from knapformer import SequenceBalancer


class Launches(NamedTuple):
    """What one call launched on the device, by name, without the user's kernel."""

    forward: list[str]
    backward: list[str]


def launches_of_calls(rank: int, world: int, topologies: list[str]) -> dict[str, dict[str, Launches]]:
    """By topology, the launches of route, reverse_route and attention. Nothing adds up in backward: that is ATen's."""
    group = sim.new_group()
    return {topology: _launches(SequenceBalancer(topology, group=group), rank) for topology in topologies}


def _launches(balancer: SequenceBalancer, rank: int) -> dict[str, Launches]:

    def rows(count: int, *shape: int, dtype: torch.dtype = torch.float32, fixed: bool = False) -> Tensor:
        return torch.ones(count, *shape, dtype=dtype).to("sim").requires_grad_(dtype.is_floating_point and not fixed)

    lens = lens_to_share(rank)
    balancer.plan_routing(lens, 3072)
    total = sum(lens)
    leaves = [
        rows(total, 24), rows(total, 3, dtype=torch.bfloat16), rows(total, dtype=torch.bool),
        rows(len(lens), 5, fixed=True), rows(len(lens), 3, dtype=torch.float16, fixed=True),
    ]  # fmt: skip
    x, half, flags, per_sequence, half_per_sequence = leaves
    routed: list[Tensor] = []

    def route() -> list[Tensor]:
        _, y, more, of_chunk = balancer.route(x, [half, flags], sequence_features=[per_sequence, half_per_sequence])
        routed.extend([y, *more, *of_chunk])
        return routed

    of_route = _launches_of(route, leaves)
    rows_here = routed[0].shape[0]
    leaves = [rows(rows_here, 24)]
    of_return = _launches_of(lambda: [balancer.reverse_route(leaves[0])[1]], leaves)
    leaves = [rows(rows_here, 8, 4), rows(rows_here, 4, 4), rows(rows_here, 4, 4)]
    q, k, v = leaves
    of_attention = _launches_of(lambda: [balancer.attention(q, k, v, reads_all)], leaves)
    return {"route": of_route, "reverse_route": of_return, "attention": of_attention}


def _launches_of(call: Callable[[], list[Tensor]], leaves: list[Tensor]) -> Launches:
    """Gradients are made before the backward begins, so that only the exchanges are counted."""
    with sim.counted() as forward:
        outputs = [t for t in call() if t.requires_grad]
    gradients = [torch.ones(t.shape).to(t.dtype).to("sim") for t in outputs]
    inputs = [t for t in leaves if t.requires_grad]
    with sim.counted() as backward:
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return Launches(forward.launched, backward.launched)
