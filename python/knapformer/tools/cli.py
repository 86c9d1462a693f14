"""The command `knapformer`: its subcommands, each defined beside the code that does its work, and their exit statuses.

An error in the input ends in one line on standard error and exit status 2, before any work is done. A later error
ends in one line and status 1. A command's `run` may return another status (doctor). `plan` needs no torch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import knapformer
from knapformer import ArgumentError, StateError, _core
from knapformer.tools.calibrate import command as calibrate
from knapformer.tools.doctor import command as doctor
from knapformer.tools.files import OutputError, check_outputs
from knapformer.tools.launch import speaks, started_here
from knapformer.tools.plan import command as plan_command
from knapformer.tools.replay import command as replay
from knapformer.tools.simulate import command as simulate

_COMMANDS = (doctor, plan_command, calibrate, simulate, replay)


class _Parser(argparse.ArgumentParser):
    """Subcommands' parsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="knapformer", description="Load balancing for diffusion transformers.")
    built = f"for torch {_core.torch_version}" if _core.torch_version else "planner only: built without torch"
    version = f"knapformer {knapformer.__version__} ({built})"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser().parse_args(given)
    except SystemExit as asked:  # argparse raises it for wrong arguments, --help and --version
        return int(asked.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may not be valid text
    try:
        args.argv = given  # for ranks, which run the command again
        check_outputs(args)
        status = args.run(args)
        print(end="", flush=True)
    except OutputError as error:
        return _complain(args.command, f"{error.filename}: {error.strerror}", 1)
    except OSError as error:
        if error.filename is not None:  # a file could not be read
            return _complain(args.command, f"{error.filename}: {error.strerror}", 2)
        # What was not printed is dropped: the interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
            return 1
        return _complain(args.command, error.strerror or error, 1)
    except (ArgumentError, StateError) as error:
        return _complain(args.command, error, 2 if isinstance(error, ArgumentError) else 1)
    except KeyboardInterrupt:
        return _complain(args.command, "interrupted", 130)
    return int(status or 0)


def _complain(command: str, error: object, status: int) -> int:
    # All ranks see the same input, so rank 0 alone reports an error in it. For ranks that run_on_ranks started, the
    # process that started them reports.
    if speaks() or (status != 2 and not started_here()):
        print(f"knapformer {command}: {_one_line(error)}", file=sys.stderr)
    return status


def _one_line(message: object) -> str:
    """A long message loses its middle, since it says at its end what was expected."""
    line = " ".join(str(message).split())
    return line if len(line) <= 800 else f"{line[:400]} ... {line[-400:]}"
