"""The command `knapformer`: `plan` and `simulate`.

Whatever is wrong with the input ends in one line on standard error and exit status 2, before any work is done. What
goes wrong later ends in one line and status 1. `plan` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import knapformer
from knapformer import ArgumentError, DataMix, Plan, StateError
from knapformer.output import check_output_path, terminal_or_wide, write_atomically
from knapformer.predict import command as predict
from knapformer.report import check_can_report, write_report
from knapformer.report import command as report

_MAX_RANKS = 1 << 20
_MAX_TABLE_RANKS = 64  # more are summed up by bag size


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from {least} to {most}")
        return value

    return parse


def _number(least: float, inclusive: bool = True) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > least or (inclusive and value == least))):
            sign = ">=" if inclusive else ">"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number {sign} {least:g}")
        return value

    return parse


def _gamma_or_fit(text: str) -> float | None:
    return None if text == "fit" else _number(0)(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="knapformer", description="Load balancing for diffusion transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"knapformer {knapformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_simulate(commands)
    predict.add_parser(commands)
    report.add_parser(commands)
    return parser


def _add_data(parser: argparse._ActionsContainer, required: bool) -> None:
    parser.add_argument(
        "--data",
        metavar="CODES|MIX",
        required=required,
        help=f"data codes such as g2b4i256f1s0,g2b1i1024f1s0, or a mix: {', '.join(DataMix.names())}",
    )


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_integer(0, 2**64 - 1), default=0, help="of the data (default 0)")
    parser.add_argument(
        "--scale",
        type=_number(0, inclusive=False),
        default=1.0,
        metavar="F",
        help="divides the resolutions (default 1)",
    )
    parser.add_argument(
        "--max-text-tokens", type=_integer(0, 1 << 20), default=392, metavar="N", help="per sample (default 392)"
    )


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="plan a data mix or given lengths, without starting ranks", allow_abbrev=False
    )
    parser.add_argument("--topology", required=True, metavar="T", help="bags of ranks, such as g8n4 or g1n2+g2n1")
    source = parser.add_mutually_exclusive_group(required=True)
    _add_data(source, required=False)
    source.add_argument("--lengths", metavar="FILE|-", help="JSON: for each rank a list of sequence lengths, in tokens")
    parser.add_argument("--ranks", type=_integer(1, _MAX_RANKS), metavar="N", help="with --data")
    parser.add_argument("--solver", default="greedy", choices=knapformer.solver_names(), help="default greedy")
    parser.add_argument("--gamma", type=_number(0), default=1.0, help="attention's cost per FLOP (default 1)")
    parser.add_argument(
        "--d-model", type=_integer(1, 1 << 20), default=3072, metavar="D", help="width, in features (default 3072)"
    )
    parser.add_argument("--step", type=_integer(0, 2**63 - 1), default=0, help="of the data (default 0)")
    _add_draw(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes the plan as an HTML file that opens offline")
    parser.set_defaults(run=_plan)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="fake training steps on real ranks, without and with the balancer", allow_abbrev=False
    )
    _add_data(parser, required=True)
    parser.add_argument("--topology", required=True, action="append", metavar="T", help="may be given several times")
    parser.add_argument("--ranks", type=_integer(1, _MAX_RANKS), metavar="N", help="local ranks to start")
    parser.add_argument("--model", default="flux-demo", metavar="NAME|JSON", help="named configuration or file")
    parser.add_argument("--steps", type=_integer(1, 10**9), default=10, metavar="N", help="timed (default 10)")
    parser.add_argument(
        "--repeats", type=_integer(1, 10**6), default=1, metavar="N", help="of each step, the best counts (default 1)"
    )
    parser.add_argument("--warmup", type=_integer(0, 10**9), default=2, metavar="N", help="before them (default 2)")
    parser.add_argument("--solver", default="greedy", choices=knapformer.solver_names(), help="default greedy")
    parser.add_argument(
        "--gamma", type=_gamma_or_fit, default=None, help="attention's cost per FLOP; 'fit' measures it (default)"
    )
    _add_draw(parser)
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp64"), help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--no-checkpoint", action="store_true", help="keep activations instead of recomputing blocks")
    parser.add_argument(
        "--threads", type=_integer(1, 1024), default=1, metavar="N", help="per rank on the CPU (default 1)"
    )
    parser.add_argument(
        "--peak-tflops", type=_number(0, inclusive=False), metavar="F", help="of a rank's device; reports HFU"
    )
    parser.add_argument("--json", metavar="FILE", help="writes the results as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes an HTML file that opens offline: plan and step times")
    parser.set_defaults(run=_simulate)


def _plan(args: argparse.Namespace) -> None:
    if args.json not in (None, "-"):
        check_output_path("--json", args.json)
    _check_report(args.report)
    if args.lengths is not None:
        seq_lens = read_lengths(args.lengths)
        if args.ranks not in (None, len(seq_lens)):
            raise ArgumentError(f"--ranks: got {args.ranks}, expected {len(seq_lens)}, as --lengths has, or none")
    else:
        if args.ranks is None:
            raise ArgumentError("--ranks: got none, expected the number of ranks that draw --data")
        mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
        mix.check_divides(args.ranks)
        knapformer.Topology(args.topology, args.ranks)  # before drawing what it could not plan
        seq_lens = mix.draw_lengths(args.seed, args.step, args.ranks)
    start = time.perf_counter()
    plan = knapformer.plan(seq_lens, args.topology, args.d_model, args.gamma, args.solver)
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


def read_lengths(path: str) -> list[list[int]]:
    """A JSON list of lists of integers from a file, or from standard input for '-'.

    Raises ArgumentError for other content, OSError where it cannot be read.
    """
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        lengths = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--lengths: {path}: not readable as JSON: {error}") from None
    if not isinstance(lengths, list) or not lengths or not all(isinstance(lens, list) for lens in lengths):
        raise ArgumentError(f"--lengths: {path}: expected a list with a list of lengths for each rank")
    for rank, lens in enumerate(lengths):
        for length in lens:
            if type(length) is not int or not 1 <= length < 1 << 31:
                raise ArgumentError(f"--lengths: {path}: rank {rank}: got {length!r}, expected an integer >= 1")
    return lengths


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
    return (
        f"Highest over lowest work of a rank: {plan.wir_before:.2f} before, {plan.wir_after:.2f} after. The slowest "
        f"rank has {gain:.2f} times less to compute; {plan.tokens_moved / plan.num_tokens:.1%} of the tokens move."
    )


def _simulate(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("simulate: needs torch, which is not installed; install its CPU or CUDA build")
    if importlib.util.find_spec("knapformer._torch") is None:
        raise ArgumentError(
            "simulate: this knapformer was built without torch and only plans; install it anew beside torch"
        )
    from knapformer.models.config import load_config
    from knapformer.simulator import SimulationSettings, simulate
    from knapformer.simulator.launch import started_ranks

    started = started_ranks()
    num_ranks = args.ranks if args.ranks is not None else started
    if num_ranks is None:
        raise ArgumentError("--ranks: got none, expected the number of ranks to start")
    if started is not None and num_ranks != started:
        raise ArgumentError(f"--ranks: got {num_ranks}, expected {started}, as torchrun has started")
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
        gamma=args.gamma,
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
        checkpointing=not args.no_checkpoint,
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
