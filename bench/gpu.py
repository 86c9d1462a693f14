"""What one GPU can show of this project: results first, then speed, beside the paper's figures.

    PYTHONPATH=python python bench/gpu.py --out build/gpu [--seconds N] [--device cpu] [item ...]

Needs torch and the built package; an item that needs diffusers says so where it is missing. Items run one after
another, each in processes of its own and within its own time; one that fails or takes too long does not keep the next
from running. Each figure is written to figures.jsonl as it comes; the end writes gpu.json (figures, hardware, versions,
commit) and gpu.txt (a table, and what is shown and what is not). Exits with 1 where a result was wrong or an item
failed; a missed goal of speed is a figure, not a failure. `--device cpu` runs the same lines at tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from driver import on_ranks

ROOT = Path(__file__).parents[1]
# Relative differences, in norm, from float64. They allow for the rounding of a few blocks, and products in TF32 (10
# bits). Wrong results are off by a tenth or more.
LIMITS = {"fp32": 2e-3, "bf16": 5e-2}
HEADS, HEAD_DIM = 24, 128  # of FLUX
PEAK = ["--peak-tflops", "989"]  # of an H100 or H200 in bfloat16, without sparsity
NOT_SHOWN = "Not shown by one GPU: NCCL, NVLink, errors over NCCL, transport beside attention, what several ranks gain."


SIZES = {
    "cuda": SimpleNamespace(
        models=("flux-demo", "wan-demo"),
        # Text and visual tokens, dealt to ranks in turn.
        samples=((77, 576), (20, 256), (128, 1024), (7, 64), (50, 576), (77, 400), (64, 784), (3, 144)),
        compiler="inductor", packed_tokens=1 << 15, num_tokens=(13_500, 26_750),  # of a rank
        flux=["--model", "flux"], calibrate=["--repeats", "4"],  # options of commands
        step=["--data", "g1b1i2048f1s0", "--steps", "3", "--warmup", "1", "--gamma", "0.41", *PEAK],
        replay=["--repeats", "1", *PEAK, "--topology", "g8n4", "--topology", "g8/4/2/1n4"],
        padded=["--rounds", "5", "--classes", "FluxTransformer2DModel", "WanTransformer3DModel"],
    ),
    "cpu": SimpleNamespace(
        models=("flux-tiny", "wan-tiny"), samples=((5, 36), (2, 9), (12, 64), (3, 16)),
        compiler="eager", packed_tokens=512, num_tokens=(32, 64),
        flux=["--model", "flux-tiny"], calibrate=["--repeats", "1", "--warmup", "1", "--lengths", "32,64,128,256"],
        step=["--data", "g1b1i256f1s0", "--steps", "1", "--warmup", "0", "--gamma", "0.41"],
        replay=["--repeats", "1", "--topology", "g8n4", "--scale", "32", "--max-text-tokens", "8"],
        padded=["--rounds", "1", "--d-model", "128", "--side", "4"],
    ),
}  # fmt: skip


def record(
    args: argparse.Namespace, what: str, value: float | str, unit: str = "",
    *, at_most: float | None = None, at_least: float | None = None, must: bool = False,
) -> None:  # fmt: skip
    """Writes a figure, once over all ranks. must: missing its limit is a wrong result."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() > 0:
        return
    met: bool | None = None
    if at_most is not None or at_least is not None:
        met = value <= at_most if at_most is not None else value >= at_least  # type: ignore[operator]
    goal = "" if met is None else f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
    row = {"item": args.item, "what": what, "value": value, "unit": unit, "goal": goal, "met": met, "must": must}
    with (args.out / "figures.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
    mark = {None: "", True: "  ok", False: "  WRONG" if row["must"] else "  missed"}[row["met"]]
    return f"{row['item']:12} {row['what']:72} {value:>12} {row['unit']:8} {row['goal']}{mark}"


def rank_device(args: argparse.Namespace) -> Any:
    """The device that all ranks share, or that each has to itself; its host threads for references."""
    import torch
    import torch.distributed as dist

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def compare_bits(args: argparse.Namespace) -> None:
    """The packing kernel moves the same bits as the CPU."""
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    device, rank = rank_device(args), dist.get_rank()

    def attend(q: Any, k: Any, v: Any, seq_lens: Any) -> Any:
        repeats = q.shape[1] // k.shape[1]
        return q + k.repeat_interleave(repeats, 1) - v.repeat_interleave(repeats, 1)

    def bits(of: str, topology: str, seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(2 * seed + rank)
        lens = torch.randint(0, 300, (5,), generator=draw).tolist()
        total, dtype = sum(lens), (torch.bfloat16, torch.float32)[seed % 2]

        def rows(count: int, *shape: int) -> torch.Tensor:
            return torch.randn(count, *shape, generator=draw).to(of, dtype).requires_grad_()

        balancer = SequenceBalancer(topology)
        balancer.plan_routing(lens, 3072)
        x, feature, per_sequence = rows(total, 8, 16), rows(total, 3), rows(len(lens), 5)
        flags = (torch.randn(total, 1, generator=draw) > 0).to(of)
        _, y, (f, g), (s,) = balancer.route(x, [feature, flags], sequence_features=[per_sequence])
        o = balancer.attention(y, y[:, :2], y[:, 2:4], attend)  # two heads of k and v, on both ranks
        home = balancer.reverse_route(o)[1]
        (home.float().square().sum() + f.float().sum() + s.float().square().sum()).backward()
        tensors = [y, f, g, s, o, home, x.grad, feature.grad, per_sequence.grad]
        return [t.detach().cpu().contiguous().view(torch.uint8) for t in tensors if t is not None]

    wrong = 0
    cases = list(itertools.product(("g2n1", "g2/1n1"), range(10)))
    for topology, seed in cases:
        kernel, on_cpu = bits(device.type, topology, seed), bits("cpu", topology, seed)
        different = torch.tensor(not all(map(torch.equal, kernel, on_cpu)), dtype=torch.int32)
        dist.all_reduce(different)
        wrong += bool(different)
    record(args, f"{len(cases)} plans, forward and backward: other bits than the CPU", wrong, at_most=0, must=True)


def check_models(args: argparse.Namespace) -> None:
    """Models compute on the device, through the balancer, what float64 does on the CPU without one: in a bag that
    shares every sequence, and in nested ones with checkpointing; on one rank without a balancer, too. Where blocks are
    compiled, in nested bags alone."""
    import torch
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, load_config
    from knapformer.checkpointing import set_checkpointing
    from knapformer.models.training import DTYPES
    from torch.utils._pytree import tree_map_only

    device, rank, num_ranks, sizes = rank_device(args), dist.get_rank(), dist.get_world_size(), SIZES[args.device]
    nested, is_compiled = {1: "g1n1", 2: "g2/1n1", 4: "g4/2/1n1"}[num_ranks], args.item == "compiled"
    ways: list[tuple[str | None, bool]] = [(f"g{num_ranks}n1", False), (nested, True)]
    if is_compiled:
        ways = [(nested, False)]
    elif num_ranks == 1:
        ways = [(None, False), *ways]

    def outcome(model: Any, batch: Any, target: Any, balancer: Any) -> list[torch.Tensor]:
        """The outputs of this rank's samples, and all gradients, added up over the ranks."""
        model.zero_grad(set_to_none=True)
        output = model(batch, balancer)
        (output - target).square().mean().backward()
        gradients = torch.cat([p.grad.detach().flatten().cpu().double() for p in model.parameters()])
        dist.all_reduce(gradients)
        return [output.detach().cpu().double(), gradients]

    def in_double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()

    models = sizes.models[:1] if is_compiled and num_ranks > 1 else sizes.models  # compiling takes half a minute
    for name, dtype in itertools.product(models, ("bf16",) if is_compiled else tuple(LIMITS)):
        config = load_config(name)
        of_rank = sizes.samples[rank::num_ranks]
        model, (batch, target) = model_and_batch(config, DTYPES[dtype], device, of_rank, rank)
        reference = build_model(config, torch.float64)
        with torch.no_grad():
            for of_reference, parameter in zip(reference.parameters(), model.parameters(), strict=True):
                of_reference.copy_(parameter)
        in_float64 = tree_map_only(torch.Tensor, in_double, batch)
        expected = outcome(reference, in_float64, target.cpu().double(), None)
        for topology, checkpointed in ways:
            set_checkpointing(model, checkpointed)
            for block in itertools.chain(*model.block_lists()) if is_compiled else ():
                block.compile(backend=sizes.compiler, dynamic=True)
            found = outcome(model, batch, target, balancer_of(topology, config))
            ratios = torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)])
            dist.all_reduce(ratios.nan_to_num_(nan=1e30), op=dist.ReduceOp.MAX)
            words = [name, dtype, f"{num_ranks} ranks", topology or "no balancer", "checkpointed" * checkpointed]
            for of, value in zip(("outputs", "gradients"), ratios.tolist(), strict=True):
                what = ", ".join([word for word in words if word] + [of])
                record(args, what, value, at_most=LIMITS[dtype], must=True)


