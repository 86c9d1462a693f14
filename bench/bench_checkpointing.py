"""What checkpointing costs and keeps, with and without the exchanges' outputs, on 2 local ranks of one thread each.

    python bench/bench_checkpointing.py [--json build/bench/checkpointing.json]

The plain transformer, 4 blocks of width 512, float32, topology g2n1, on the same batch in three ways: nothing computed
again, every block computed again, every block but its exchanges. Of each: all-to-alls of a step; what the forward pass
leaves in memory (allocated less freed in it, by the profiler); the median time of a step, the ways taking turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_exchange import describe_run, launch

MODEL = {"num_blocks": 4, "d_model": 512, "num_heads": 8, "num_kv_heads": 8}
# So few tokens that no exchange's output comes out of recycled memory, which the profiler does not see allocated.
LENS = [[200, 20, 30], [40, 180]]
WAYS = {"none": (False, False), "blocks": (True, False), "blocks, exchanges kept": (True, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        result = run_rank(args)
        if args.rank == 0:
            print(json.dumps(result))
        return
    rows = launch(sys.argv[1:], __file__)
    print(f"{'computed again':24} {'all-to-alls':>12} {'MiB after forward':>18} {'s a step':>9}")
    for name, row in rows.items():
        print(f"{name:24} {row['all_to_alls']:12} {row['forward_mib']:18.1f} {row['step_s']:9.2f}")
    if args.json:
        configuration = {"num_ranks": 2, "threads_per_rank": 1, "model": MODEL, "lens": LENS, "dtype": "float32"}
        report = {**describe_run(), "benchmark": "checkpointing", "configuration": configuration, "ways": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from knapformer.models import TransformerBatch, build_model, init_weights, set_checkpointing
    from knapformer.models.config import TransformerConfig

    from knapformer import SequenceBalancer

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    store = f"file://{args.store}"
    dist.init_process_group("gloo", init_method=store, rank=args.rank, world_size=2, timeout=timeout)
    config = TransformerConfig(**MODEL)
    model = build_model(config)
    init_weights(model)
    balancer = SequenceBalancer("g2n1")
    lens = LENS[args.rank]
    batch = TransformerBatch(torch.randn(sum(lens), config.in_channels), lens)

    def profiled(way: tuple[bool, bool]) -> tuple[Any, Any]:
        set_checkpointing(model, way[0], keep_exchanges=way[1])
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
            loss = model(batch, balancer).square().mean()
        with torch.profiler.profile(activities=activities) as backward:
            loss.backward()
        return forward.key_averages(), backward.key_averages()

    def timed(way: tuple[bool, bool]) -> float:
        set_checkpointing(model, way[0], keep_exchanges=way[1])
        dist.barrier()
        begin = time.perf_counter()
        model(batch, balancer).square().mean().backward()
        return time.perf_counter() - begin

    for way in WAYS.values():
        timed(way)
    rows: dict[str, Any] = {}
    for name, way in WAYS.items():
        forward, backward = profiled(way)
        rows[name] = {
            "all_to_alls": sum(e.count for e in [*forward, *backward] if e.key == "c10d::alltoall_base_"),
            "forward_mib": sum(e.self_cpu_memory_usage for e in forward) / 2**20,
        }
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.repetitions):
        for name, way in WAYS.items():
            seconds[name].append(timed(way))
    for name in WAYS:
        rows[name]["step_s"] = statistics.median(seconds[name])
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
