"""Fits the cluster model to the published table and writes the tables of docs/cluster_model.md.

    python docs/cluster_model.py             writes the tables, from the constants that are in the core
    python docs/cluster_model.py --check     exits with 1 where the page is not what it would write
    python docs/cluster_model.py --fit       fits the four constants anew and prints them (needs scipy)
    python docs/cluster_model.py --terms     prints what the prediction of each published row consists of, in seconds
    python docs/cluster_model.py --hold-out  fits them without the rows of each mix, and predicts these (needs scipy)

The fit minimises the largest relative error over the 15 rows: a linear program, since a step's time is linear in the
four (the inverse of the two rates, the host's cost of a piece, and the fixed time) as long as the slowest group stays
the same. Which group that is depends on them, so it is repeated until they settle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from knapformer.tools.ways import PEAK_TFLOPS, OptimizerStep, hfu_of

from knapformer import Cluster, DataMix, MicroBatchTime, Plan, plan, plan_home, predict_micro_batch

PAGE = Path(__file__).with_name("cluster_model.md")
NUM_RANKS, WIDTH, GAMMA, NUM_STEPS = 32, 3072, 0.41, 50
TOPOLOGIES = ("none", "g1n32", "g2n16", "g4n8", "g8n4")
# Forward and backward latency, seconds: the paper's Table 1.
PUBLISHED_S = {
    "low": (3.13, 2.95, 3.30, 3.51, 4.30),
    "mixed": (4.64, 4.62, 2.92, 2.62, 2.52),
    "joint": (8.05, 8.11, 4.71, 3.55, 3.44),
}
# Hardware FLOPs utilization there, percent.
PUBLISHED_HFU = {
    "low": (24.72, 26.20, 23.40, 22.04, 17.96),
    "mixed": (14.54, 14.63, 23.10, 25.74, 26.81),
    "joint": (12.69, 12.60, 21.68, 28.78, 29.74),
}
TERMS = ("token_s", "attention_s", "exchange_s", "route_s", "fsdp_s", "host_s", "fixed_s")


@dataclass(frozen=True)
class Row:
    mix: str
    topology: str
    published_s: float
    published_hfu: float  # percent
    plans: list[Plan]  # of each step


def plans_of(mix: str, topology: str, solver: str, num_steps: int = NUM_STEPS, gamma: float = GAMMA) -> list[Plan]:
    data = DataMix.parse(mix)
    plans = []
    for step in range(num_steps):
        seq_lens = data.draw_lengths(0, step, NUM_RANKS)
        text = f"g1n{NUM_RANKS}" if topology == "none" else topology
        flat = plan(seq_lens, text, d_model=WIDTH, gamma=gamma, solver=solver)
        plans.append(plan_home(flat) if topology == "none" else flat)
    return plans


def published_rows() -> list[Row]:
    return [
        Row(mix, topology, published_s, hfu, plans_of(mix, topology, "greedy"))
        for mix, times_s in PUBLISHED_S.items()
        for topology, published_s, hfu in zip(TOPOLOGIES, times_s, PUBLISHED_HFU[mix], strict=True)
    ]


def mean_terms(plans: list[Plan], cluster: Cluster) -> dict[str, float]:
    """Mean over the steps of each term, of their total, and of the ideal time, in seconds."""
    steps: list[MicroBatchTime] = [predict_micro_batch(p, cluster) for p in plans]
    return {name: statistics.fmean(getattr(s, name) for s in steps) for name in (*TERMS, "total_s", "ideal_s")}


def hfu(plans: list[Plan], step_s: float) -> float:
    """Of steps that take so long on the mean, on H100 devices."""
    utilization = hfu_of([OptimizerStep([plan]) for plan in plans], plans[0].model, step_s, PEAK_TFLOPS["published"])
    assert utilization is not None
    return utilization


def fit(rows: list[Row], rounds: int = 8) -> dict[str, float]:
    """The four constants that make the largest relative error smallest, and that error."""
    import numpy as np
    from scipy.optimize import linprog

    # Without latencies, so that exchanges are linear in the rate; what they add is of the rest.
    cluster, error = Cluster.published(node_latency_s=0, network_latency_s=0), 0.0
    published = np.array([row.published_s for row in rows])
    for _ in range(rounds):
        # Each fitted term without its constant, and what is not fitted.
        now = [mean_terms(row.plans, Cluster.published(**constants(cluster))) for row in rows]
        bare = [mean_terms(row.plans, cluster) for row in rows]
        columns = np.array(
            [
                [
                    (b["token_s"] + b["attention_s"]) * cluster.flops_per_s,
                    b["exchange_s"] * cluster.node_bytes_per_s,
                    b["host_s"] / cluster.host_s_per_piece,
                    1.0,
                ]
                for b in bare
            ]
        )
        rest = np.array(
            [n["route_s"] + n["fsdp_s"] + n["exchange_s"] - b["exchange_s"] for n, b in zip(now, bare, strict=True)]
        )
        scale = columns.max(axis=0)
        relative = columns / scale / published[:, None]
        ones = np.ones((len(rows), 1))
        target = 1 - rest / published
        done = linprog(
            [0, 0, 0, 0, 1],
            A_ub=np.block([[relative, -ones], [-relative, -ones]]),
            b_ub=np.concatenate([target, -target]),
            bounds=[(1e-9, None)] * 4 + [(0, None)],
        )
        rate, per_byte, per_piece, fixed = done.x[:4] / scale
        error = done.x[4]
        cluster = Cluster.published(
            flops_per_s=1 / rate, node_bytes_per_s=1 / per_byte, host_s_per_piece=per_piece, fixed_s=fixed,
            node_latency_s=0, network_latency_s=0,
        )  # fmt: skip
    return constants(cluster) | {"largest relative error": float(error)}


def hold_out_table(rows: list[Row]) -> str:
    """By mix the errors of a fit to the rows of the other mixes; with times at the gamma of plans, and at another."""

    def cells() -> Iterator[tuple[str, ...]]:
        for gamma in (GAMMA, 0.49):
            timed = [replace(row, plans=[p.on(gamma=gamma) for p in row.plans]) for row in rows]
            for mix in PUBLISHED_S:
                fitted = fit([row for row in timed if row.mix != mix])
                error = fitted.pop("largest relative error")
                cluster = Cluster.published(**fitted)
                left_out = (row for row in timed if row.mix == mix)
                errors = (mean_terms(row.plans, cluster)["total_s"] / row.published_s - 1 for row in left_out)
                yield f"{gamma}", mix, f"{error:.1%}", *(f"{e:+.1%}" for e in errors)
            yield f"{gamma}", "nothing", f"{fit(timed)['largest relative error']:.1%}", *[""] * len(TOPOLOGIES)

    return table(("gamma", "left out", "worst of the fit", *TOPOLOGIES), cells())


def constants(cluster: Cluster) -> dict[str, float]:
    return {n: getattr(cluster, n) for n in ("flops_per_s", "node_bytes_per_s", "host_s_per_piece", "fixed_s")}


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * 2 + " ---: |" * (len(header) - 2)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def constants_table() -> str:
    published = constants(Cluster.published())
    flops, rate = published["flops_per_s"] / 1e12, published["node_bytes_per_s"] / 1e9
    shown = (
        ("compute", f"{flops:.0f} TFLOP/s", "sustained by a rank over whole blocks, attention's FLOPs times gamma"),
        ("exchange", f"{rate:.0f} GB/s", "sent by a rank in attention's all-to-alls inside its node, packing included"),
        (
            "host",
            f"{published['host_s_per_piece'] * 1e6:.2f} us",
            "per block for every piece that the published code copies: chunks times bag size",
        ),
        ("fixed", f"{published['fixed_s'] * 1e3:.0f} ms", "a micro-batch, whatever its load"),
    )
    return table(("term", "fitted", "of what"), iter(shown)).replace(" ---: |", " --- |")


def terms_table(rows: list[Row]) -> str:
    def cells() -> Iterator[tuple[str, ...]]:
        for row in rows:
            terms = mean_terms(row.plans, Cluster.published())
            error = f"{terms['total_s'] / row.published_s - 1:+.1%}"
            shown = (f"{terms[name]:.2f}" for name in ("total_s", *TERMS))
            yield row.mix, row.topology, f"{row.published_s:.2f}", error, *shown

    return table(("mix", "topology", "published", "error", "predicted", *TERMS), cells())


def own_table() -> str:
    several = "g1n8+g2n4+g4n4"
    flat = [("none", "greedy"), ("g4n8", "greedy"), (several, "greedy"), (several, "greedy_remaining")]

    def cells() -> Iterator[tuple[str, ...]]:
        for mix in PUBLISHED_S:
            for topology, solver in (*flat, ("g8/4/2/1n4", "balanced")):
                plans = plans_of(mix, topology, solver)
                t = mean_terms(plans, Cluster())
                moved = statistics.fmean(p.attention_tokens_moved / p.num_tokens for p in plans)
                wir = statistics.fmean(p.wir_after for p in plans)
                name = "none" if topology == "none" else f"{topology}, {solver}"
                parts = (t["total_s"], t["token_s"] + t["attention_s"], t["exchange_s"])
                yield f"{mix} {name}", f"{wir:.3f}", *(f"{part:.2f}" for part in parts), f"{moved:.0%}"

    return table(("mix, topology, solver", "WIR", "predicted s", "compute", "exchange", "tokens exchanged"), cells())


def write(page: Path, tables: dict[str, Callable[[], str]], check: bool) -> int:
    """Puts the tables into their places in the page; with `check` it only says, by 1, whether that would change it."""
    script = page.with_suffix(".py").name
    old = new = page.read_text()
    for name, make in tables.items():
        begin, end = f"<!-- {name}: written by docs/{script} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = new.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{page.name}: no place for the table {name!r}")
        new = before + begin + make() + end + after
    if check:
        return int(new != old)
    page.write_text(new)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--hold-out", action="store_true")
    parser.add_argument("--terms", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = published_rows()
    if args.fit:
        for name, value in fit(rows).items():
            print(f"{name} = {value:.6g}")
        return 0
    if args.terms:
        print(terms_table(rows))
        return 0
    if args.hold_out:
        print(hold_out_table(rows))
        return 0
    tables = {"constants": constants_table, "own": own_table}
    return write(PAGE, tables, args.check)


if __name__ == "__main__":
    sys.exit(main())