def check_masks(args: argparse.Namespace) -> None:
    import torch
    from masks import differences

    for what, dtype, value in differences(rank_device(args), {"fp32": torch.float32, "bf16": torch.bfloat16}):
        record(args, f"{dtype}, {what}", value, at_most=LIMITS[dtype], must=True)


def look_for_waits(args: argparse.Namespace) -> None:
    """The host never waits for the device between the plan and the end of the backward pass. On one rank, since Gloo
    waits for it."""
    import torch
    from knapformer.adapters.named import load_config

    device = rank_device(args)
    for name in SIZES[args.device].models:
        config = load_config(name)
        model, (batch, target) = model_and_batch(config, torch.bfloat16, device, SIZES[args.device].samples)
        balancer = balancer_of("g1n1", config)
        found = "none"
        for step in range(3):  # the first compiles kernels and tries them
            if step > 0 and device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                (model(batch, balancer) - target).square().mean().backward()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                found = str(error).splitlines()[0]
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        record(args, f"{name}: steps in which the host waits ({found})", found != "none", at_most=0)


def model_and_batch(config: Any, dtype: Any, device: Any, sizes: Any, seed: int = 0) -> tuple[Any, Any]:
    """A checkpointed model, and a batch of samples of these numbers of text and visual tokens with its target."""
    from knapformer.adapters.named import build_model, materialize, random_batch
    from knapformer.models import init_weights, set_checkpointing

    from knapformer import Sample

    model = build_model(config, dtype, "meta")
    materialize(model, device)
    init_weights(model)
    set_checkpointing(model)
    return model, random_batch(config, [config.possible(Sample(*size)) for size in sizes], seed, device, dtype)


