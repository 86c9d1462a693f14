"""Predicted steps of nested bags, compared with those of each flat topology that they contain, on several networks.

    python bench/bench_networks.py --json build/bench/networks.json

The lengths are those of bench_solvers.py; the cluster is the default one, except for its two bandwidths. Prints the
mean step, and the largest ratio, over the seeds, of the nested plan's step to that of the best flat plan. Both are
planned by the default solver; the ratio is at most 1.
"""

from __future__ import annotations

import statistics

from bench_solvers import D_MODEL, WORKLOADS
from driver import parser_of, write_results

import knapformer

NETWORKS_GB_PER_S = ((200, 25), (25, 25), (900, 50))  # inside a node, between nodes


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="of workloads of at most 64 ranks; others have one")
    args = parser.parse_args()
    rows = []
    for workload in WORKLOADS:
        for node, network in NETWORKS_GB_PER_S:
            cluster = knapformer.Cluster(node_bytes_per_s=node * 1e9, network_bytes_per_s=network * 1e9)
            nested, flat, gaps = [], [], []
            for seed in range(args.seeds if workload.num_ranks <= 64 else 1):
                lengths = workload.lengths(seed)

                def plan(bag: str, size: int) -> knapformer.Plan:
                    topology = f"g{bag}n{workload.num_ranks // size}"  # noqa: B023
                    return knapformer.plan(lengths, topology, d_model=D_MODEL, gamma=workload.gamma, cluster=cluster)  # noqa: B023

                best = plan("8/4/2/1", 8)
                nested.append(best.predicted_time)
                gaps.append(best.gap)
                flat.append(min(plan(str(size), size).predicted_time for size in (1, 2, 4, 8)))
            row = {
                "workload": workload.name,
                "gamma": workload.gamma,
                "node_gb_per_s": node,
                "network_gb_per_s": network,
                "nested_s": statistics.fmean(nested),
                "best_flat_s": statistics.fmean(flat),
                "max_ratio": max(a / b for a, b in zip(nested, flat, strict=True)),
                "gap": statistics.fmean(gaps),
            }
            rows.append(row)
            print(
                f"| {workload.name} | {workload.gamma} | {node}/{network} | {row['nested_s']:.3f} | "
                f"{row['best_flat_s']:.3f} | {row['max_ratio']:.4f} | {row['gap']:.1%} |",
                flush=True,
            )
    if args.json:
        write_results(args.json, "networks", {"d_model": D_MODEL}, rows=rows)


if __name__ == "__main__":
    main()
