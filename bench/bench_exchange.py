"""What moving tensors costs over the bare all-to-all of the same bytes, on 2 local ranks of one thread each.

    python bench/bench_exchange.py [--repetitions 120] [--json build/bench/exchange.json]

Measured in one run, interleaved, per case and operation:

- `route_and_back`: route and reverse_route of (tokens, 512) float32, topology g2n1;
- `pre_attn`, `post_attn`: of q, k, v (tokens, 8, 64) float32, and of o.

The bare one is `dist.all_to_all_single` of a flat tensor of exactly the bytes that the operation takes, with the
operation's splits, from and into tensors made beforehand: what this rank keeps is among them, as it is for anyone who
calls the collective on a whole tensor. `bare_remote` moves only what crosses ranks, which is all that the balancer
hands to the collective. A step is timed from a barrier to its end on the slower rank; figures are medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, HEADS = 512, 8
CASES = {"150x40": [40] * 150, "4x1500": [1500] * 4}
# Median over the bare all-to-all that must not be passed.
LIMITS = {"route_and_back": 1.3, "pre_attn": 1.5, "post_attn": 1.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a limit is passed")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        result = run_rank(args.rank, 2, args.store, args.repetitions, args.warmup)
        if args.rank == 0:
            print(json.dumps(result))
        return
    report = {**describe_run(), "repetitions": args.repetitions, "limits": LIMITS, "cases": launch(sys.argv[1:])}
    print_table(report["cases"])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.check and any(row["ratio"] > LIMITS[op] for case in report["cases"].values() for op, row in case.items()):
        sys.exit(1)


def launch(arguments: list[str], script: str = __file__) -> dict[str, Any]:
    """`script` on 2 ranks: what rank 0 printed last, as JSON."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, script, *arguments, "--rank", str(rank), "--store", f"{folder}/store"],
                env=env,
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(2)
        ]
        out, _ = ranks[0].communicate()
        if any(rank.wait() != 0 for rank in ranks):
            sys.exit(f"{Path(script).stem}: a rank failed")
    cases: dict[str, Any] = json.loads(out.splitlines()[-1])
    return cases


def run_rank(rank: int, world_size: int, store: str, repetitions: int, warmup: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    results = {}
    with torch.no_grad():
        for name, lens in CASES.items():
            measured = measure_together(operations(lens, rank, world_size), repetitions, warmup)
            results[name] = summarize(measured)
    dist.destroy_process_group()
    return results


def operations(lens: list[int], rank: int, world_size: int) -> dict[str, Callable[[], Any]]:
    import torch

    from knapformer import SequenceBalancer

    balancer = SequenceBalancer(f"g{world_size}n1")
    plan = balancer.plan_routing(lens, WIDTH)
    tokens = sum(lens)
    x = torch.randn(tokens, WIDTH)
    _, routed, _ = balancer.route(x)
    q, k, v = torch.randn(3, routed.shape[0], HEADS, WIDTH // HEADS).unbind(0)
    _, attn_q, _, _ = balancer.pre_attn(q, k, v)

    moves = [[0] * world_size for _ in range(world_size)]  # tokens, [from][to]
    home = [r for r, own in enumerate(plan.seq_lens) for _ in own]
    for sequence, to, _, num_tokens in plan.chunks:
        moves[home[sequence]][to] += num_tokens
    bytes_per_token = WIDTH * 4
    sent = [moves[rank][peer] * bytes_per_token for peer in range(world_size)]
    received = [moves[peer][rank] * bytes_per_token for peer in range(world_size)]
    # Attention: every rank sends to each peer that one's share of the heads of all its rows.
    chunk_tokens = [sum(num_tokens for _, to, _, num_tokens in plan.chunks if to == r) for r in range(world_size)]
    shared = [chunk_tokens[rank] * bytes_per_token // world_size] * world_size
    whole = [tokens_there * bytes_per_token // world_size for tokens_there in chunk_tokens]

    def bare(splits: list[int], other: list[int], times: int = 1) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return (
            bare_all_to_all([n * times for n in splits], [n * times for n in other]),
            bare_all_to_all(*([0 if p == rank else n * times for p, n in enumerate(s)] for s in (splits, other))),
        )

    there, there_remote = bare(sent, received)
    back, back_remote = bare(received, sent)
    qkv, qkv_remote = bare(shared, whole, 3)
    o, o_remote = bare(whole, shared)
    return {
        "route_and_back": lambda: balancer.reverse_route(balancer.route(x)[1]),
        "route_and_back.bare": lambda: (there(), back()),
        "route_and_back.bare_remote": lambda: (there_remote(), back_remote()),
        "pre_attn": lambda: balancer.pre_attn(q, k, v),
        "pre_attn.bare": qkv,
        "pre_attn.bare_remote": qkv_remote,
        "post_attn": lambda: balancer.post_attn(attn_q),
        "post_attn.bare": o,
        "post_attn.bare_remote": o_remote,
    }


def bare_all_to_all(send_bytes: list[int], recv_bytes: list[int]) -> Callable[[], Any]:
    """Of float32, from and into tensors that stay."""
    import torch
    import torch.distributed as dist

    send_splits, recv_splits = ([n // 4 for n in splits] for splits in (send_bytes, recv_bytes))
    send, recv = torch.ones(sum(send_splits)), torch.empty(sum(recv_splits))
    return lambda: dist.all_to_all_single(recv, send, recv_splits, send_splits)


def measure_together(calls: dict[str, Callable[[], Any]], repetitions: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each call on the slower rank, the calls taking turns, each round beginning with another one."""
    import torch
    import torch.distributed as dist

    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(warmup + repetitions):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.perf_counter()
            calls[name]()
            elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if repetition >= warmup:
                seconds[name].append(elapsed.item())
    return seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    rows = {}
    for name, values in seconds.items():
        if "." in name:
            continue
        bare, remote = seconds[f"{name}.bare"], seconds[f"{name}.bare_remote"]
        rows[name] = {
            "ms": statistics.median(values) * 1e3,
            "ms_quartiles": [q * 1e3 for q in statistics.quantiles(values, n=4)],
            "bare_ms": statistics.median(bare) * 1e3,
            "bare_remote_ms": statistics.median(remote) * 1e3,
            "ratio": statistics.median(values) / statistics.median(bare),
            "ratio_to_remote": statistics.median(values) / statistics.median(remote),
        }
    return rows


def print_table(cases: dict[str, Any]) -> None:
    print(f"{'':25} {'ms':>8} {'bare ms':>8} {'ratio':>6} {'limit':>6} {'bare, remote only ms':>21} {'ratio':>6}")
    for case, rows in cases.items():
        for operation, row in rows.items():
            print(
                f"{case:8} {operation:16} {row['ms']:8.2f} {row['bare_ms']:8.2f} {row['ratio']:6.2f} "
                f"{LIMITS[operation]:6.2f} {row['bare_remote_ms']:21.2f} {row['ratio_to_remote']:6.2f}"
            )


def describe_run() -> dict[str, Any]:
    import torch

    import knapformer

    def first_line(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"

    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "benchmark": "exchange",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": first_line(["git", "rev-parse", "HEAD"]),
        "hardware": {"cpu": cpu[0] if cpu else platform.processor(), "num_cpus": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "knapformer": knapformer.__version__,
        },
        "configuration": {
            "num_ranks": 2,
            "threads_per_rank": 1,
            "width": WIDTH,
            "heads": HEADS,
            "dtype": "float32",
            "backend": "gloo",
        },
    }


if __name__ == "__main__":
    main()
