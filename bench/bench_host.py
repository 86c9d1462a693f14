"""Host CPU time of each call of attention's exchange, compared with the bare all-to-all, on 2 local ranks.

    python bench/bench_host.py [--published ~/KnapFormer] [--json build/bench/host.json]

Measures the CPU time of the calling thread (time.thread_time), which excludes waits for the peer. Rows are tiny (2
heads of one number), so that copying them takes almost no time. 300 sequences on 2 ranks, topology g2n1. All are
measured in one run, interleaved, in rounds of several calls; figures are microseconds per call, medians over rounds:

    inference   `balancer.attention` with a kernel that does nothing, or pre_attn and post_attn; without gradients
    forward     the same, with gradients
    training    forward as above, and its backward
    bare        only the all-to-alls of the same bytes (2, 2 and 4 of them), with splits, on tensors that are reused
    work        the call's time less that of `bare`

Where --published names a checkout of the published implementation (it imports einops), its own class is measured too,
with the CPU as its device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from driver import NUM_RANKS, bare_all_to_all, on_ranks, parser_of, published_module, write_results

NUM_SEQUENCES, MAX_TOKENS, HEADS, WIDTH = 300, 12, 2, 8
# Upper limit, in microseconds, of the `work` of `forward` for one call of balancer.attention.
LIMIT_US = 60


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=25, help="in a round")
    parser.add_argument("--published", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with status 1 where the limit is passed")
    args = parser.parse_args()
    rows = on_ranks(run_rank, args)
    print(f"{'us':24} {'in all':>8} {'quartiles':>13} {'bare':>6} {'work':>6}")
    for name, row in rows.items():
        for kind in KINDS:
            us, bare, (low, _, high) = row[f"{kind}_us"], row[f"{kind}_bare_us"], row[f"{kind}_us_quartiles"]
            print(f"{name + ' ' + kind:24} {us:8.0f} {low:6.0f} {high:6.0f} {bare:6.0f} {row[f'{kind}_work_us']:6.0f}")
    if args.json:
        configuration = {
            "num_ranks": NUM_RANKS,
            "num_sequences": NUM_SEQUENCES,
            "max_tokens": MAX_TOKENS,
            "heads": HEADS,
            "head_dim": 1,
            "dtype": "float32",
            "backend": "gloo",
            "rounds": args.rounds,
            "calls": args.calls,
        }
        write_results(args.json, "host", configuration, limit_us=LIMIT_US, implementations=rows)
    if args.check and rows["attention()"]["forward_work_us"] > LIMIT_US:
        sys.exit(1)


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    rng = random.Random(dist.get_rank())
    lens = [rng.randint(1, MAX_TOKENS) for _ in range(NUM_SEQUENCES // NUM_RANKS)]
    balancers = {"attention()": ours, "pre, post": ours}
    if args.published:
        balancers["published"] = lambda: published(args.published)
    calls: dict[str, Callable[[], Any]] = {}
    for name, make in balancers.items():
        calls |= {f"{name} {kind}": call for kind, call in calls_of(make(), lens, name == "attention()").items()}
    seconds = measure(calls, args.rounds, args.calls)
    results: dict[str, Any] = {}
    for name in balancers:
        row = results[name] = {}
        for kind in KINDS:
            us, bare = ([value * 1e6 for value in seconds[f"{name} {kind}{what}"]] for what in ("", " bare"))
            row[f"{kind}_us"] = statistics.median(us)
            row[f"{kind}_us_quartiles"] = statistics.quantiles(us, n=4)
            row[f"{kind}_bare_us"] = statistics.median(bare)
            row[f"{kind}_work_us"] = statistics.median(us) - statistics.median(bare)
    return results


def ours() -> Any:
    from knapformer import SequenceBalancer

    return SequenceBalancer("g2n1", solver="greedy")


def published(checkout: Path) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore", FutureWarning)
    module = published_module(checkout)
    mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")).start()
    module.init_device_mesh = lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)  # type: ignore[attr-defined]
    return module.SequenceBalancer("g2n1")


KINDS = ("inference", "forward", "training")


def calls_of(balancer: Any, lens: list[int], in_one: bool) -> dict[str, Callable[[], Any]]:
    """The calls to time: with pre_attn and post_attn, which both implementations have, or (in_one) with
    balancer.attention."""
    import torch

    balancer.plan_routing(lens, WIDTH)
    _, x, _ = balancer.route(torch.ones(sum(lens), WIDTH), [torch.ones(sum(lens), 1)])
    q, k, v = (torch.ones(x.shape[0], HEADS, 1) for _ in range(3))
    needs_grad = q.clone().requires_grad_()
    with torch.no_grad():
        attention_tokens = balancer.pre_attn(q, k, v)[1].shape[0]

    ones = torch.ones(x.shape[0], HEADS, 1)

    def forward() -> torch.Tensor:
        if in_one:
            whole: torch.Tensor = balancer.attention(needs_grad, k, v, lambda q, *_: q)
            return whole
        _, attended, _, _ = balancer.pre_attn(needs_grad, k, v)
        out: torch.Tensor = balancer.post_attn(attended)[1]
        return out

    def inference() -> None:
        with torch.no_grad():
            forward()

    def training() -> None:
        needs_grad.grad = None
        forward().backward(ones)

    # Sent: this rank's rows, with the peer's heads; received: the peer's rows, with this rank's heads. q, k, v: thrice.
    sent, received = x.shape[0], attention_tokens - x.shape[0]
    there, back = with_peer(3 * sent, 3 * received), with_peer(received, sent)
    there_of_one, back_of_one = with_peer(sent, received), with_peer(received, sent)

    def bare() -> None:
        there()
        back()

    def training_bare() -> None:
        bare()
        there_of_one()  # backward of post_attn, and of q in pre_attn
        back_of_one()

    return {
        "inference": inference,
        "inference bare": bare,
        "forward": forward,
        "forward bare": bare,
        "training": training,
        "training bare": training_bare,
    }


def with_peer(sent: int, received: int) -> Callable[[], Any]:
    """The bare all-to-all of `sent` float32 numbers to the other rank and `received` from it."""
    import torch.distributed as dist

    own = dist.get_rank()
    return bare_all_to_all(*([0 if rank == own else n for rank in range(NUM_RANKS)] for n in (sent, received)))


def measure(calls: dict[str, Callable[[], Any]], rounds: int, per_round: int) -> dict[str, list[float]]:
    """Seconds of this thread's CPU time for one call, by round; the first round warms up."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begin = time.thread_time()
            for _ in range(per_round):
                call()
            elapsed = time.thread_time() - begin
            if number > 0:
                seconds[name].append(elapsed / per_round)
    return seconds


if __name__ == "__main__":
    main()
