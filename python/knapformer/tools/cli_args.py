"""Options that commands share: numbers with bounds, the lengths or the plan to work on, how blocks are run, and where
results go. The options that a prediction depends on are in cost_args."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from knapformer import ArgumentError, DataMix, Plan, StepPlan, solver_names
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.installed_torch import torch_problem
from knapformer.json_file import parse_json

T = TypeVar("T")
MAX_RANKS = 1 << 20
Lengths = list[list[int]]  # for each rank the lengths of its sequences, in tokens


def _bounded(kind: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")

    return parse


def integer(low: int, high: int) -> Callable[[str], int]:
    return _bounded(int, lambda value: low <= value <= high, f"an integer from {low} to {high}")


def number(low: float, inclusive: bool = True) -> Callable[[str], float]:
    def fits(value: float) -> bool:
        return math.isfinite(value) and (value > low or (inclusive and value == low))

    return _bounded(float, fits, f"a finite number {'>=' if inclusive else '>'} {low:g}")


def counts(text: str, argument: str, high: int) -> list[int]:
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
        if not (item.isascii() and item.isdigit() and 1 <= int(item) <= high):
            raise ArgumentError(f"{argument}: got {item!r}, expected counts from 1 to {high}, such as 32,128,...,2048")
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
    if text in ("low", "default", "high"):
        return text
    return _bounded(int, lambda moves: 0 <= moves <= 2**62, "low, default, high, or a number of moves")(text)


def speeds(text: str) -> list[float]:
    return [number(0, inclusive=False)(speed) for speed in text.split(",")]


def add_count(
    parser: argparse._ActionsContainer, option: str, default: int, of: str, low: int = 1, high: int = 10**6
) -> None:
    """of: what is counted, for the help."""
    text = f"{of} (default {default})"
    parser.add_argument(option, type=integer(low, high), default=default, metavar="N", help=text)


def add_ranks(parser: argparse._ActionsContainer, help_text: str) -> None:
    """--ranks, None where it is not given."""
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), metavar="N", help=help_text)


def add_data(source: argparse._ActionsContainer) -> None:
    """--data, and --mix, which is the same."""
    known = f"data codes such as g2b4i256f1s0,g2b1i1024f1s0 (see below), or a mix: {', '.join(DataMix.names())}"
    source.add_argument("--data", "--mix", metavar="CODES|MIX", help=known)


#: Below the help of commands that take --data.
DATA_CODES = (
    "Data codes, gGbBiRfFsS: G ranks that each draw B samples of R x R pixels and F frames; S = 1 for a video that is "
    "compressed in time, else 0. A token is 16 x 16 pixels, times 0.96 to 1.04 of a batch, and up to 392 tokens of "
    "text a sample. Codes joined by commas take consecutive ranks, and repeat over them all."
)


def add_micro_batches(parser: argparse._ActionsContainer) -> None:
    """--micro-batches, None where it is not given: then no step is planned whole."""
    parser.add_argument(
        "--micro-batches", type=integer(1, 1 << 12), metavar="K",
        help="of an optimizer step, planned whole: a rank draws a batch for each",
    )  # fmt: skip


def add_max_tokens(parser: argparse._ActionsContainer, default: str) -> None:
    """--max-tokens-per-rank, 0 where it is not given. default: the limit that then holds, for the help."""
    parser.add_argument(
        "--max-tokens-per-rank", type=integer(1, 2**62), default=0, metavar="N",
        help=f"that a rank may hold in a micro-batch (default: {default})",
    )  # fmt: skip


#: `default` of add_max_tokens where steps may be planned whole.
UNPLANNED_PEAK = "of a step planned whole, what the fullest rank holds where it is not; else no limit"


def batches_of_step(step: int, num_micro_batches: int) -> range:
    """Which of a mix's batches a rank draws for the micro-batches of an optimizer step."""
    return range(step * num_micro_batches, (step + 1) * num_micro_batches)


def lengths_of_step(batches: Iterable[Lengths]) -> Lengths:
    """For each rank the lengths of all micro-batches, one batch after another."""
    return [[length for lens in of_rank for length in lens] for of_rank in zip(*batches, strict=True)]


