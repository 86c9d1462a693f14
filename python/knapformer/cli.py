"""The command `knapformer`: its subcommands, each of which lives beside what it does, and how they end.

Whatever is wrong with the input ends in one line on standard error and exit status 2, before any work is done. What
goes wrong later ends in one line and status 1. `plan` needs no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import knapformer
from knapformer import ArgumentError, StateError, plan_command, tune
from knapformer.calibrate import command as calibrate
from knapformer.predict import command as predict
from knapformer.replay import command as replay
from knapformer.report import command as report
from knapformer.simulator import command as simulate

_COMMANDS = (plan_command, simulate, tune, calibrate, replay, predict, report)


class _Parser(argparse.ArgumentParser):
    """Subcommands' parsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="knapformer", description="Load balancing for diffusion transformers.")
    parser.add_argument("--version", action="version", version=f"knapformer {knapformer.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


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
