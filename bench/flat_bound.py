"""How even flat bags can be at best: compares plans of workload A on g4n8 with a proven bound.

    python bench/flat_bound.py [--seeds 20]      (needs `pip install highspy`)
    python bench/flat_bound.py --batches 50      how much depends on the draws
    python bench/flat_bound.py --batches 1000 --like 1.014      only batches in which greedy's mean is 1.014

The bound: long sequences have to be packed whole into the 8 bags; short ones may be divided freely. A highest work of T
times the mean is ruled out where an integer program, which covers the long sequences by sets that fill a bag, proves
that they do not fit into 8 bags of at most T. A T that it does not rule out within its time limit is not claimed.

How even a draw can be made varies much. With --batches the seeds are taken 20 at a time; for each batch the means of
greedy and balanced are printed, in the order of greedy's. --like keeps the batches with that mean of greedy, to 0.0005.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator

import highspy
from bench_solvers import D_MODEL, WORKLOADS, Workload, work

import knapformer

NUM_BAGS = 8
LONG_TOKENS = 10_000
BATCH = 20
WORKLOAD: Workload = next(w for w in WORKLOADS if w.name == "A")
FREE = knapformer.Cluster(node_bytes_per_s=math.inf, network_bytes_per_s=math.inf)


def fillings(items: list[float], capacity: float) -> Iterator[tuple[int, ...]]:
    """Sets of items (given in descending order), by index, that fit and to which no further item can be added."""
    chosen: list[int] = []

    def extend(first: int, left: float) -> Iterator[tuple[int, ...]]:
        for i in range(first, len(items)):
            if items[i] <= left:
                chosen.append(i)
                yield from extend(i + 1, left - items[i])
                chosen.pop()
        taken = set(chosen)
        if all(i in taken or items[i] > left for i in range(len(items))):
            yield tuple(chosen)

    yield from extend(0, capacity)


def cannot_be_packed(items: list[float], capacity: float, seconds: float) -> bool:
    """Whether this is proven. False: the items can be packed, or nothing was proven in time."""
    if items[0] > capacity:
        return True
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", seconds)
    bags_with: list[list[highspy.highs.highs_var]] = [[] for _ in items]
    bags = []
    for filling in fillings(items, capacity):
        bags.append(highs.addBinary())
        for i in filling:
            bags_with[i].append(bags[-1])
    for choices in bags_with:
        highs.addConstr(highs.qsum(choices) >= 1)
    highs.addConstr(highs.qsum(bags) <= NUM_BAGS)
    highs.run()
    return highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible


def bound(lengths: list[int], reached: float, seconds: float) -> float:
    """A lower bound, for all plans, of the highest work of a bag over the mean. `reached`: what some plan reaches."""
    mean = sum(work(length, 1.0) for length in lengths) / NUM_BAGS
    long = sorted((work(length, 1.0) for length in lengths if length > LONG_TOKENS), reverse=True)
    proven = 1.0
    for part in (0.03, 0.1, 0.3, 0.6, 0.8, 0.999):
        share = 1 + (reached - 1) * part
        if not cannot_be_packed(long, share * mean, seconds):
            break
        proven = share
    return proven


def max_over_mean(seed: int, solver: str) -> float:
    """Work of the fullest rank, over the mean."""
    plan = knapformer.plan(WORKLOAD.lengths(seed), "g4n8", d_model=D_MODEL, solver=solver, effort="high", cluster=FREE)
    return plan.max_over_mean_after


def print_batches(num_batches: int, like: float | None) -> None:
    def mean(first: int, solver: str) -> float:
        return statistics.fmean(max_over_mean(seed, solver) for seed in range(first, first + BATCH))

    batches = []
    for first in range(0, num_batches * BATCH, BATCH):
        greedy = mean(first, "greedy")
        if like is None or abs(greedy - like) <= 0.0005:
            batches.append((greedy, mean(first, "balanced"), first))
    for greedy, balanced, first in sorted(batches):
        print(f"seeds {first} to {first + BATCH - 1}: greedy {greedy:.4f}, balanced {balanced:.4f}")
    if batches:
        means = (statistics.fmean(column) for column in list(zip(*batches, strict=True))[:2])
        print("mean of {} batches: greedy {:.4f}, balanced {:.4f}".format(len(batches), *means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30, help="limit of each integer program")
    parser.add_argument("--batches", type=int, default=0, help="of 20 seeds; without bounds")
    parser.add_argument("--like", type=float, help="with --batches: greedy's mean of a batch")
    args = parser.parse_args()
    if args.batches > 0:
        print_batches(args.batches, args.like)
        return
    rows = []
    for seed in range(args.seeds):
        greedy, balanced = max_over_mean(seed, "greedy"), max_over_mean(seed, "balanced")
        proven = bound([length for lens in WORKLOAD.lengths(seed) for length in lens], balanced, args.seconds)
        rows.append((greedy, balanced, proven))
        print(f"seed {seed}: greedy {greedy:.4f}, balanced {balanced:.4f}, bound {proven:.4f}", flush=True)
    means = (statistics.fmean(column) for column in zip(*rows, strict=True))
    print("mean: greedy {:.4f}, balanced {:.4f}, bound {:.4f}".format(*means))


if __name__ == "__main__":
    main()