def balancer_of(topology: str | None, config: Any) -> Any:
    import knapformer

    return None if topology is None else knapformer.SequenceBalancer(topology, mask=config.mask)


def knapformer(args: argparse.Namespace, command: str, *options: str | Path, name: str | None = None) -> Any:
    """What the command writes with --json."""
    path = args.out / f"{name or command}.json"
    run([sys.executable, "-m", "knapformer", command, "--device", args.device, "--json", path, *options])
    return json.loads(path.read_text())


def calibrate(args: argparse.Namespace) -> None:
    sizes = SIZES[args.device]
    fit = knapformer(args, "calibrate", *sizes.flux, *sizes.calibrate)
    record(args, "FLUX block, forward, recompute and backward: gamma (paper: 0.385 and 0.49)", fit["gamma"])
    record(args, "FLUX block: rate of dense layers that the fit gives", 1e-12 / fit["seconds_per_flop"], "TFLOP/s")
    record(args, "FLUX block: relative error of the fitted latency", fit["relative_rms_error"], at_most=0.1)


def step(args: argparse.Namespace) -> None:
    sizes = SIZES[args.device]
    found = knapformer(args, "simulate", "--ranks", "1", *sizes.flux, *sizes.step, "--topology", "g1n1")
    for variant in found["variants"]:
        name = f"whole FLUX, one sample, {variant['topology'] or 'no balancer'}"
        record(args, f"{name}: forward and backward", variant["fbl_s"], "s")
        record(args, f"{name}: tokens", variant["tokens_per_s"], "1/s")
        record(args, f"{name}: HFU (paper, 32 ranks: at most 0.297)", variant["hfu"] or "no peak")


def replay(args: argparse.Namespace) -> None:
    sizes = SIZES[args.device]
    fit = args.out / "calibrate.json"
    calibration = ["--calibration", fit] if fit.exists() else []
    for mix in ("joint", "mixed"):
        options = ["--data", mix, *sizes.flux, *sizes.replay, *calibration]
        found = knapformer(args, "replay", *options, name=f"replay-{mix}")
        for variant in found["variants"]:
            name = f"{mix}, {variant['topology'] or 'no balancer'}"
            record(args, f"{name}: step of the slowest rank, without its fixed costs", variant["fbl_s"], "s")
            record(args, f"{name}: HFU", variant["hfu"] or "no peak")
            if variant["topology"] is None:
                record(args, f"{name}: correlation of planned work and seconds", variant["correlation"], at_least=0.99)
            else:
                record(args, f"{name}: spread of seconds over planned work", variant["spread"], at_most=0.05)


