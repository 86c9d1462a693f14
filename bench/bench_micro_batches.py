"""How good plans of whole optimizer steps are: time over ideal, tokens exchanged, and planning time.

    python bench/bench_micro_batches.py --json build/bench/micro_batches.json
    python bench/bench_micro_batches.py --network 25e9 --sync step

A step is K consecutive batches of a mix over 32 ranks, in bags g8/4/2/1. Times are of one block's forward pass on a
cluster of round figures, 400 TFLOP/s, 200 GB/s inside a node and 25 GB/s between nodes, with no other cost; means over
the seeds. They are recomputed here from the chunks alone:

    time      sum over micro-batches of the slowest group's time, over (work / ranks / rate). A group of ranks that
              share sequences takes its longest per-token phase plus its longest attention phase, exchange included.
    bound     the planner's lower bound, over the same ideal time
    given     `time` where each rank's list is cut into K parts in its order, and each part is planned by itself
    exchanged fraction of the tokens that leave their rank in each all-to-all of attention
    tokens    the most of any rank in any micro-batch, over the mean of a rank and micro-batch
    ms        time to plan
"""

from __future__ import annotations

import statistics
import time

from driver import parser_of, write_results

import knapformer

D_MODEL, NUM_RANKS, TOPOLOGY, FLOPS_PER_S, ELEMENT_SIZE = 3072, 32, "g8/4/2/1n4", 400e12, 2
MODEL = knapformer.TrainedModel(mode="inference", num_parameters=0, element_size=ELEMENT_SIZE)
Lengths = list[list[int]]


def cluster_of(node_bytes_per_s: float) -> knapformer.Cluster:
    return knapformer.Cluster(
        flops_per_s=FLOPS_PER_S, node_bytes_per_s=node_bytes_per_s, network_bytes_per_s=25e9, ranks_per_node=8,
        node_latency_s=0, network_latency_s=0, fixed_s=0, overlaps_attention=False,
    )  # fmt: skip


def step_of(mix: str, seed: int, num_micro_batches: int) -> Lengths:
    batches = [knapformer.DataMix.parse(mix).draw_lengths(seed, k, NUM_RANKS) for k in range(num_micro_batches)]
    return [[length for batch in batches for length in batch[rank]] for rank in range(NUM_RANKS)]


def parts_as_given(step: Lengths, num_micro_batches: int) -> list[Lengths]:
    parts: list[Lengths] = [[] for _ in range(num_micro_batches)]
    for lens in step:
        share, extra = divmod(len(lens), num_micro_batches)
        first = 0
        for k, part in enumerate(parts):
            last = first + share + (k < extra)
            part.append(lens[first:last])
            first = last
    return parts


def ideal_s(step: Lengths, gamma: float) -> float:
    works = (24 * n * D_MODEL**2 + gamma * 4 * n * n * D_MODEL for lens in step for n in lens)
    return sum(works) / NUM_RANKS / FLOPS_PER_S


def block_s(plan: knapformer.Plan, gamma: float, node_bytes_per_s: float) -> float:
    """Seconds of the slowest group, computed from the chunks."""
    token, attention = [0.0] * NUM_RANKS, [0.0] * NUM_RANKS
    leader = list(range(NUM_RANKS))
    lens = [length for per_rank in plan.seq_lens for length in per_rank]
    for sequence, rank, _, tokens in plan.chunks:
        degree, first = plan.degree_of_sequence[sequence], plan.first_rank_of_sequence[sequence]
        token[rank] += 24 * tokens * D_MODEL**2 / FLOPS_PER_S
        attention[rank] += gamma * 4 * lens[sequence] ** 2 * D_MODEL / degree / FLOPS_PER_S
        attention[rank] += 4 * tokens * D_MODEL * ELEMENT_SIZE * (degree - 1) / degree / node_bytes_per_s
        joined = leader[rank]
        leader = [leader[first] if other == joined else other for other in leader]
    groups: dict[int, list[int]] = {}
    for rank, group in enumerate(leader):
        groups.setdefault(group, []).append(rank)
    return max(max(token[r] for r in g) + max(attention[r] for r in g) for g in groups.values())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[2, 3, 4, 8])
    parser.add_argument("--effort", default="default")
    parser.add_argument("--network", type=float, default=200e9, metavar="BYTES_PER_S", help="inside a node")
    parser.add_argument("--sync", default="micro_batch")
    args = parser.parse_args()
    cluster = cluster_of(args.network)
    rows = []
    print("| mix | gamma | K | time | bound | given | exchanged | tokens | ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for mix in ("mixed", "joint"):
        for gamma in (0.41, 1.0):
            for k in args.micro_batches:
                figures: list[tuple[float, ...]] = []
                for seed in range(args.seeds):
                    step = step_of(mix, seed, k)
                    start = time.perf_counter()
                    plan = knapformer.plan(
                        step, TOPOLOGY, d_model=D_MODEL, gamma=gamma, effort=args.effort, cluster=cluster, model=MODEL,
                        micro_batches=k, sync=args.sync,
                    )  # fmt: skip
                    elapsed_s = time.perf_counter() - start
                    ideal = ideal_s(step, gamma)
                    given = [
                        knapformer.plan(
                            part, TOPOLOGY, d_model=D_MODEL, gamma=gamma, effort="low", cluster=cluster, model=MODEL
                        )
                        for part in parts_as_given(step, k)
                    ]
                    figures.append((
                        sum(block_s(part, gamma, args.network) for part in plan.plans) / ideal,
                        plan.lower_bound / MODEL.num_blocks / ideal,
                        sum(block_s(part, gamma, args.network) for part in given) / ideal,
                        plan.exchanged_fraction,
                        plan.max_tokens * NUM_RANKS * k / plan.num_tokens,
                        elapsed_s * 1e3,
                    ))  # fmt: skip
                names = ("time", "bound", "given", "exchanged", "tokens", "ms")
                means = dict(zip(names, map(statistics.fmean, zip(*figures, strict=True)), strict=True))
                rows.append({"mix": mix, "gamma": gamma, "micro_batches": k, **means})
                print(
                    f"| {mix} | {gamma} | {k} | {means['time']:.4f} | {means['bound']:.4f} | {means['given']:.3f} "
                    f"| {means['exchanged']:.4f} | {means['tokens']:.1f} | {means['ms']:.2g} |",
                    flush=True,
                )
    if args.json:
        configuration = {"topology": TOPOLOGY, "d_model": D_MODEL, "seeds": args.seeds, "effort": args.effort,
                         "node_bytes_per_s": args.network, "sync": args.sync}  # fmt: skip
        write_results(args.json, "micro_batches", configuration, rows=rows)


if __name__ == "__main__":
    main()
