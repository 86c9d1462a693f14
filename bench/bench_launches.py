"""Launches on the device of each call of a balancer, forward and backward, and the bytes that packing moves.

    python bench/bench_launches.py [--device cuda] [--json build/bench/launches.json]

Runs 2 ranks on the simulated accelerator of tests/simulated_device, which counts launches itself (build it first:
cmake --build build/release --target _simulated_device), or on CUDA, where torch's profiler counts them: on two devices
over NCCL, or on one that the ranks share, over Gloo. Engines: "kernel" packs by one launch and unpacks by another;
"device" uses ATen's index operations. The stand-in for attention's kernel launches nothing. Figures are of rank 0:

    launches    on the device, without collectives
    packed      MB that the packing kernel reads, and writes (only the simulated device counts them)
    tensors     MB of the rows that the call takes: each row is read once, and once more where it comes from a peer

Exits with status 1 where a call of "kernel" has more launches than its limit (2 for an exchange, so 4 for attention;
3 more in nested bags, to join the gradients of q, k, v of all levels), or is not packed by the kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import NUM_RANKS, on_ranks, parser_of, write_results

TOPOLOGIES = ("g2n1", "g2/1n1")
ENGINES = ("kernel", "device")
HEADS, HEAD_DIM = 8, 16
LENS = ([700, 90, 30], [20, 10, 4, 60])
LIMITS = {"route": 2, "reverse_route": 2, "attention": 4}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim")
    args = parser.parse_args()
    rows = on_ranks(run_rank, args)
    print(f"{'call':38} {'launches':>10} {'backward':>10} {'packed MB':>10} {'backward':>10} {'tensors MB':>10}")
    for name, row in rows.items():
        packed, backward_packed, tensors = (
            "-" if row[key] is None else f"{row[key] / 1e6:.2f}"
            for key in ("forward_packed_bytes", "backward_packed_bytes", "tensor_bytes")
        )
        print(
            f"{name:38} {row['forward_launches']:10} {row['backward_launches']:10} "
            f"{packed:>10} {backward_packed:>10} {tensors:>10}"
        )
    if args.json:
        configuration = {
            "num_ranks": NUM_RANKS,
            "device": args.device,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "lens": LENS,
        }
        write_results(args.json, "launches", configuration, limits=LIMITS, calls=rows)
    if any(row["max_launches"] > row["limit"] for row in rows.values() if row["limit"] is not None):
        sys.exit("launches: more than the limit")
    if any(row["min_packing_launches"] == 0 for row in rows.values() if row["limit"] is not None):
        sys.exit("launches: a call is not packed by the kernel")


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    rank = dist.get_rank()
    if args.device == "cuda":
        num_devices = torch.cuda.device_count()
        torch.cuda.set_device(rank % num_devices)
        # NCCL wants a device for each rank.
        backend = "cpu:gloo,cuda:nccl" if num_devices >= NUM_RANKS else "gloo"
        group, count = dist.new_group(backend=backend), _count_on_cuda
    else:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
        import simulated_device as sim

        sim.register()
        group, count = sim.new_group(), _count_on_sim
    rows: dict[str, Any] = {}
    for topology in TOPOLOGIES:
        for engine in ENGINES:
            balancer = SequenceBalancer(topology, group=group, engine="device" if engine == "device" else None)
            for name, (call, inputs) in calls_of(balancer, args.device).items():
                forward, outputs = count(call)
                kept, joins = [t for t in outputs if t.requires_grad], name == "attention" and "/" in topology
                gradients = [torch.ones_like(t) for t in kept]
                backward, _ = count(lambda: list(torch.autograd.grad(kept, inputs, gradients)))  # noqa: B023
                rows[f"{name} {topology} {engine}"] = {
                    "forward_launches": forward[0], "backward_launches": backward[0],
                    "forward_packed_bytes": forward[2], "backward_packed_bytes": backward[2],
                    "max_launches": max(forward[0], backward[0]),
                    "min_packing_launches": min(forward[1], backward[1]),
                    "tensor_bytes": sum(t.nbytes for t in inputs),
                    "limit": None if engine == "device" else LIMITS[name] + (3 if joins else 0),
                }  # fmt: skip
    return rows


def calls_of(balancer: Any, device: str) -> dict[str, tuple[Callable[[], list[Any]], list[Any]]]:
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


Counted = tuple[int, int, int | None]  # launches, those of the packing kernel, the bytes that it read


def _count_on_sim(call: Callable[[], list[Any]]) -> tuple[Counted, list[Any]]:
    """What the call launched, and what it returned."""
    import simulated_device as sim

    with sim.counted() as counted:
        outputs = call()
    return (counted.launches, counted.launched.count("knapformer::move_rows"), counted.packed_bytes), outputs


def _count_on_cuda(call: Callable[[], list[Any]]) -> tuple[Counted, list[Any]]:
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
    return (len(launched), sum(name.startswith("knapformer_move_rows") for name in launched), None), outputs


if __name__ == "__main__":
    main()
