"""Options that commands share: numbers with bounds, the lengths to plan, the workload, what a plan must keep to, how
blocks are run, and where results go."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from knapformer import ArgumentError, Calibration, ClusterModel, DataMix, solver_names
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.calibrate.calibration import cluster_fields
from knapformer.installed_torch import torch_problem

MAX_RANKS = 1 << 20
H100_GAMMA = 0.41  # at which the published imbalance comes out
Lengths = list[list[int]]  # for each rank those of its sequences, in tokens


def integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from {least} to {most}")
        return value

    return parse


def number(least: float, inclusive: bool = True) -> Callable[[str], float]:
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


def counts(text: str, argument: str, most: int) -> list[int]:
    """'32,128,...,2048' is 32, 128, 512, 2048: dots go on by the ratio of the two before, up to the next count.

    Raises ArgumentError, naming `argument`.
    """
    values: list[int] = []
    dots = False
    for item in (part.strip() for part in text.split(",")):
        if item == "...":
            if len(values) < 2 or dots or values[-1] <= values[-2] or values[-1] % values[-2]:
                raise ArgumentError(
                    f"{argument}: got {text!r}, expected dots only after two counts, the second a multiple of the first"
                )
            dots = True
            continue
        if not (item.isascii() and item.isdigit() and 1 <= int(item) <= most):
            raise ArgumentError(f"{argument}: got {item!r}, expected counts from 1 to {most}, such as 32,128,...,2048")
        last = int(item)
        if dots:
            ratio = values[-1] // values[-2]
            while values[-1] * ratio < last:
                values.append(values[-1] * ratio)
            if last <= values[-1]:
                raise ArgumentError(f"{argument}: got {text!r}, expected dots that go up to a higher count")
            dots = False
        values.append(last)
    if dots:
        raise ArgumentError(f"{argument}: got {text!r}, expected a count after the dots")
    return values


def effort(text: str) -> int | str:
    return text if text in ("low", "default", "high") else integer(0, 2**62)(text)


def speeds(text: str) -> list[float]:
    return [number(0, inclusive=False)(speed) for speed in text.split(",")]


def add_data(parser: argparse._ActionsContainer, required: bool) -> None:
    parser.add_argument(
        "--data",
        metavar="CODES|MIX",
        required=required,
        help=f"data codes such as g2b4i256f1s0,g2b1i1024f1s0, or a mix: {', '.join(DataMix.names())}",
    )


def add_draw(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--seed", type=integer(0, 2**64 - 1), default=0, help="of the data (default 0)")
    parser.add_argument(
        "--scale", type=number(0, inclusive=False), default=1.0, metavar="F", help="divides the resolutions (default 1)"
    )
    parser.add_argument(
        "--max-text-tokens", type=integer(0, 1 << 20), default=392, metavar="N", help="per sample (default 392)"
    )


def add_lengths_file(source: argparse._ActionsContainer) -> None:
    """What `read_lengths` reads."""
    source.add_argument("--lengths", metavar="FILE|-", help="JSON: for each rank a list of sequence lengths, in tokens")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """What `batches` reads."""
    source = parser.add_mutually_exclusive_group(required=True)
    add_data(source, required=False)
    add_lengths_file(source)
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), metavar="N", help="with --data")
    add_draw(parser)


def add_solver(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """default: None for the planner's."""
    names = solver_names()
    parser.add_argument(
        "--solver",
        default=default or names[0],
        choices=names,
        help="default: the planner's" if default is None else f"default {default}",
    )


def add_gamma(parser: argparse.ArgumentParser, default: float, *, can_fit: bool = False) -> None:
    """--gamma, or --calibration in its place; `gamma_and_calibration` reads them.

    can_fit: --gamma takes 'fit' as well, which is then its default: None in args.gamma.
    """
    options = parser.add_mutually_exclusive_group()

    def parse(text: str) -> float | None:
        return None if can_fit and text == "fit" else number(0)(text)

    options.add_argument(
        "--gamma",
        type=parse,
        default=None if can_fit else default,
        help="attention's cost per FLOP" + ("; 'fit' measures it (default)" if can_fit else f" (default {default:g})"),
    )
    options.add_argument(
        "--calibration", metavar="FILE", help="in place of --gamma: what knapformer calibrate --json measured"
    )


def gamma_and_calibration(args: argparse.Namespace) -> tuple[Any, Calibration | None]:
    """What add_gamma took: gamma (None where it is to be fitted), and the calibration it came from.

    Says on standard error what the calibration warns of. Raises ArgumentError, OSError.
    """
    if args.calibration is None:
        return args.gamma, None
    calibration = Calibration.load(args.calibration)
    for warning in calibration.warnings:
        print(f"{args.calibration}: {warning}", file=sys.stderr)
    return calibration.gamma, calibration


