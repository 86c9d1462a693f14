"""How long the balancer's calls take, against a bare all-to-all of the same bytes, on 2 local ranks of one thread each.

    python bench/bench_exchange.py [--repetitions 120] [--json build/bench/exchange.json]

Measured in one run, interleaved, per case and operation:

- `route_and_back`: route and reverse_route of (tokens, 512) float32, topology g2n1;
- `pre_attn` of q, k, v, each (tokens, 8, 64) float32, and `post_attn` of o.

`bare` is `dist.all_to_all_single` of a flat tensor with exactly the operation's bytes and splits, from and into tensors
made beforehand. The bytes include what stays on this rank, as they do for anyone who calls the collective on a whole
tensor. `bare_remote` moves only the bytes that cross ranks, which are all that the balancer hands to the collective. A
call is timed from a barrier to its end on the slower rank; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from driver import NUM_RANKS, bare_all_to_all, on_ranks, parser_of, write_results

WIDTH, HEADS = 512, 8
CASES = {"150x40": [40] * 150, "4x1500": [1500] * 4}
# Upper limits of the ratio: an operation's median time over that of the bare all-to-all.
LIMITS = {"route_and_back": 1.3, "pre_attn": 1.5, "post_attn": 1.5}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a limit is passed")
    args = parser.parse_args()
    cases = on_ranks(run_rank, args)
    print_table(cases)
    if args.json:
        configuration = {
            "num_ranks": NUM_RANKS,
            "threads_per_rank": 1,
            "width": WIDTH,
            "heads": HEADS,
            "dtype": "float32",
            "backend": "gloo",
            "repetitions": args.repetitions,
        }
        write_results(args.json, "exchange", configuration, limits=LIMITS, cases=cases)
    if args.check and any(row["ratio"] > LIMITS[op] for case in cases.values() for op, row in case.items()):
        sys.exit(1)


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    results = {}
    with torch.no_grad():
        for name, lens in CASES.items():
            results[name] = summarize(measure_together(operations(lens), args.repetitions, args.warmup))
    return results


def operations(lens: list[int]) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    rank = dist.get_rank()
    balancer = SequenceBalancer(f"g{NUM_RANKS}n1")
    plan = balancer.plan_routing(lens, WIDTH)
    tokens = sum(lens)
    x = torch.randn(tokens, WIDTH)
    _, routed, _ = balancer.route(x)
    q, k, v = torch.randn(3, routed.shape[0], HEADS, WIDTH // HEADS).unbind(0)
    _, attn_q, _, _ = balancer.pre_attn(q, k, v)

    moves = [[0] * NUM_RANKS for _ in range(NUM_RANKS)]  # tokens, [from][to]
    home = [r for r, own in enumerate(plan.seq_lens) for _ in own]
    for sequence, to, _, num_tokens in plan.chunks:
        moves[home[sequence]][to] += num_tokens
    sent = [moves[rank][peer] * WIDTH for peer in range(NUM_RANKS)]  # float32 numbers, as all splits below
    received = [moves[peer][rank] * WIDTH for peer in range(NUM_RANKS)]
    # Attention: every rank sends all its rows to each peer, with the heads that are the peer's share.
    chunk_tokens = [sum(num_tokens for _, to, _, num_tokens in plan.chunks if to == r) for r in range(NUM_RANKS)]
    shared = [chunk_tokens[rank] * WIDTH // NUM_RANKS] * NUM_RANKS
    whole = [tokens_there * WIDTH // NUM_RANKS for tokens_there in chunk_tokens]

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


def measure_together(calls: dict[str, Callable[[], Any]], repetitions: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each call on the slower rank. The calls take turns, and each round begins with another call."""
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


if __name__ == "__main__":
    main()
