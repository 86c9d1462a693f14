"""All options of the commands, each defined once: its type, default and help. A command takes those that it reads."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from knapformer import ArgumentError, Cluster, DataMix, solver_names
from knapformer._core import DEFAULT_GAMMA, MASK_FORMS
from knapformer.installed_torch import torch_problem

T = TypeVar("T")
MAX_RANKS = 1 << 20


def _bounded(kind: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")

    return parse


def integer(low: int, high: int) -> Callable[[str], int]:
    return _bounded(int, lambda value: low <= value <= high, f"an integer from {low} to {high}")


def number(inclusive: bool = False) -> Callable[[str], float]:
    expected = f"a finite number {'>=' if inclusive else '>'} 0"
    return _bounded(float, lambda value: 0 < value < math.inf or (inclusive and value == 0), expected)


def counts(high: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        return list(map(int, text.split(",")))

    expected = f"counts from 1 to {high}, such as 32,128,512"
    return _bounded(parse, lambda values: all(1 <= value <= high for value in values), expected)


def _count(of: str, default: int, low: int = 1, high: int = 10**6) -> dict[str, Any]:
    """of: what is counted, for the help."""
    return {"type": integer(low, high), "default": default, "metavar": "N", "help": f"{of} (default {default})"}


_text = _bounded(str, bool, "a text that is not empty")  # a file's name may be any bytes
_word = _bounded(_text, str.isprintable, "printable UTF-8")
_RANKS = integer(1, MAX_RANKS)
#: Where an option is not given, its value is None unless a default is stated.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--data": {
        "type": _word, "metavar": "CODES|MIX",
        "help": f"data codes such as g2b4i256f1s0,g2b1i1024f1s0 (see below), or a mix: {', '.join(DataMix.names())}",
    },
    "--lengths": {
        "metavar": "FILE",
        "help": "lengths in tokens, a list for each rank, or a list of such batches: JSON, or a log of "
        "knapformer.record",
    },
    "--topology": {"type": _word, "action": "append", "metavar": "T", "help": "bags, such as g8n4; may be repeated"},
    "--ranks": {"type": _RANKS, "metavar": "N"},
    "--micro-batches": {
        "type": integer(1, 1 << 12), "metavar": "K",
        "help": "micro-batches of an optimizer step: a rank draws a batch for each, and steps are planned whole, too",
    },
    "--max-tokens-per-rank": {
        "type": integer(1, 2**62), "default": 0, "metavar": "N",
        "help": "the most that a rank may hold in a micro-batch (default: no limit; of a step planned whole, 1.5 times "
        "what the fullest rank draws)",
    },
    "--model": {"default": "flux-demo", "metavar": "NAME|JSON", "help": "a name (docs/commands.md), or a config.json"},
    "--seed": {"type": integer(0, 2**64 - 1), "default": 0, "help": "of the random draw (default 0)"},
    "--scale": {"type": number(), "default": 1.0, "metavar": "F", "help": "divides resolutions of --data (default 1)"},
    "--max-text-tokens": _count("the most tokens of text in a sample of --data", 392, low=0, high=1 << 20),
    "--d-model": {"type": integer(1, 1 << 20), "metavar": "D", "help": "width, in features"},
    "--solver": {"default": solver_names()[0], "choices": solver_names(), "help": f"default {solver_names()[0]}"},
    "--effort": {
        "choices": ("low", "default", "high"), "default": "default", "help": "how long the balanced solver searches"
    },
    "--gamma": {
        "type": number(inclusive=True), "default": DEFAULT_GAMMA,
        "help": f"the time of a FLOP of attention over that of another one (default {DEFAULT_GAMMA:g})",
    },
    "--calibration": {"metavar": "FILE", "help": "what calibrate --json measured, in place of --gamma"},
    "--mask": {
        "type": _word, "default": "full", "metavar": "M", "help": f"attention's, {MASK_FORMS} (default full)"
    },
    "--cluster": {
        "metavar": "NAME|FILE",
        "help": f"{', '.join(Cluster.names())} (default {Cluster.names()[0]}), published (the paper's cluster and "
        "code), or a JSON file with fields of 'cluster' and 'model'",
    },
    "--ranks-per-node": {"type": _RANKS, "metavar": "N", "help": "ranks on a node (default 8)"},
    "--dtype": {"choices": ("bf16", "fp32", "fp64"), "help": "of the model (default: bf16 on CUDA, fp32 on the CPU)"},
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "default: CUDA if there are GPUs"},
    "--no-checkpoint": {
        "dest": "recomputes", "action": "store_false", "help": "keeps activations instead of recomputing blocks"
    },
    "--mode": {
        "choices": ("training", "lora"),
        "help": "what trains: all parameters (default), or adapters of PEFT on a frozen base",
    },
    "--steps": _count("steps that are timed", 10, high=10**9),
    "--repeats": _count("repeats of each measurement, whose median counts", 3),
    "--warmup": _count("repeats before them, which do not count", 1),
    "--batch-size": _count("with --lengths: samples of a rank in a micro-batch", 4),
    "--peak-tflops": {
        "type": number(), "metavar": "F", "help": "peak of a rank's device: HFU is reported, too"
    },
    "--json": {"metavar": "FILE|-", "help": "writes the results as JSON"},
    "--report": {"metavar": "FILE", "help": "writes an HTML file that opens offline, with pictures"},
}  # fmt: skip
#: How blocks are run, how batches are drawn from data codes, and the cluster.
RUN = ("--dtype", "--device", "--no-checkpoint", "--mode")
DRAW = ("--seed", "--scale", "--max-text-tokens")
CLUSTER = ("--cluster", "--ranks-per-node")
#: Below the help of commands that take --data.
DATA_CODES = (
    "Data codes, gGbBiRfFsS: G ranks that each draw B samples of R x R pixels and F frames; S = 1 for a video that is "
    "compressed in time, else 0. A token is 16 x 16 pixels, times 0.96 to 1.04 of a batch, and up to 392 tokens of "
    "text a sample. Codes joined by commas take consecutive ranks, and repeat over them all."
)


def command(subparsers: Any, name: str, run: Callable[..., object], **given: Any) -> argparse.ArgumentParser:
    """The parser of a command. given: its help and texts."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, **given)
    parser.set_defaults(run=run, default_of=parser.get_default)
    return parser


