"""The command `knapformer`: `plan`, `simulate`, and where the others begin.

Whatever is wrong with the input ends in one line on standard error and exit status 2, before any work is done. What
goes wrong later ends in one line and status 1. `plan` needs no torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import knapformer
from knapformer import ArgumentError, Plan, StateError, tune
from knapformer.calibrate import command as calibrate
from knapformer.launch import check_ranks
from knapformer.options import (
    MAX_RANKS,
    add_data,
    add_device,
    add_draw,
    add_gamma,
    add_lengths,
    add_limits,
    add_workload,
    batches,
    check_torch,
    effort,
    gamma_and_calibration,
    integer,
    limits,
    number,
)
from knapformer.output import check_output_path, terminal_or_wide, write_atomically
from knapformer.predict import command as predict
from knapformer.replay import command as replay
from knapformer.report import check_can_report, write_report
from knapformer.report import command as report

_MAX_TABLE_RANKS = 64  # more are summed up by bag size


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="knapformer", description="Load balancing for diffusion transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"knapformer {knapformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_simulate(commands)
    tune.add_parser(commands)
    calibrate.add_parser(commands)
    replay.add_parser(commands)
    predict.add_parser(commands)
    report.add_parser(commands)
    return parser


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="plan a data mix or given lengths, without starting ranks", allow_abbrev=False
    )
    parser.add_argument(
        "--topology",
        required=True,
        metavar="T",
        help="bags of ranks, such as g8n4, g1n2+g2n1 or g8/4/2/1n4; auto: the best for these lengths (see tune)",
    )
    add_lengths(parser)
    parser.add_argument("--step", type=integer(0, 2**63 - 1), default=0, help="of the data (default 0)")
    parser.add_argument("--solver", default="balanced", choices=knapformer.solver_names(), help="default balanced")
    parser.add_argument(
        "--effort", type=effort, default="default", metavar="E",
        help="of the balanced solver: low, default, high, or a number of moves",
    )  # fmt: skip
    add_workload(parser)
    add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes the plan as an HTML file that opens offline")
    parser.set_defaults(run=_plan)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="fake training steps on real ranks, without and with the balancer", allow_abbrev=False
    )
    add_data(parser, required=True)
    parser.add_argument("--topology", required=True, action="append", metavar="T", help="may be given several times")
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), metavar="N", help="local ranks to start")
    parser.add_argument("--model", default="flux-demo", metavar="NAME|JSON", help="named configuration or file")
    parser.add_argument("--steps", type=integer(1, 10**9), default=10, metavar="N", help="timed (default 10)")
    parser.add_argument(
        "--repeats", type=integer(1, 10**6), default=1, metavar="N", help="of each step, the best counts (default 1)"
    )
    parser.add_argument("--warmup", type=integer(0, 10**9), default=2, metavar="N", help="before them (default 2)")
    parser.add_argument("--solver", default="balanced", choices=knapformer.solver_names(), help="default balanced")
    add_gamma(parser, default=1.0, can_fit=True)
    add_draw(parser)
    add_device(parser)
    parser.add_argument(
        "--keep-exchanges", action="store_true", help="keeps what attention's exchanges brought: none is repeated"
    )
    parser.add_argument(
        "--peak-tflops", type=number(0, inclusive=False), metavar="F", help="of a rank's device; reports HFU"
    )
    parser.add_argument("--json", metavar="FILE", help="writes the results as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes an HTML file that opens offline: plan and step times")
    parser.set_defaults(run=_simulate)


def _plan(args: argparse.Namespace) -> None:
    if args.json not in (None, "-"):
        check_output_path("--json", args.json)
    _check_report(args.report)
    gamma, calibration = gamma_and_calibration(args)
    keep_to = limits(args, calibration)
    # What could not be planned is not drawn.
    check = None if args.topology == "auto" else partial(knapformer.Topology, args.topology)
    (seq_lens,) = batches(args, range(args.step, args.step + 1), check)
    start = time.perf_counter()
    plan = knapformer.plan(
        seq_lens,
        args.topology,
        args.d_model,
        gamma,
        args.solver,
        effort=args.effort,
        masks=args.mask,
        **keep_to,
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


def _check_report(path: str | None) -> None:
    if path is not None:
        check_output_path("--report", path)
        check_can_report()


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
        table.caption = "least to most of a rank"
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
        f"Predicted: {plan.predicted_time * 1e3:.3f} ms a block, forward, {over_ideal:.1%} over ideal and at most "
        f"{max(plan.gap, 0):.1%} over the best plan of this topology. In attention "
        f"{plan.attention_tokens_moved / plan.num_tokens:.1%} of the tokens cross ranks; the fullest rank holds "
        f"{plan.max_tokens:,}, {fullest:.2f} times the mean."
    )


def _simulate(args: argparse.Namespace) -> None:
    check_torch("simulate")
    from knapformer.models.config import load_config
    from knapformer.simulator import SimulationSettings, simulate

    num_ranks = check_ranks(args.ranks)
    if args.json is not None:
        check_output_path("--json", args.json)
    _check_report(args.report)
    settings = SimulationSettings(
        data=args.data,
        topologies=tuple(args.topology),
        num_ranks=num_ranks,
        model=load_config(args.model),
        model_name=args.model,
        scale=args.scale,
        max_text_tokens=args.max_text_tokens,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
        num_repeats=args.repeats,
        solver=args.solver,
        gamma=gamma_and_calibration(args)[0],
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
        checkpointing=not args.no_checkpoint,
        keep_exchanges=args.keep_exchanges,
        threads=args.threads,
        peak_tflops=args.peak_tflops,
        json_path=args.json,
        report_path=args.report,
    )
    simulate(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (ArgumentError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if isinstance(error, OSError) and error.filename is not None:
            return _complain(args.command, f"{error.filename}: {error.strerror}", 2)
        return _complain(args.command, error, 2)
    except StateError as error:
        return _complain(args.command, error, 1)
    except KeyboardInterrupt:
        return _complain(args.command, "interrupted", 130)
    return 0


def _complain(command: str, error: object, status: int) -> int:
    # Of the ranks that torchrun started, all see the same input: one of them says so.
    if os.environ.get("RANK", "0") == "0" or status != 2:
        print(f"knapformer {command}: {' '.join(str(error).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