def memory(args: argparse.Namespace) -> None:
    """Of whole FLUX with as many tokens as joint's fullest rank holds with nested bags, and without a balancer."""
    import torch
    from knapformer.adapters.named import load_config, random_batch
    from knapformer.tools.doctor.memory import MemoryModel
    from knapformer.tools.settings import trained_model

    from knapformer import Sample

    device, sizes = rank_device(args), SIZES[args.device]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = load_config(sizes.flux[1])
    model, _ = model_and_batch(config, dtype, device, [(16, 16)])
    peaks = []
    for num_tokens in sizes.num_tokens:
        batch, target = random_batch(config, [config.possible(Sample(16, num_tokens - 16))], 0, device, dtype)
        for _ in range(2):  # the second with all gradients in place
            (model(batch) - target).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        record(args, f"{num_tokens} tokens: peak", peaks[-1] / 2**30, "GiB")
    measured = (peaks[1] - peaks[0]) / (sizes.num_tokens[1] - sizes.num_tokens[0])
    predicted = MemoryModel.of(trained_model(config, dtype, checkpointing=True), config.d_model, 1).bytes_per_token
    record(args, "measured for a token", measured / 2**10, "KiB")
    record(args, "predicted for a token", predicted / 2**10, "KiB", at_least=measured / 2**10)


