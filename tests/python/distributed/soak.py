"""Runs steps over hours: what a process holds must not grow, and every result must equal that of a rank alone.

    PYTHONPATH=python:tests/python:tests/python/distributed python tests/python/distributed/soak.py --steps 100000

is `make soak`; test_soak.py runs a few seconds of it. Each round makes a new balancer, flat and nested in turn. Each
rank's lengths are random; every second round plans ahead in a loader, which stops in the middle and is resumed from its
state by another loader. Each step observes seconds in proportion to its planned work. Each rank prints its figures on
the way; the exit status is 1 where the number of threads, open files or keys of the store grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from balancer_checks import causal_free_attention
from ranks import run_ranks

from knapformer import BalancedLoader, SequenceBalancer

TOPOLOGIES = {2: ("g2n1", "g2/1n1", "g1n2"), 4: ("g2n2", "g4/2/1n1", "g4n1")}
STEPS_OF_ROUND = 50
HEADS, HEAD_DIM = 4, 2
WIDTH = HEADS * HEAD_DIM


class Held(NamedTuple):
    """What one rank holds between two rounds."""

    step: int
    resident_kib: int
    threads: int
    files: int
    store_keys: int
    step_ms: float  # the median of a round's steps


def _random_lengths(seed: int, rank: int, step: int) -> list[int]:
    numbers = random.Random(f"{seed} {rank} {step}")
    return [int(2 ** numbers.uniform(0, 6)) for _ in range(numbers.randrange(5))]


def _check_step(balancer: SequenceBalancer, lens: list[int], seed: int) -> None:
    """Compares attention over routed tokens with attention over this rank's own sequences: output and gradient."""
    x = torch.randn(sum(lens), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    both = []
    for moves in (True, False):
        own = x.clone().requires_grad_()
        q = (balancer.route(own)[1] if moves else own).unflatten(1, (HEADS, HEAD_DIM))
        if moves:
            o = balancer.reverse_route(balancer.attention(q, 2 * q, q, causal_free_attention).flatten(1))[1]
        else:
            o = causal_free_attention(q, 2 * q, q, torch.tensor(lens)).flatten(1)
        o.square().sum().backward()
        both.append((o.detach(), own.grad))
    for moved, alone in zip(*both, strict=True):
        torch.testing.assert_close(moved, alone, rtol=1e-9, atol=1e-9)


def _plans_of_round(balancer: SequenceBalancer, rank: int, first: int, seed: int) -> Iterator[list[int]]:
    """The lengths of each step, once `balancer` holds their plan."""
    steps = range(first, first + STEPS_OF_ROUND)
    if (first // STEPS_OF_ROUND) % 2 == 0:
        for step in steps:
            lens = _random_lengths(seed, rank, step)
            balancer.plan_routing(lens, WIDTH)
            yield lens
        return
    data = [{"seq_lens": _random_lengths(seed, rank, step)} for step in steps]
    loader, state = BalancedLoader(data, balancer, seq_lens=itemgetter("seq_lens"), empty=lambda: {"seq_lens": []}), {}  # type: ignore[var-annotated]
    for i, (batch, _) in enumerate(loader):
        yield batch["seq_lens"]
        if i == STEPS_OF_ROUND // 2:
            state = loader.state_dict()
            break
    loader = BalancedLoader(data, balancer, seq_lens=itemgetter("seq_lens"), empty=lambda: {"seq_lens": []})
    loader.load_state_dict(state)
    for batch, _ in loader:
        yield batch["seq_lens"]


def _held(step: int, seconds: list[float]) -> Held:
    gc.collect()
    with open("/proc/self/statm") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    dist.barrier()  # other ranks have dropped their balancers, too
    keys = dist.group.WORLD.get_group_store().num_keys()  # type: ignore[union-attr]
    dist.barrier()
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return Held(step, resident, threads, files, keys, sorted(seconds)[len(seconds) // 2] * 1e3)


def soak(rank: int, world_size: int, num_steps: int, seed: int, seconds: float, every: int) -> list[Held]:
    """A rank's figures after each round."""
    torch.set_num_threads(1)
    end, held = time.monotonic() + seconds, []
    for first in range(0, num_steps, STEPS_OF_ROUND):
        topology = TOPOLOGIES[world_size][first // STEPS_OF_ROUND % 3]
        balancer = SequenceBalancer(topology, effort="low", d_model=WIDTH)
        times, start = [], time.perf_counter()
        for step, lens in enumerate(_plans_of_round(balancer, rank, first, seed), first):
            _check_step(balancer, lens, step)
            balancer.observe(1e-12 * (1 + balancer.plan.workload_after[rank]))
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        assert len(times) == STEPS_OF_ROUND
        del balancer
        held.append(_held(first + STEPS_OF_ROUND, times))
        if every and held[-1].step % every == 0:
            print(f"rank {rank}: {held[-1]}", flush=True)
        late = torch.tensor([float(time.monotonic() > end)])
        dist.broadcast(late, 0)
        if late:
            break
    return held


def growth(held: list[Held]) -> dict[str, float]:
    """How much medians grew from the first to the last third. Each third has every topology and way of planning."""

    def median(rows: list[Held], name: str) -> float:
        return sorted(getattr(row, name) for row in rows)[len(rows) // 2]

    third = len(held) // 3
    return {
        name: median(held[-third:], name) - median(held[:third], name)
        for name in ("resident_kib", "threads", "files", "store_keys", "step_ms")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=sorted(TOPOLOGIES), default=2)
    parser.add_argument("--steps", type=int, default=100_000, help="default 100,000")
    parser.add_argument("--seconds", type=float, default=1e6, help="ends after so many")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    runs: list[list[Any]] = run_ranks(
        soak, args.ranks, args.steps, args.seed, args.seconds, 1000, timeout_s=args.seconds + 600
    )
    grew = False
    for rank, held in enumerate(runs):
        growths = growth(held)
        grew |= any(growths[name] > 0 for name in ("threads", "files", "store_keys"))
        print(f"rank {rank}: {held[-1]}; {growths} between the first and the last third")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
