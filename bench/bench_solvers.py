"""Compares the balanced solver with other planners: in one run, on the same lengths, by the same measures.

    python bench/bench_solvers.py --json build/bench/solvers.json
    python bench/bench_solvers.py --workloads B --seeds 1 --milp-seconds 30 --published ~/KnapFormer

Every planner's result is reduced to the ranks and chunk lengths of each sequence, and measured by this file alone:

    eff       slowest group's predicted time of one block over (total work / ranks / rate). A group of ranks that share
              sequences takes its longest per-token phase plus its longest attention phase, exchange included.
    exchanged fraction of the tokens that are exchanged in attention.

Peers:

    published     the published implementation's planner, where --published names a checkout of it: its own
                  plan_routing, with the lengths put in place of what it gathers over a process group.
    greedy        the same method in this project, on flat topologies; in bags of one rank it is "longest first".
    karmarkar-karp  the largest differencing method over ranks, as used for balancing sequences in RL training. Shares
                  no sequence: one that exceeds the mean stays whole.
    milp          groups of ranks and sequences assigned to them by a mixed-integer program with a time limit, in
                  FlexSP's formulation (disjoint groups, every sequence of a group shared by all of it, lengths in
                  buckets), solved by HiGHS: milp_planner.py, which needs `pip install highspy==1.15.1`.
    balanced      this project: low, default and high effort.
"""

from __future__ import annotations

import argparse
import heapq
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver import module_at, parser_of, write_results

import knapformer

Lengths = list[list[int]]
FLOPS_PER_S, NODE_BYTES_PER_S, NETWORK_BYTES_PER_S, ELEMENT_SIZE, RANKS_PER_NODE = 400e12, 200e9, 25e9, 2, 8
D_MODEL = 3072
# A block's forward pass and nothing else, as `measure` counts it.
CLUSTER = knapformer.Cluster(
    flops_per_s=FLOPS_PER_S, node_bytes_per_s=NODE_BYTES_PER_S, network_bytes_per_s=NETWORK_BYTES_PER_S,
    ranks_per_node=RANKS_PER_NODE, node_latency_s=0, network_latency_s=0, fixed_s=0, overlaps_attention=False,
)  # fmt: skip
MODEL = knapformer.TrainedModel(mode="inference", num_parameters=0, element_size=ELEMENT_SIZE)


@dataclass(frozen=True)
class Share:
    """Where one sequence goes: consecutive ranks from `first_rank`, one chunk length for each."""

    first_rank: int
    chunk_lens: tuple[int, ...]


Shares = list[Share]  # by sequence, those of rank 0 first


@dataclass(frozen=True)
class Workload:
    name: str
    gamma: float
    num_ranks: int

    def lengths(self, seed: int) -> Lengths:
        if self.name in ("A", "B"):
            rng = random.Random(seed)
            lens = [256, 1024, 4096, 16384, 25600]
            count = 2 if self.name == "A" else 4
            return [
                [int(rng.choice(lens) * rng.uniform(0.96, 1.04)) + rng.randint(0, 392) for _ in range(count)]
                for _ in range(self.num_ranks)
            ]
        return knapformer.DataMix.parse(self.name).draw_lengths(seed, 0, self.num_ranks)


WORKLOADS = [
    Workload("mixed", 0.41, 32),
    Workload("mixed", 1.0, 32),
    Workload("joint", 0.41, 32),
    Workload("joint", 1.0, 32),
    Workload("low", 1.0, 32),
    Workload("A", 1.0, 32),
    Workload("B", 1.0, 1024),
]


def attention_flops(length: int, gamma: float) -> float:
    return gamma * 4 * length * length * D_MODEL


def work(length: int, gamma: float) -> float:
    return 24 * length * D_MODEL**2 + attention_flops(length, gamma)


def exchange_s(tokens: float, degree: int, in_node: bool) -> float:
    if degree == 1:
        return 0.0
    bandwidth = NODE_BYTES_PER_S if in_node else NETWORK_BYTES_PER_S
    return 4 * tokens * D_MODEL * ELEMENT_SIZE * (degree - 1) / degree / bandwidth


