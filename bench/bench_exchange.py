"""The balancer's calls against bare all-to-alls of the same bytes, on 2 local ranks of one thread each.

    python bench/bench_exchange.py [--repetitions 120] [--json build/bench/exchange.json]

Measured in one run, in turns; figures are medians:

- `route_and_back`: route and reverse_route of (tokens, 512) float32, topology g2n1;
- `pre_attn` of q, k, v, each (tokens, 8, 64) float32, and `post_attn` of o;
- `host`: the CPU time of the calling thread, which excludes waits, in a forward call of `attention` for 300 sequences,
  with a kernel that does nothing and rows so narrow that copying takes almost no time; less that of its all-to-alls.

`bare` is `dist.all_to_all_single` of a flat tensor with exactly the operation's bytes and splits, from and into
tensors made beforehand. glibc is told to keep large buffers (MALLOC_SETTINGS), as GPUs' allocators do: unless it
does, each first use of one costs page faults, and `pre_attn` takes twice as long. The bytes include what stays on
this rank, as they do for anyone who calls the collective on a whole tensor. A call is timed from a barrier to its end
on the slower rank.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from driver import NUM_RANKS, bare_all_to_all, on_ranks, parser_of, write_results

WIDTH, HEADS = 512, 8
CASES = {"150x40": [40] * 150, "4x1500": [1500] * 4}
# Upper limits of the ratio: an operation's median time over that of the bare all-to-all.
LIMITS = {"route_and_back": 1.3, "pre_attn": 1.5, "post_attn": 1.5}
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
HOST_LIMIT_US, HOST_SEQUENCES, HOST_MAX_TOKENS, HOST_CALLS = 60, 300, 12, 25


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=8)
    args = parser.parse_args()
    os.environ.update(MALLOC_SETTINGS)  # of the ranks, which start now
    results = on_ranks(run_rank, args)
    print(f"{'':25} {'ms':>8} {'bare ms':>8} {'ratio':>6} {'limit':>6}")
    for case, rows in results["cases"].items():
        for name, row in rows.items():
            print(f"{case:8} {name:16} {row['ms']:8.2f} {row['bare_ms']:8.2f} {row['ratio']:6.2f} {LIMITS[name]:6.2f}")
    print(f"host: {results['host_us']:.0f} us, limit {HOST_LIMIT_US}")
    if args.json:
        configuration = {"num_ranks": NUM_RANKS, "width": WIDTH, "heads": HEADS, "repetitions": args.repetitions}
        write_results(args.json, "exchange", configuration, limits=LIMITS, host_limit_us=HOST_LIMIT_US, **results)


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    cases = {}
    with torch.no_grad():
        for name, lens in CASES.items():
            seconds = measure_together(operations(lens), args.repetitions, args.warmup)
            cases[name] = {of: summary(values, seconds[f"{of}.bare"]) for of, values in seconds.items() if of in LIMITS}
    return {"cases": cases, "host_us": host_us(max(1, args.repetitions // 3))}


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
    there, back = bare_all_to_all(sent, received), bare_all_to_all(received, sent)
    return {
        "route_and_back": lambda: balancer.reverse_route(balancer.route(x)[1]),
        "route_and_back.bare": lambda: (there(), back()),
        "pre_attn": lambda: balancer.pre_attn(q, k, v),
        "pre_attn.bare": bare_all_to_all([3 * n for n in shared], [3 * n for n in whole]),
        "post_attn": lambda: balancer.post_attn(attn_q),
        "post_attn.bare": bare_all_to_all(whole, shared),
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


def summary(seconds: list[float], bare: list[float]) -> dict[str, Any]:
    ms, bare_ms = statistics.median(seconds) * 1e3, statistics.median(bare) * 1e3
    return {"ms": ms, "bare_ms": bare_ms, "ratio": ms / bare_ms}


def host_us(rounds: int) -> float:
    import torch
    import torch.distributed as dist

    from knapformer import SequenceBalancer

    balancer = SequenceBalancer("g2n1", solver="greedy")
    rng = random.Random(dist.get_rank())
    lens = [rng.randint(1, HOST_MAX_TOKENS) for _ in range(HOST_SEQUENCES // NUM_RANKS)]
    balancer.plan_routing(lens, 8)
    _, x, _ = balancer.route(torch.ones(sum(lens), 8))
    q, k, v = (torch.ones(x.shape[0], 2, 1) for _ in range(3))
    q.requires_grad_()
    with torch.no_grad():
        num_received = balancer.pre_attn(q, k, v)[1].shape[0] - x.shape[0]  # the peer's rows

    def with_peer(sent: int, received: int) -> Callable[[], Any]:
        own = dist.get_rank()
        return bare_all_to_all(*([0 if rank == own else n for rank in range(NUM_RANKS)] for n in (sent, received)))

    there, back = with_peer(3 * x.shape[0], 3 * num_received), with_peer(num_received, x.shape[0])
    calls = (lambda: balancer.attention(q, k, v, lambda q, *_: q)), (lambda: (there(), back()))
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first warms up
        for call, of_call in zip(calls, seconds, strict=True):
            dist.barrier()
            begin = time.thread_time()
            for _ in range(HOST_CALLS):
                call()
            if number > 0:
                of_call.append((time.thread_time() - begin) / HOST_CALLS)
    return 1e6 * (statistics.median(seconds[0]) - statistics.median(seconds[1]))


if __name__ == "__main__":
    main()
