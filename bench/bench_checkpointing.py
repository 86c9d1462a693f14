"""Memory and all-to-alls of checkpointing, with and without the exchanges' outputs kept, on 2 local ranks.

    python bench/bench_checkpointing.py [--json build/bench/checkpointing.json]

The plain transformer (4 blocks of width 512, float32, topology g2n1) runs the same batch in three ways: nothing is
recomputed; every block is; every block is, except its exchanges. Measured for each way: the all-to-alls of a step, and
the memory that the forward pass leaves (allocated minus freed, by the profiler).
"""

from __future__ import annotations

import argparse
from typing import Any

from driver import NUM_RANKS, on_ranks, parser_of, write_results

MODEL = {"kind": "transformer", "num_blocks": 4, "d_model": 512, "num_heads": 8, "num_kv_heads": 8}
# Few tokens, so that no exchange's output lies in recycled memory, whose allocation the profiler does not see.
LENS = [[200, 20, 30], [40, 180]]
WAYS = {"none": (False, False), "blocks": (True, False), "blocks, exchanges kept": (True, True)}


def main() -> None:
    args = parser_of(__doc__).parse_args()
    rows = on_ranks(run_rank, args)
    print(f"{'computed again':24} {'all-to-alls':>12} {'MiB after forward':>18}")
    for name, row in rows.items():
        print(f"{name:24} {row['all_to_alls']:12} {row['forward_mib']:18.1f}")
    if args.json:
        configuration = {"num_ranks": NUM_RANKS, "model": MODEL, "lens": LENS, "dtype": "float32"}
        write_results(args.json, "checkpointing", configuration, ways=rows)


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, config_from_dict, random_batch
    from knapformer.models import init_weights, set_checkpointing

    from knapformer import Sample, SequenceBalancer

    config = config_from_dict(MODEL)
    model = build_model(config)
    init_weights(model)
    balancer = SequenceBalancer("g2n1")
    lens = LENS[dist.get_rank()]
    batch, _ = random_batch(config, [Sample(0, length) for length in lens], 0, torch.device("cpu"), torch.float32)

    def profiled(way: tuple[bool, bool]) -> tuple[Any, Any]:
        set_checkpointing(model, way[0], keep_exchanges=way[1])
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
            loss = model(batch, balancer).square().mean()
        with torch.profiler.profile(activities=activities) as backward:
            loss.backward()
        return forward.key_averages(), backward.key_averages()

    for way in WAYS.values():  # a first step allocates what later ones recycle
        profiled(way)
    rows: dict[str, Any] = {}
    for name, way in WAYS.items():
        forward, backward = profiled(way)
        rows[name] = {
            "all_to_alls": sum(e.count for e in [*forward, *backward] if e.key == "c10d::alltoall_base_"),
            "forward_mib": sum(e.self_cpu_memory_usage for e in forward) / 2**20,
        }
    return rows


if __name__ == "__main__":
    main()