def micro_batches_of_step(lengths: Lengths, count: int) -> list[Lengths]:
    """[micro-batch][rank]: each rank's sequences of a step, cut into consecutive parts of nearly equal numbers, the
    larger parts first: the given order with which plan_step compares."""

    def cut(lens: Sequence[int], part: int) -> int:
        size, num_larger = divmod(len(lens), count)
        return part * size + min(part, num_larger)

    return [[list(lens[cut(lens, k) : cut(lens, k + 1)]) for lens in lengths] for k in range(count)]


def add_model(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--model", default="flux-demo", metavar="NAME|JSON", help="named configuration or file")


def add_seed(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--seed", type=integer(0, 2**64 - 1), default=0, help="of the data (default 0)")


def add_d_model(parser: argparse._ActionsContainer, otherwise: str | None = None) -> None:
    """otherwise: what holds where the option is not given, for the help; args.d_model is then None."""
    default = 3072 if otherwise is None else None
    parser.add_argument(
        "--d-model", type=integer(1, 1 << 20), default=default, metavar="D",
        help=f"width, in features (default {otherwise or default})",
    )  # fmt: skip


def add_draw(parser: argparse._ActionsContainer) -> None:
    add_seed(parser)
    parser.add_argument(
        "--scale", type=number(0, inclusive=False), default=1.0, metavar="F", help="divides the resolutions (default 1)"
    )
    add_count(parser, "--max-text-tokens", 392, "per sample", low=0, high=1 << 20)


def add_lengths_file(source: argparse._ActionsContainer, what: str | None = None) -> None:
    """what: the help, where the file holds something else than `read_lengths` reads."""
    what = what or "JSON: lengths in tokens, a list for each rank, or a list of such steps"
    source.add_argument("--lengths", metavar="FILE|-", help=what)


def add_solver(parser: argparse.ArgumentParser) -> None:
    names = solver_names()
    parser.add_argument("--solver", default=names[0], choices=names, help=f"default {names[0]}, the planner's")


def longest_of(lengths: Lengths) -> int:
    return max((max(lens, default=0) for lens in lengths), default=0)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--dtype, --device, --no-checkpoint, --mode and --threads: how blocks are run. `run_settings` reads all but
    --mode, which is None where it is not given, since a calibration may state it."""
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp64"), help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument(
        "--no-checkpoint",
        dest="recomputes",
        action="store_false",
        help="keep activations instead of recomputing blocks",
    )
    parser.add_argument(
        "--mode", choices=("training", "lora"),
        help="what trains: all parameters (default), or adapters of PEFT on a frozen base",
    )  # fmt: skip
    add_count(parser, "--threads", 1, "per rank on the CPU", high=1024)


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of RunSettings, except num_ranks and mode. Raises ArgumentError, OSError."""
    from knapformer.adapters.named import load_config

    given = {name: getattr(args, name) for name in ("dtype", "device", "threads")}
    model = {"model": load_config(args.model), "model_name": args.model, "checkpointing": args.recomputes}
    return {**given, **model, "json_path": args.json}


def mode_of(args: argparse.Namespace, mode: str) -> str:
    """The mode in which blocks are run for a trained model of this mode. Raises ArgumentError."""
    if mode == "lora" and args.peak_tflops is not None:
        raise ArgumentError("--peak-tflops: got one with mode lora, expected none: HFU is of training all parameters")
    return "lora" if mode == "lora" else "training"


def add_results(parser: argparse.ArgumentParser, device: str) -> None:
    """--peak-tflops (of `device`), --json and --report: the figures of measured steps, and where they go."""
    parser.add_argument("--peak-tflops", type=number(0, inclusive=False), metavar="F", help=f"of {device}; reports HFU")
    parser.add_argument("--json", metavar="FILE", help="writes the results as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes an HTML file that opens offline: plan and step times")


def mix_and_ranks(args: argparse.Namespace) -> tuple[DataMix, int]:
    """--data, and the ranks that draw it: --ranks, by default those of the mix. Raises ArgumentError."""
    draw = {"resolution_scale": args.scale, "max_text_tokens": args.max_text_tokens} if "scale" in args else {}
    mix = DataMix.parse(args.data, **draw)
    num_ranks = mix.num_ranks if args.ranks is None else args.ranks
    mix.check_divides(num_ranks)
    return mix, num_ranks


def add_plan(source: argparse._ActionsContainer) -> None:
    """--from, in args.plan: the file that `read_plan` reads."""
    source.add_argument("--from", dest="plan", metavar="PLAN.json", help="a plan that knapformer plan --json wrote")


def read_plan(path: str) -> Plan | StepPlan:
    """The plan of a micro-batch, or of a step of several. Raises ArgumentError, OSError."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    content: Any = None
    with contextlib.suppress(ArgumentError):  # Plan.from_json reports what is no JSON
        content = parse_json(text.encode(), path)
    is_step = isinstance(content, dict) and str(content.get("format")).startswith("knapformer.step_plan/")
    return StepPlan.from_json(text) if is_step else Plan.from_json(text)


def read_lengths(path: str, num_ranks: int | None = None) -> list[Lengths]:
    """Lengths of steps, from JSON: a list of integers for each rank, or a list of such steps; '-' is standard input.

    num_ranks: as --ranks gives it. Raises ArgumentError for other content, OSError where it cannot be read.
    """
    if path == "-" and sys.stdin is None:
        raise ArgumentError("--lengths: got '-', expected a standard input that is open")
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    given = parse_json(content, f"--lengths: {path}")
    if not isinstance(given, list) or not given or not all(isinstance(item, list) for item in given):
        got = type(given).__name__
        if isinstance(given, list):
            got = next(
                (f"a list with {type(item).__name__}" for item in given if type(item) is not list), "an empty list"
            )
        raise ArgumentError(
            f"--lengths: {path}: got {got}, expected a list with a list of lengths for each rank, or steps of them"
        )
    of_steps = any(isinstance(item, list) for items in given for item in items)
    steps = given if of_steps else [given]
    expected = len(steps[0]) if num_ranks is None else num_ranks
    for number, step in enumerate(steps):
        where = f"--lengths: {path}: " + (f"step {number}: " if of_steps else "")
        if not step or not all(isinstance(lens, list) for lens in step):
            raise ArgumentError(f"{where}expected a list with a list of lengths for each rank")
        _check_lengths(step, where)
        if len(step) != expected and num_ranks is None:
            raise ArgumentError(f"{where}got {len(step)} ranks, expected {expected}, as the first step has")
        if len(step) != expected:
            raise ArgumentError(f"--ranks: got {num_ranks}, expected {len(step)}, as --lengths has, or none")
    return steps


def steps_from(args: argparse.Namespace, num_ranks: int | None, first: int, count: int) -> list[Lengths]:
    """All steps of --lengths, of which `count` are used, beginning with `first`. Raises ArgumentError, OSError."""
    steps = read_lengths(args.lengths, num_ranks)
    if first + count > len(steps):
        option, got, maximum = (
            ("--step", first, len(steps) - 1) if first >= len(steps) else ("--steps", count, len(steps) - first)
        )
        raise ArgumentError(f"{option}: got {got}, expected at most {maximum}: --lengths has {len(steps)}")
    return steps


def _check_lengths(step: Lengths, where: str) -> None:
    for rank, lens in enumerate(step):
        for length in lens:
            if type(length) is not int or not 1 <= length <= MAX_SEQUENCE_TOKENS:
                expected = f"an integer from 1 to {MAX_SEQUENCE_TOKENS}"
                raise ArgumentError(f"{where}rank {rank}: got {length!r}, expected {expected}")


def check_torch() -> None:
    """Raises ArgumentError where this installation cannot run commands that move tensors."""
    problem = torch_problem()
    if problem is not None:
        raise ArgumentError(problem)


# Options that were given beside others with which nothing reads them: they are refused, and not ignored.

#: How batches are drawn from data codes.
OF_DRAW = ("seed", "scale", "max_text_tokens")


def remember_defaults(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """For `refuse`: what each option of these is where it is not given. names: as in the parsed arguments."""
    parser.set_defaults(defaults={name: parser.get_default(name) for name in names})


def refuse(args: argparse.Namespace, names: Iterable[str], beside: str) -> None:
    """An option that is given its default cannot be told from one that is not given. Raises ArgumentError."""
    for name in names:
        if getattr(args, name) != args.defaults[name]:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option}: got one beside {beside}, with which nothing uses it, expected none")