def add_device(parser: argparse.ArgumentParser) -> None:
    """--dtype, --device, --no-checkpoint and --threads: how blocks are run. `device_settings` reads them."""
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp64"), help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--no-checkpoint", action="store_true", help="keep activations instead of recomputing blocks")
    parser.add_argument(
        "--threads", type=integer(1, 1024), default=1, metavar="N", help="per rank on the CPU (default 1)"
    )


def device_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of SimulationSettings and CalibrationSettings."""
    return {
        "dtype": args.dtype,
        "device": args.device,
        "checkpointing": not args.no_checkpoint,
        "threads": args.threads,
    }


def add_results(parser: argparse.ArgumentParser, device: str) -> None:
    """--peak-tflops, of the `device`, --json and --report: what measured steps come to, and where it goes."""
    parser.add_argument("--peak-tflops", type=number(0, inclusive=False), metavar="F", help=f"of {device}; reports HFU")
    parser.add_argument("--json", metavar="FILE", help="writes the results as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes an HTML file that opens offline: plan and step times")


def add_workload(parser: argparse.ArgumentParser) -> None:
    add_gamma(parser, default=1.0)
    parser.add_argument(
        "--d-model", type=integer(1, 1 << 20), default=3072, metavar="D", help="width, in features (default 3072)"
    )
    parser.add_argument(
        "--mask", default="full", metavar="M",
        help="of all sequences: full (default), causal, prefix:TEXT, block_causal:TEXT:FRAME, window:LEFT:RIGHT",
    )  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """What `limits` reads."""
    parser.add_argument(
        "--heads", type=integer(1, 1 << 20), metavar="N",
        help="of attention: only bags whose ranks divide them; a --topology with others is refused",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens-per-rank", type=integer(1, 2**62), default=0, metavar="N", help="kept, or refused with the reason"
    )
    parser.add_argument("--rank-speed", type=speeds, default=[], metavar="F,F,...", help="per rank, relative")
    parser.add_argument(
        "--cluster", metavar="NAME|FILE",
        help="what times are predicted with: as in knapformer predict (default: 400 TFLOP/s, 200 and 25 GB/s)",
    )  # fmt: skip
    parser.add_argument("--ranks-per-node", type=integer(1, MAX_RANKS), metavar="N", help="default 8")


def limits(args: argparse.Namespace, calibration: Calibration | None = None) -> dict[str, Any]:
    """Arguments of `plan` and `rank_topologies`: of the named cluster, over it what was measured, over that what single
    options say. Raises ArgumentError, OSError.
    """
    from knapformer.predict.settings import planning_cluster, read_cluster

    cluster = ClusterModel() if args.cluster is None else planning_cluster(read_cluster(args.cluster)[0])
    if calibration is not None:
        cluster = calibration.cluster(of=cluster)
    if args.ranks_per_node is not None:
        cluster = ClusterModel(**{**cluster_fields(cluster), "ranks_per_node": args.ranks_per_node})
    return {
        "num_heads": args.heads or 0,
        "max_tokens_per_rank": args.max_tokens_per_rank,
        "rank_speed": args.rank_speed,
        "cluster": cluster,
    }


def batches(args: argparse.Namespace, steps: range, check: Callable[[int], object] | None = None) -> Iterator[Lengths]:
    """The lengths of --lengths, or those that --data draws in each of the steps.

    `check` sees the number of ranks before anything is drawn. Raises ArgumentError, OSError.
    """
    if args.lengths is not None:
        yield read_lengths(args.lengths, args.ranks)
        return
    if args.ranks is None:
        raise ArgumentError("--ranks: got none, expected the number of ranks that draw --data")
    mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    mix.check_divides(args.ranks)
    if check is not None:
        check(args.ranks)
    for step in steps:
        yield mix.draw_lengths(args.seed, step, args.ranks)


def read_lengths(path: str, num_ranks: int | None = None) -> Lengths:
    """A JSON list of lists of integers from a file, or from standard input for '-'.

    num_ranks: what --ranks says of them. Raises ArgumentError for other content, OSError where it cannot be read.
    """
    if path == "-" and sys.stdin is None:
        raise ArgumentError("--lengths: got '-', expected a standard input that is open")
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        lengths = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--lengths: {path}: not readable as JSON: {error}") from None
    if not isinstance(lengths, list) or not lengths or not all(isinstance(lens, list) for lens in lengths):
        raise ArgumentError(f"--lengths: {path}: expected a list with a list of lengths for each rank")
    for rank, lens in enumerate(lengths):
        for length in lens:
            if type(length) is not int or not 1 <= length <= MAX_SEQUENCE_TOKENS:
                expected = f"an integer from 1 to {MAX_SEQUENCE_TOKENS}"
                raise ArgumentError(f"--lengths: {path}: rank {rank}: got {length!r}, expected {expected}")
    if num_ranks not in (None, len(lengths)):
        raise ArgumentError(f"--ranks: got {num_ranks}, expected {len(lengths)}, as --lengths has, or none")
    return lengths


def check_torch() -> None:
    """Raises ArgumentError where this installation cannot run commands that move tensors."""
    problem = torch_problem()
    if problem is not None:
        raise ArgumentError(problem)