def add(parser: argparse._ActionsContainer, *options: str, **given: Any) -> None:
    """given: in place of what the table says of these options, or what it would say."""
    for option in options:
        settings = _OPTIONS.get(option, {}) | given
        if not settings.keys() & {"type", "choices", "action"}:
            settings["type"] = _text
        parser.add_argument(option, **settings)


def add_gamma(parser: argparse.ArgumentParser) -> None:
    """--gamma, or --calibration in its place."""
    add(parser.add_mutually_exclusive_group(), "--gamma", "--calibration")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster and the model")
    add(group, *CLUSTER)
    modes = ("training", "lora", "inference")
    add(group, "--mode", choices=modes, help="what a step computes (default training)")
    add(group, "--no-checkpoint", default=None)


def check_torch() -> None:
    """Raises ArgumentError where this installation cannot run commands that move tensors."""
    problem = torch_problem()
    if problem is not None:
        raise ArgumentError(problem)


def refuse(args: argparse.Namespace, options: Iterable[str], beside: str) -> None:
    """Refuses options that were given beside others with which nothing reads them. An option that is given its default
    cannot be told from one that is not given. Raises ArgumentError."""
    for option in options:
        name = option[2:].replace("-", "_")
        if getattr(args, name) != args.default_of(name):
            raise ArgumentError(f"{option}: got one beside {beside}, with which nothing uses it, expected none")