def kernels(args: argparse.Namespace) -> None:
    """Torch's attention kernels for whole sequences of one length."""
    import torch
    from knapformer.attention.kernels import _pairing
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device, num_tokens = rank_device(args), SIZES[args.device].packed_tokens
    gradient = torch.randn(num_tokens, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    q, k, v = (torch.randn_like(gradient).requires_grad_() for _ in range(3))

    def attend(name: str, pairing: Any) -> Any:
        if name == "varlen":
            return pairing.attend(q, k, v, causal=False)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return pairing.attend(q, k, v, kernel=by_torch)

    def by_torch(*qkv: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)

    for length in (num_tokens // 128, num_tokens // 32, num_tokens // 8, num_tokens // 2, num_tokens):
        pairing = _pairing(*[(length,) * (num_tokens // length)] * 2)
        for name in ("varlen", "cudnn"):
            try:
                seconds = kernel_seconds(lambda: attend(name, pairing).backward(gradient), device, "", 3)  # noqa: B023
            except RuntimeError as error:
                record(args, f"{name}, sequences of {length}: {str(error).splitlines()[0][:60]}", "no kernel")
                continue
            rate = 3.5 * 4 * length * num_tokens * HEADS * HEAD_DIM / seconds / 1e12
            record(args, f"{name}, sequences of {length}: forward and backward", rate, "TFLOP/s")


def padded(args: argparse.Namespace) -> None:
    path = args.out / "adapters.json"
    options = ["--device", args.device, "--json", path, *SIZES[args.device].padded]
    run([sys.executable, ROOT / "bench/bench_adapters.py", *options])
    for name, row in json.loads(path.read_text())["comparisons"].items():
        record(args, f"{name}: packed call over diffusers' padded batch, seconds", row["ratio"], at_most=row["goal"])


def measure_bandwidth(args: argparse.Namespace) -> None:
    """Of packing and unpacking over that of a copy. One of two ranks has the device to itself, the other computes on
    the host. Every sequence is shared: a rank keeps half of its rows (or heads) and sends the other half. Of S bytes,
    packing reads and writes all S, and unpacking the S / 2 that arrived."""
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    device = rank_device(args) if dist.get_rank() == 0 else torch.device("cpu")
    num_tokens, repeats = SIZES[args.device].packed_tokens, 4
    balancer = SequenceBalancer("g2n1", solver="greedy")  # even chunks
    balancer.plan_routing([num_tokens], HEADS * HEAD_DIM)
    q, k, v = torch.ones(3, num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device).unbind(0)
    x = q.flatten(1)
    with torch.no_grad():
        routed, o = balancer.route(x)[1], balancer.pre_attn(q, k, v)[1]
        calls: list[tuple[str, int, Callable[..., object], list[Any]]] = [
            ("route", 3, balancer.route, [x]),
            ("reverse_route", 3, balancer.reverse_route, [routed]),
            ("pre_attn", 9, balancer.pre_attn, [q, k, v]),
            ("post_attn", 3, balancer.post_attn, [o]),
        ]
        target = torch.empty_like(q)
        copy_s = kernel_seconds(lambda: [target.copy_(q) for _ in range(10)], device, "", repeats) / 10
        record(args, "a copy", 2e-9 * q.nbytes / copy_s, "GB/s")
        for name, times, call, tensors in calls:
            seconds = kernel_seconds(lambda: call(*tensors), device, "knapformer_", repeats)  # noqa: B023
            record(args, f"{name}: bandwidth over a copy's", times * copy_s / (2 * seconds), at_least=0.8)


def kernel_seconds(call: Callable[[], object], device: Any, prefix: str, repeats: int) -> float:
    """Seconds in a call of the device's kernels with such names; on the CPU, of the whole call. Mean of `repeats`."""
    import torch

    call()
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    of_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    seconds = sum(e.time_range.elapsed_us() for e in of_device if e.name.startswith(prefix)) / 1e6
    if seconds == 0:
        raise RuntimeError(f"no launch of a kernel {prefix}*: a warning above says why it is not in use")
    return seconds / repeats


# --- One item after another.

# The most valuable first: what runs, on how many ranks (0: in this process), and its seconds on a GPU.
ITEMS: dict[str, tuple[list[tuple[Callable[[argparse.Namespace], None], int]], float]] = {
    "packing": ([(compare_bits, 2)], 90),
    "correctness": ([(check_models, num_ranks) for num_ranks in (1, 2, 4)], 150),
    "masks": ([(check_masks, 1), (check_masks, 2)], 120),
    "waits": ([(look_for_waits, 1)], 60),
    "calibrate": ([(calibrate, 0)], 90),
    "step": ([(step, 0)], 120),
    "replay": ([(replay, 0)], 150),
    "memory": ([(memory, 0)], 90),
    "kernels": ([(kernels, 0)], 60),
    "padded": ([(padded, 0)], 60),
    "bandwidth": ([(measure_bandwidth, 2)], 60),
    "compiled": ([(check_models, num_ranks) for num_ranks in (1, 2)], 180),
}


def run(command: list[Any]) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True)


def run_item(args: argparse.Namespace, item: str, seconds: float) -> str:
    """In a process group of its own, which ends with it. Returns how it went."""
    command = [sys.executable, str(Path(__file__)), "--out", str(args.out), "--device", args.device, "--run", item]
    begin = time.monotonic()
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            status = process.wait(seconds)
            how = "done" if status == 0 else f"failed, status {status}"
        except subprocess.TimeoutExpired:
            how = "stopped, out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    return f"{how}, {time.monotonic() - begin:.0f} s"


def summary(args: argparse.Namespace, ended: dict[str, str]) -> bool:
    """Writes gpu.json and gpu.txt. Returns whether every item ended and no result was wrong."""
    from driver import host_environment

    figures = args.out / "figures.jsonl"
    rows = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    num_must = sum(row["must"] for row in rows)
    wrong, missed = ([r for r in rows if r["met"] is False and r["must"] == m] for m in (True, False))
    lines = [
        *map(_line, rows),
        *(f"{item}: {how}" for item, how in ended.items()),
        f"{num_must - len(wrong)} of {num_must} results are right; {len(missed)} goals of speed were missed.",
        NOT_SHOWN,
    ]
    (args.out / "gpu.txt").write_text("\n".join(lines) + "\n")
    result = {"environment": host_environment(), "device": args.device, "items": ended, "figures": rows}
    (args.out / "gpu.json").write_text(json.dumps(result, indent=1))
    return not wrong and all(how.startswith("done") for how in ended.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="item", help=f"default all: {', '.join(ITEMS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--seconds", type=float, help="begin no item after, and stop the last one there")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--run", dest="item", choices=ITEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.items) - set(ITEMS):
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(ITEMS)}")
    if args.item is not None:
        for function, num_ranks in ITEMS[args.item][0]:
            on_ranks(function, args, num_ranks) if num_ranks else function(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "figures.jsonl").unlink(missing_ok=True)
    ends_at = time.monotonic() + (args.seconds or float("inf"))
    ended = {}
    for item in args.items or ITEMS:
        left = min(ITEMS[item][1] if args.device == "cuda" else 3600.0, ends_at - time.monotonic())
        ended[item] = run_item(args, item, left) if left > 5 else "not begun"
        is_right = summary(args, ended)  # after each, in case that the whole is stopped
    print((args.out / "gpu.txt").read_text())
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
