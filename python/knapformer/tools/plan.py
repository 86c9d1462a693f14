"""`knapformer plan`: one step's plan, without starting ranks and without torch."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import knapformer
from knapformer import Plan
from knapformer.tools import cli_args
from knapformer.tools.files import check_outputs, terminal_or_wide, write_atomically
from knapformer.tools.report import check_report, write_report

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
    parser.add_argument("--step", type=cli_args.integer(0, 2**63 - 1), default=0, help="of the data (default 0)")
    cli_args.add_solver(parser, default="balanced")
    parser.add_argument(
        "--effort", type=cli_args.effort, default="default", metavar="E",
        help="of the balanced solver: low, default, high, or a number of moves",
    )  # fmt: skip
    cli_args.add_workload(parser)
    cli_args.add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes the plan as an HTML file that opens offline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json, "--report": args.report})
    check_report(args.report)
    gamma, calibration = cli_args.gamma_and_calibration(args)
    keep_to = cli_args.limits(args, calibration)
    # What could not be planned is not drawn.
    check = None if args.topology == "auto" else partial(knapformer.Topology, args.topology)
    (seq_lens,) = cli_args.batches(args, range(args.step, args.step + 1), check)
    start = time.perf_counter()
    plan = knapformer.plan(
        seq_lens, args.topology, args.d_model, gamma, args.solver, effort=args.effort, masks=args.mask, **keep_to
    )
    elapsed_s = time.perf_counter() - start
    if args.report is not None:
        write_report(args.report, plan)
    if args.json == "-":
        print(plan.to_json())
        return
    if args.json is not None:
        write_atomically(args.json, plan.to_json() + "\n")
    _print_plan(plan, elapsed_s)


def _print_plan(plan: Plan, elapsed_s: float) -> None:
    from rich.table import Table

    whole = f"{plan.topology}, {plan.num_ranks} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens"
    table = Table()
    by_rank = plan.num_ranks <= _MAX_TABLE_RANKS
    table.add_column("rank" if by_rank else "ranks", justify="right")
    table.add_column("bag" if by_rank else "bags of", justify="right")
    headings = ("sequences", "tokens", "work")
    for heading in (*headings, *(f"-> {heading}" if heading != "sequences" else "-> chunks" for heading in headings)):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = _rank_rows(plan)
    bags = plan.topology.bags
    if by_rank:
        for bag, ranks in enumerate(bags):
            for rank in ranks:
                table.add_row(str(rank), str(bag), *_cells(rows[rank]))
    else:
        table.caption = "minimum to maximum of a rank"
        for size in sorted({len(ranks) for ranks in bags}):
            members = [rank for ranks in bags if len(ranks) == size for rank in ranks]
            columns = zip(*(rows[rank] for rank in members), strict=True)
            table.add_row(f"{len(members):,}", str(size), *(_range(column) for column in columns))
    console = terminal_or_wide()
    console.print(f"{whole}, {plan.solver} in {elapsed_s * 1e3:.3g} ms", soft_wrap=True, highlight=False)
    console.print(table)
    console.print("Work: of a rank over the mean.", highlight=False)
    console.print(_plan_sentence(plan), soft_wrap=True, highlight=False)


_Row = tuple[int, int, float, int, int, float]  # sequences, tokens, work before; chunks, tokens, work after


def _rank_rows(plan: Plan) -> list[_Row]:
    mean = statistics.fmean(plan.workload_before) or 1.0
    return [
        (len(lens), tokens, work / mean, len(chunks), tokens_after, work_after / mean)
        for lens, tokens, work, chunks, tokens_after, work_after in zip(
            plan.seq_lens,
            plan.tokens_before,
            plan.workload_before,
            plan.chunk_lens,
            plan.tokens_after,
            plan.workload_after,
            strict=True,
        )
    ]


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _cells(row: _Row) -> list[str]:
    return [_cell(value) for value in row]


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