def measure(seq_lens: Lengths, shares: Shares, gamma: float) -> dict[str, float]:
    """Computes all figures from the shares, and takes none from a planner."""
    num_ranks = len(seq_lens)
    token, attention = [0.0] * num_ranks, [0.0] * num_ranks
    leader = list(range(num_ranks))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    flat = [length for lens in seq_lens for length in lens]
    exchanged = 0.0
    for length, share in zip(flat, shares, strict=True):
        degree, first = len(share.chunk_lens), share.first_rank
        assert sum(share.chunk_lens) == length and min(share.chunk_lens) >= 0
        exchanged += length * (degree - 1) / degree
        in_node = first // RANKS_PER_NODE == (first + degree - 1) // RANKS_PER_NODE
        for rank, n in enumerate(share.chunk_lens, start=first):
            token[rank] += 24 * n * D_MODEL**2 / FLOPS_PER_S
            attention[rank] += attention_flops(length, gamma) / degree / FLOPS_PER_S + exchange_s(n, degree, in_node)
            leader[find(rank)] = find(first)
    groups: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        groups.setdefault(find(rank), []).append(rank)
    slowest = max(max(token[r] for r in g) + max(attention[r] for r in g) for g in groups.values())
    ideal = sum(work(length, gamma) for length in flat) / num_ranks / FLOPS_PER_S
    return {"eff": slowest / ideal, "exchanged": exchanged / sum(flat)}


def even(first_rank: int, degree: int, length: int) -> Share:
    share, extra = divmod(length, degree)
    return Share(first_rank, tuple(share + (i < extra) for i in range(degree)))


def of_plan(plan: knapformer.Plan) -> Shares:
    chunks: list[list[int]] = [[] for _ in range(plan.num_sequences)]
    for sequence, _, _, tokens in plan.chunks:
        chunks[sequence].append(tokens)
    return [Share(first, tuple(lens)) for first, lens in zip(plan.first_rank_of_sequence, chunks, strict=True)]


# --- planners: lengths, gamma -> shares


