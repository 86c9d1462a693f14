"""Memory of training steps on local ranks: of plans, beside what `knapformer doctor` predicts; and of checkpointing.

    python bench/bench_memory.py [--json build/bench/memory.json]

plans         on 4 ranks, a FLUX of 3 blocks 256 wide, float32, and joint's lengths at a twelfth, as its width is. For
              each rank the most resident memory of its process in the forward and backward passes of a micro-batch
              (VmHWM of Linux), less what was resident before: torch, parameters, gradients, the batch
checkpointing the plain transformer (4 blocks of width 512, float32, topology g2n1) on one batch, on 2 ranks: the
              all-to-alls of a step, and what the forward pass leaves (allocated minus freed, by the profiler)
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

from driver import NUM_RANKS, on_ranks, parser_of, write_results

import knapformer

MIX, MICRO_BATCHES, D_MODEL, NESTED = "joint", 8, 256, "g4/2/1n1"
PLANNED = "flux-demo"
TRAINED = knapformer.TrainedModel(num_blocks=3, num_parameters=5e6, shard_ranks=1)
MODEL = {"kind": "transformer", "num_blocks": 4, "d_model": 512, "num_heads": 8, "num_kv_heads": 8}
LENS = [[200, 20, 30], [40, 180]]
WAYS = {"none": (False, False), "blocks": (True, False), "blocks, exchanges kept": (True, True)}


def main() -> None:
    args = parser_of(__doc__).parse_args()
    # What tensors free goes back to the system at once, so that resident memory follows them.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    plans = on_ranks(memory_of_plans, args, 4)
    print("| computed again | plan | step, s | tokens of each rank | peak, MiB | predicted | highest over predicted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in plans:
        of_ranks = ["/".join(f"{value:.0f}" for value in row[key]) for key in ("tokens", "peak_mib", "predicted_mib")]
        over = max(row["peak_mib"]) / max(row["predicted_mib"])
        cells = [row["again"], row["plan"], f"{row['step_s']:.3f}", *of_ranks, f"{over:.2f}"]
        print(f"| {' | '.join(cells)} |")
    ways = on_ranks(memory_of_checkpointing, args)
    print("| computed again | all-to-alls | MiB after forward |\n| --- | --- | --- |")
    for name, row in ways.items():
        print(f"| {name} | {row['all_to_alls']} | {row['forward_mib']:.1f} |")
    if args.json:
        configuration = {"num_ranks": [4, NUM_RANKS], "models": [PLANNED, MODEL], "mix": MIX, "lens": LENS}
        write_results(args.json, "memory", configuration, plans=plans, ways=ways)


def plans_of(step: list[list[int]]) -> list[tuple[str, knapformer.Plan | None, bool]]:
    """Name, plan of the step, and whether the balancer in the model follows it."""
    of: Any = {"d_model": D_MODEL, "micro_batches": MICRO_BATCHES, "cluster": "cpu", "model": TRAINED}
    whole = of | {"topology": f"g1n{len(step)}", "model": TRAINED.replace(routed=False)}
    return [
        ("none", None, False),
        ("whole samples, no limit", knapformer.plan(step, **whole, max_tokens_per_rank=2**40).fill_ranks(), False),
        ("whole samples", knapformer.plan(step, **whole).fill_ranks(), False),
        (f"bags {NESTED}", knapformer.plan(step, NESTED, **of), True),
    ]


def memory_of_plans(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, load_config, random_batch
    from knapformer.models import init_weights, set_checkpointing
    from knapformer.tools.doctor.memory import MemoryModel
    from knapformer.tools.settings import trained_model

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    scale = 3072 / D_MODEL  # of FLUX, so that attention has the same share of the work
    mix = knapformer.DataMix.parse(MIX, resolution_scale=scale**0.5, max_text_tokens=round(392 / scale))
    drawn = [mix.draw_lengths(0, k, mix.num_ranks)[:: mix.num_ranks // num_ranks] for k in range(MICRO_BATCHES)]
    step = [[length for batch in drawn for length in batch[rank]] for rank in range(num_ranks)]
    flat = [length for lens in step for length in lens]
    config = load_config(PLANNED)
    model, balancer = build_model(config), knapformer.SequenceBalancer(NESTED)
    init_weights(model)

    def peak(plan: knapformer.Plan | None, in_model: bool, k: int) -> tuple[int, float]:
        """Tokens of this rank in a micro-batch, and MiB."""
        chunks = [] if plan is None else plan.chunks_on(rank, k)
        if plan is None:
            lens = drawn[k][rank]
        elif in_model:
            balancer.follow(plan, k)
            lens = [step[rank][i] for i in plan.home_sequences(rank, k)]
        else:
            lens = [flat[i] for i, _, _ in chunks]
        sizes = [config.possible(config.sample_of(n, config.text_tokens(n))) for n in lens]
        batch, target = random_batch(config, sizes, rank, torch.device("cpu"), torch.float32)
        gc.collect()
        before = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        (model(batch, balancer if in_model else None, planned=in_model) - target).square().sum().backward()
        tokens = sum(lens) if plan is None else sum(end - begin for _, begin, end in chunks)
        return tokens, resident_mib("VmHWM") - before

    rows = []
    peak(None, False, 0)  # leaves gradients in place
    for checkpointed in (False, True):
        set_checkpointing(model, checkpointed)
        predicted = MemoryModel.of(trained_model(config, torch.float32, checkpointed), D_MODEL, num_ranks)
        for name, plan, in_model in plans_of(step):
            found = torch.tensor([peak(plan, in_model, k) for k in range(MICRO_BATCHES)]).amax(0)
            of_ranks = [torch.zeros(2) for _ in range(num_ranks)]
            dist.all_gather(of_ranks, found)
            tokens, peaks = torch.stack(of_ranks, 1).tolist()
            mib = [n * predicted.bytes_per_token / 2**20 for n in tokens]
            step_s = 0 if plan is None else plan.predicted_time
            row = {"again": "blocks" if checkpointed else "none", "plan": name, "step_s": step_s, "tokens": tokens}
            rows.append(row | {"peak_mib": peaks, "predicted_mib": mib})
    return rows


def resident_mib(key: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 2**10


def memory_of_checkpointing(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, config_from_dict, random_batch
    from knapformer.models import init_weights, set_checkpointing

    config = config_from_dict(MODEL)
    model = build_model(config)
    init_weights(model)
    balancer = knapformer.SequenceBalancer("g2n1")
    lens = LENS[dist.get_rank()]
    batch, _ = random_batch(
        config, [knapformer.Sample(0, length) for length in lens], 0, torch.device("cpu"), torch.float32
    )

    def profiled(way: tuple[bool, bool]) -> tuple[Any, Any]:
        set_checkpointing(model, way[0], keep_exchanges=way[1])
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
            loss = model(batch, balancer).square().mean()
        with torch.profiler.profile(activities=activities) as backward:
            loss.backward()
        return forward.key_averages(), backward.key_averages()

    for way in WAYS.values():  # warms up
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
