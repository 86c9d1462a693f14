"""Launches on a GPU of each call of a balancer, forward and backward: an item of gpu.py.

The stand-in for attention's kernel launches nothing. An exchange packs by one launch and unpacks by another. So
attention takes four; in nested bags three more, which join the gradients of q, k and v of all levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

HEADS, HEAD_DIM = 8, 16
LENS = ([700, 90, 30], [20, 10, 4, 60])
LIMITS = {"route": 2, "reverse_route": 2, "attention": 4}


def launches_of_calls(device: Any) -> Iterator[tuple[str, int, int, int | None]]:
    """On each of two ranks: a call's name, its launches (of forward and backward the more), those of the packing kernel
    (the fewer), and the limit of the launches; None where ATen's operations pack."""
    import torch

    from knapformer import SequenceBalancer

    for topology, engine in ((t, e) for t in ("g2n1", "g2/1n1") for e in (None, "device")):
        balancer = SequenceBalancer(topology, engine=engine)
        for name, (call, inputs) in _calls_of(balancer, device).items():
            forward, outputs = _counted(call)
            kept, joins = [t for t in outputs if t.requires_grad], name == "attention" and "/" in topology
            gradients = [torch.ones_like(t) for t in kept]
            backward, _ = _counted(lambda: list(torch.autograd.grad(kept, inputs, gradients)))  # noqa: B023
            limit = None if engine else LIMITS[name] + 3 * joins
            way = "by ATen's operations" if engine else "by the packing kernel"
            yield f"{name}, {topology}, {way}", max(forward[0], backward[0]), min(forward[1], backward[1]), limit


def _calls_of(balancer: Any, device: Any) -> dict[str, tuple[Callable[[], list[Any]], list[Any]]]:
    """By name, a call and the tensors that it takes."""
    import torch
    import torch.distributed as dist

    lens, width = LENS[dist.get_rank()], HEADS * HEAD_DIM
    balancer.plan_routing(lens, 3072)  # as for a model this wide, in which nested bags share the longest sequence

    def rows(count: int, *shape: int) -> torch.Tensor:
        return torch.ones(count, *shape, dtype=torch.bfloat16).to(device).requires_grad_()

    x, feature, per_sequence = rows(sum(lens), width), rows(sum(lens), 3), rows(len(lens), 5)
    # This call is not counted: the first exchange also copies the index tables to the device.
    num_rows = balancer.route(x)[1].shape[0]
    routed, q, k, v = (rows(num_rows, *shape) for shape in ((width,), *[(HEADS, HEAD_DIM)] * 3))

    def route() -> list[torch.Tensor]:
        _, y, features, of_chunk = balancer.route(x, [feature], sequence_features=[per_sequence.detach()])
        return [y, *features, *of_chunk]  # without gradients that add up, which ATen's operations do

    return {
        "route": (route, [x, feature]),
        "reverse_route": (lambda: [balancer.reverse_route(routed)[1]], [routed]),
        "attention": (lambda: [balancer.attention(q, k, v, _no_launch())], [q, k, v]),
    }


def _no_launch() -> Callable[..., Any]:
    """Stands in for attention's kernel: launches nothing, forward or backward; gives gradients for q, k and v."""
    import torch

    class ReadsAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(k, v)
            return q.view_as(q)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            k, v = ctx.saved_tensors
            return gradient, torch.empty_like(k), torch.empty_like(v)

    return lambda q, k, v, seq_lens: ReadsAll.apply(q, k, v)


def _counted(call: Callable[[], list[Any]]) -> tuple[tuple[int, int], list[Any]]:
    """Its launches and those of the packing kernel; what it returned."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        outputs = call()
        torch.cuda.synchronize()
    launched = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and "nccl" not in event.name.lower()
        and not event.name.startswith(("Memcpy", "Memset"))  # no kernels; Gloo uses them to stage its collectives
    ]
    return (len(launched), sum(name.startswith("knapformer_move_rows") for name in launched)), outputs
