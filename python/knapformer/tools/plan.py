"""`knapformer plan`: the plan of a step, of one micro-batch or several, without starting ranks and without torch."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table

import knapformer
from knapformer import Plan, StepPlan
from knapformer.tools import cli_args, cost_args
from knapformer.tools.files import check_outputs, show, table_of, write_atomically
from knapformer.tools.report import write_report

_MAX_TABLE_RANKS = 64  # more are summed up by bag size


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", help="plan a data mix or given lengths, without starting ranks")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="T",
        help="bags of ranks, such as g8n4, g1n2+g2n1 or g8/4/2/1n4; auto: the best for these lengths (see tune)",
    )
    cli_args.add_lengths(parser)
    cli_args.add_micro_batches(parser)
    parser.add_argument(
        "--sync", choices=("micro_batch", "step"), default="micro_batch",
        help="with --micro-batches: ranks wait for each other in each (FSDP2; default), or once a step (DDP)",
    )  # fmt: skip
    parser.add_argument("--step", type=cli_args.integer(0, 2**63 - 1), default=0, help="of the data (default 0)")
    cli_args.add_solver(parser)
    parser.add_argument(
        "--effort", type=cli_args.effort, default="default", metavar="E",
        help="of the balanced solver: low, default, high, or a number of moves",
    )  # fmt: skip
    cost_args.add_workload(parser)
    cost_args.add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes the plan as an HTML file that opens offline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json, "--report": args.report})
    keep_to = {"solver": args.solver, "effort": args.effort, "masks": args.mask, **cost_args.limits(args)}
    # What could not be planned is not drawn.
    check = None if args.topology == "auto" else partial(knapformer.Topology, args.topology)
    drawn = cli_args.batches_of_step(args.step, args.micro_batches or 1)
    seq_lens = cli_args.lengths_of_step(cli_args.batches(args, drawn, check))
    if args.micro_batches is not None:
        keep_to |= {"micro_batches": args.micro_batches, "sync": args.sync}
    cost_args.warn_if_far(args, args.d_model, cli_args.longest_of(seq_lens))
    start = time.perf_counter()
    plan = knapformer.plan(seq_lens, args.topology, args.d_model, **keep_to)
    elapsed_s = time.perf_counter() - start
    if args.report is not None:
        write_report(args.report, plan)
    if args.json == "-":
        print(plan.to_json())
        return
    if args.json is not None:
        write_atomically(args.json, plan.to_json() + "\n")
    if isinstance(plan, StepPlan):
        _print_step_plan(plan, elapsed_s)
    else:
        _print_plan(plan, elapsed_s)
    show(cost_args.assumed(args, **{name: keep_to[name] for name in ("gamma", "cluster", "model")}))


def _print_step_plan(step: StepPlan, elapsed_s: float) -> None:
    first = step.plans[0]
    over_ideal, gap = step.predicted_time / step.ideal_time - 1, max(step.gap, 0)
    show(
        f"{first.topology}, {first.num_ranks} ranks, {step.num_micro_batches} micro-batches, "
        f"{len(step.micro_batches):,} sequences, {step.num_tokens:,} tokens, in {elapsed_s * 1e3:.3g} ms",
        table_of([*(_micro_batch_cells(step, k) for k in range(step.num_micro_batches)), _step_cells(step)]),
        "Longest, fullest: work and tokens of a rank over the mean rank of a micro-batch. Moved: held by another rank "
        "than drew it.",
        f"Predicted: {step.predicted_time:.4g} s a step, {over_ideal:.2%} over ideal and at most {gap:.2%} over the "
        f"best plan of this topology. Ranks wait for each other "
        f"{'in every micro-batch' if step.sync == 'micro_batch' else 'once a step'}.",
    )


def _micro_batch_cells(step: StepPlan, k: int) -> dict[str, str]:
    plan = step.plans[k]
    tokens = max(plan.num_tokens, 1)
    return {
        "micro-batch": str(k),
        "sequences": f"{plan.num_sequences:,}",
        "tokens": f"{plan.num_tokens:,}",
        "longest": f"{plan.max_over_mean_after:.4f}" if plan.num_tokens else "-",
        "fullest": f"{plan.max_tokens * plan.num_ranks / tokens:.2f}",
        "max tokens": f"{plan.max_tokens:,}",
        "exchanged": f"{plan.attention_tokens_moved / tokens:.1%}",
        "moved": f"{plan.tokens_moved / tokens:.1%}",
        "predicted s": f"{step.predicted_times[k]:.4g}",
    }


def _step_cells(step: StepPlan) -> dict[str, str]:
    num_ranks, tokens = step.plans[0].num_ranks, max(step.num_tokens, 1)
    highest = math.fsum(max(plan.workload_after) for plan in step.plans)
    mean = math.fsum(math.fsum(plan.workload_after) for plan in step.plans) / num_ranks
    return {
        "micro-batch": "step",
        "sequences": f"{len(step.micro_batches):,}",
        "tokens": f"{step.num_tokens:,}",
        "longest": f"{highest / mean:.4f}" if mean else "-",
        "fullest": f"{step.max_tokens * num_ranks * step.num_micro_batches / tokens:.2f}",
        "max tokens": f"{step.max_tokens:,}",
        "exchanged": f"{step.exchanged_fraction:.1%}",
        "moved": f"{step.tokens_moved / tokens:.1%}",
        "predicted s": f"{step.predicted_time:.4g}",
    }


def _print_plan(plan: Plan, elapsed_s: float) -> None:
    whole = f"{plan.topology}, {plan.num_ranks} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens"
    show(
        f"{whole}, {plan.solver} in {elapsed_s * 1e3:.3g} ms",
        _rank_table(plan) if plan.num_ranks <= _MAX_TABLE_RANKS else _bag_size_table(plan),
        "Work: of a rank over the mean.",
        _plan_sentence(plan),
    )


def _rank_table(plan: Plan) -> Table:
    columns = _columns(plan)
    return table_of(
        {"rank": str(rank), "bag": str(bag), **{name: _cell(values[rank]) for name, values in columns.items()}}
        for bag, ranks in enumerate(plan.topology.bags)
        for rank in ranks
    )


def _bag_size_table(plan: Plan) -> Table:
    columns, bags, rows = _columns(plan), plan.topology.bags, []
    for size in sorted({len(ranks) for ranks in bags}):
        members = [rank for ranks in bags if len(ranks) == size for rank in ranks]
        ranges = {name: _range([values[rank] for rank in members]) for name, values in columns.items()}
        rows.append({"ranks": f"{len(members):,}", "bags of": str(size), **ranges})
    return table_of(rows, caption="minimum to maximum of a rank")


def _columns(plan: Plan) -> dict[str, Sequence[float]]:
    """Values of all ranks, by heading."""
    mean = statistics.fmean(plan.workload_before) or 1.0
    return {
        "sequences": [len(lens) for lens in plan.seq_lens],
        "tokens": plan.tokens_before,
        "work": [work / mean for work in plan.workload_before],
        "-> chunks": [len(lens) for lens in plan.chunk_lens],
        "-> tokens": plan.tokens_after,
        "-> work": [work / mean for work in plan.workload_after],
    }


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _range(values: Sequence[float]) -> str:
    low, high = _cell(min(values)), _cell(max(values))
    return low if low == high else f"{low}..{high}"


def _plan_sentence(plan: Plan) -> str:
    if plan.num_tokens == 0:
        return "No sequences: nothing to balance."
    gain = plan.max_over_mean_before / plan.max_over_mean_after
    over_ideal, fullest = plan.predicted_time / plan.ideal_time - 1, plan.max_tokens * plan.num_ranks / plan.num_tokens
    return (
        f"Highest over lowest work of a rank: {plan.wir_before:.2f} before, {plan.wir_after:.2f} after. The slowest "
        f"rank has {gain:.2f} times less to compute; {plan.tokens_moved / plan.num_tokens:.1%} of the tokens move.\n"
        f"Predicted: {plan.predicted_time:.4g} s a step, {over_ideal:.1%} over ideal and at most "
        f"{max(plan.gap, 0):.1%} over the best plan of this topology. In attention "
        f"{plan.attention_tokens_moved / plan.num_tokens:.1%} of the tokens are exchanged; the fullest rank "
        f"holds {plan.max_tokens:,}, {fullest:.2f} times the mean."
    )
