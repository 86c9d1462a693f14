"""Recomputes the paper's Table 1 and the table of its Figure 3, and writes them into docs/paper.md.

    python docs/paper.py             writes the tables
    python docs/paper.py --check     exits with 1 where the page is not what it would write

Of Table 1, WIR comes from plans of the paper's planner, FBL from the cost model, and TPS and HFU from the tokens and
FLOPs of the drawn lengths at the published FBL.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import cluster_model as model

from knapformer import Cluster, DataMix, Plan

PAGE = Path(__file__).with_name("paper.md")
PUBLISHED_WIR = {
    "low": (1.22, 1.00, 1.00, 1.00, 1.00),
    "mixed": (17.14, 3.92, 1.27, 1.01, 1.00),
    "joint": (28.11, 4.61, 1.62, 1.00, 1.00),
}
PUBLISHED_TPS = {  # thousands of tokens a second
    "low": (147.63, 156.48, 139.77, 131.63, 107.28),
    "mixed": (58.58, 58.95, 93.08, 103.74, 108.06),
    "joint": (45.88, 45.56, 78.40, 104.07, 107.54),
}
GAMMAS = (0.385, model.GAMMA, 0.49)
# Of Figure 3: tokens of a GPU and of all GPUs of the stream, in the mean.
FIGURE_3 = {
    "g8b4i256f1s0": (1808, 14464),
    "g2b5i512f1s0": (6100, 12200),
    "g2b5i1024f1s0": (21460, 42920),
    "g4b1i2048f1s0": (16580, 66320),
    "g1b10i256f4s0": (12200, 12200),
    "g3b1i512f4s0": (4292, 12876),
    "g8b2i256f85s1": (13192, 105536),
    "g4b1i512f85s1": (103184, 412736),
}


def wir(plans: list[Plan], gamma: float) -> float:
    return statistics.fmean(plan.on(gamma=gamma).wir_after for plan in plans)


def table_1() -> str:
    def cells() -> Iterator[tuple[str, ...]]:
        for i, row in enumerate(model.published_rows()):
            column = i % len(model.TOPOLOGIES)
            tokens = statistics.fmean(plan.num_tokens for plan in row.plans)
            predicted_s = model.mean_terms(row.plans, Cluster.published())["total_s"]
            pairs = (
                (PUBLISHED_WIR[row.mix][column], wir(row.plans, model.GAMMA)),
                (row.published_s, predicted_s),
                (PUBLISHED_TPS[row.mix][column], tokens / row.published_s / 1e3),
                (row.published_hfu, 100 * model.hfu(row.plans, row.published_s)),
            )
            yield f"{row.mix} {row.topology}", *(f"{published:.2f}/{ours:.2f}" for published, ours in pairs)

    return model.table(("row", "WIR", "FBL, s", "TPS, thousands", "HFU, %"), cells())


def gammas() -> str:
    """WIR where the planner plans and counts with each gamma."""
    columns = [(mix, i) for mix in ("mixed", "joint") for i in (0, 2)]  # the others change less

    def cells() -> Iterator[tuple[str, ...]]:
        yield "published", *(f"{PUBLISHED_WIR[mix][i]:.2f}" for mix, i in columns)
        for gamma in GAMMAS:
            plans = ((model.plans_of(mix, model.TOPOLOGIES[i], "greedy", gamma=gamma), gamma) for mix, i in columns)
            yield f"gamma {gamma}", *(f"{wir(*planned):.2f}" for planned in plans)

    return model.table(("WIR", *(f"{mix} {model.TOPOLOGIES[i]}" for mix, i in columns)), cells())


def figure_3() -> str:
    def cells() -> Iterator[tuple[str, ...]]:
        for code, (rank_tokens, tokens) in FIGURE_3.items():
            mix = DataMix.parse(code)
            mean = statistics.fmean(sum(map(sum, mix.draw_lengths(0, step, mix.num_ranks))) for step in range(200))
            yield code, f"{rank_tokens:,}/{mean / mix.num_ranks:,.0f}", f"{tokens:,}/{mean:,.0f}"

    return model.table(("data code", "tokens of a GPU", "of all its GPUs"), cells())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    tables = {"table 1": table_1, "gammas": gammas, "figure 3": figure_3}
    return model.write(PAGE, tables, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