def karmarkar_karp(seq_lens: Lengths, gamma: float) -> Shares:
    """The largest differencing method for k sets: states are k partial sets by descending sum; the two states with the
    largest spread are joined, the largest set of one with the smallest of the other."""
    num_ranks = len(seq_lens)
    flat = [length for lens in seq_lens for length in lens]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, length in enumerate(flat):
        state = [(work(length, gamma), [i])] + [(0.0, []) for _ in range(num_ranks - 1)]
        heap.append((-state[0][0], i, state))
    heapq.heapify(heap)
    tie = len(flat)
    while len(heap) > 1:
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda item: -item[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
        tie += 1
    shares: list[Share | None] = [None] * len(flat)
    for rank, (_, members) in enumerate(heap[0][2]):
        for i in members:
            shares[i] = Share(rank, (flat[i],))
    return [share for share in shares if share is not None]


def milp(seq_lens: Lengths, gamma: float, seconds: float) -> Shares:
    import numpy as np
    from milp_planner import plan

    flat = [length for lens in seq_lens for length in lens]
    mean = sum(work(length, gamma) for length in flat) / len(seq_lens)

    def cost(sequence: int, size: int) -> float:
        length = flat[sequence]
        return (work(length, gamma) / size + exchange_s(length / size, size, True) * FLOPS_PER_S) / mean

    places = plan(np.array([work(length, gamma) for length in flat]), cost, len(seq_lens), seconds)
    return [even(first, size, length) for (first, size), length in zip(places, flat, strict=True)]


class PublishedPlanner:
    """The published implementation's plan_routing, without its process group and device."""

    def __init__(self, checkout: Path) -> None:
        self.module = module_at(checkout / "knapformer/sequence_balancer.py", "einops")
        self.module.UlyssesBag = lambda *_: None  # plan_routing makes it last, and it only moves data

    def __call__(self, seq_lens: Lengths, gamma: float, topology: str) -> Shares:
        (size, count) = (int(n) for n in re.fullmatch(r"g(\d+)n(\d+)", topology).groups())  # type: ignore[union-attr]
        published = object.__new__(self.module.SequenceBalancer)
        published.gamma, published.this_gpu_id, published.metrics = gamma, 0, {}
        published.balance_gpu_ids = list(range(size * count))
        published.bag_gpu_options, published.bag_gpu_options2bag_ids = [size], {size: list(range(count))}
        published.bag_id2gpu_ids = {bag: list(range(bag * size, (bag + 1) * size)) for bag in range(count)}
        published.gpu_id2bag_id = {gpu: gpu // size for gpu in published.balance_gpu_ids}
        published.bag_id2process_group = dict.fromkeys(range(count))

        def lengths_in_place(*_: Any) -> None:
            published.seq_id2gpu_id, published.seq_id2seq_len, published.seq_id2seq_workload = {}, {}, {}
            published.gpu_id2total_workload = {}
            sequence = 0
            for gpu, lens in enumerate(seq_lens):
                published.gpu_id2total_workload[gpu] = 0.0
                for length in lens:
                    load = self.module.workload_estimator(length, D_MODEL, gamma)
                    published.seq_id2gpu_id[sequence] = gpu
                    published.seq_id2seq_len[sequence] = length
                    published.seq_id2seq_workload[sequence] = load
                    published.gpu_id2total_workload[gpu] += load
                    sequence += 1

        published._gather_workloads = lengths_in_place
        published.plan_routing([], D_MODEL)
        first_rank: dict[int, int] = {}
        lens_of: dict[int, list[int]] = {}
        for chunk in sorted(published.balance_chunk_id2gpu_id):
            sequence = published.chunk_id2seq_id[chunk]
            first_rank.setdefault(sequence, published.balance_chunk_id2gpu_id[chunk])
            lens_of.setdefault(sequence, []).append(published.chunk_id2chunk_len[chunk])
        return [Share(first_rank[s], tuple(lens_of[s])) for s in sorted(first_rank)]


def run_seed(
    workload: Workload, seed: int, args: argparse.Namespace, published: PublishedPlanner | None
) -> dict[str, dict[str, float]]:
    ranks, gamma = workload.num_ranks, workload.gamma
    seq_lens = workload.lengths(seed)

    def plan_of(topology: str, **how: str) -> Shares:
        settings: Any = {"d_model": D_MODEL, "gamma": gamma, "cluster": CLUSTER, "model": MODEL, **how}
        return of_plan(knapformer.plan(seq_lens, topology, **settings))

    made: dict[str, Shares] = {}
    for size in (1, 2, 4, 8):
        topology = f"g{size}n{ranks // size}"
        made[f"greedy g{size}"] = plan_of(topology, solver="greedy")
        if published is not None and size in (4, 8):
            made[f"published g{size}"] = published(seq_lens, gamma, topology)
    made["karmarkar-karp"] = karmarkar_karp(seq_lens, gamma)
    if args.milp_seconds > 0 and seed < args.milp_seeds:
        made["milp"] = milp(seq_lens, gamma, args.milp_seconds)
    for effort in ("low", "default", "high"):
        made[f"balanced {effort}"] = plan_of(f"g8/4/2/1n{ranks // 8}", effort=effort)
    return {name: measure(seq_lens, shares, gamma) for name, shares in made.items()}


def run_workload(
    workload: Workload, args: argparse.Namespace, published: PublishedPlanner | None
) -> list[dict[str, Any]]:
    seeds = args.seeds if workload.num_ranks <= 64 else min(args.seeds, args.large_seeds)
    by_seed = [run_seed(workload, seed, args, published) for seed in range(seeds)]
    rows = []
    for name in by_seed[0]:
        values = [results[name] for results in by_seed if name in results]
        row = {"workload": workload.name, "gamma": workload.gamma, "planner": name, "seeds": len(values)}
        rows.append(row | {key: statistics.fmean(value[key] for value in values) for key in values[0]})
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """eff and exchanged by planner and workload; with the best topology where a planner has to be given one."""
    its: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        its.setdefault((re.sub(r" g\d$", "", row["planner"]), f"{row['workload']} {row['gamma']}"), []).append(row)
    planners, workloads = (list(dict.fromkeys(names)) for names in zip(*its, strict=True))
    lines = [["eff, exchanged", *workloads], ["---"] * (len(workloads) + 1)]
    for planner in planners:
        of_each = (its.get((planner, workload)) for workload in workloads)
        best = (rows and min(rows, key=lambda row: row["eff"]) for rows in of_each)
        lines.append([planner, *("{eff:.3f}, {exchanged:.2f}".format(**row) if row else "-" for row in best)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=["mixed", "joint", "low", "A", "B"])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--large-seeds", type=int, default=1, help="seeds of workloads above 64 ranks")
    parser.add_argument("--milp-seconds", type=float, default=10, help="time limit of each program; 0: none")
    parser.add_argument("--milp-seeds", type=int, default=1)
    parser.add_argument("--published", type=Path, help="a checkout of the published implementation")
    args = parser.parse_args()
    published = PublishedPlanner(args.published) if args.published else None
    rows = []
    for workload in WORKLOADS:
        if workload.name in args.workloads:
            rows += run_workload(workload, args, published)
    print(summary(rows))
    if args.json:
        configuration = {"d_model": D_MODEL, "cluster": str(CLUSTER), "milp_seconds": args.milp_seconds}
        write_results(args.json, "solvers", configuration, rows=rows)


if __name__ == "__main__":
    main()
