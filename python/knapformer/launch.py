"""Starts a command's ranks with torchrun's own launcher, or joins those that torchrun has started.

A rank that is started here is python -m knapformer.launch WORKER SETTINGS_JSON: the module WORKER has
run_rank(settings_json). It exits with 1 after handing the reason to whoever started it; no traceback of its own.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from typing import NoReturn

from knapformer import ArgumentError, StateError

_TRACEBACK = "KNAPFORMER_TRACEBACK"  # in the environment: failures print theirs


def started_ranks() -> int | None:
    """How many ranks torchrun has started, where this process is one of them."""
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"} <= os.environ.keys():
        return int(os.environ["WORLD_SIZE"])
    return None


def check_ranks(asked: int | None) -> int:
    """How many ranks a command runs on: those asked for by --ranks, or those that torchrun has started.

    Raises ArgumentError where there are neither, or they differ.
    """
    started = started_ranks()
    num_ranks = asked if asked is not None else started
    if num_ranks is None:
        raise ArgumentError("--ranks: got none, expected the number of ranks to start")
    if started is not None and num_ranks != started:
        raise ArgumentError(f"--ranks: got {num_ranks}, expected {started}, as torchrun has started")
    return num_ranks


def run_on_ranks(command: str, worker: str, settings_json: str, num_ranks: int, device: str, threads: int) -> None:
    """Runs `worker`.run_rank(settings_json) on every rank; rank 0 reports.

    In a process that torchrun started it takes that rank's part, and ends the process where that fails.

    command: as failures name it. device: "auto", "cpu" or "cuda". threads: of each rank on the CPU.
    Raises ArgumentError where this machine lacks the devices, StateError, in one line, where a rank fails.
    """
    import torch

    started = started_ranks()
    num_local = num_ranks if started is None else int(os.environ.get("LOCAL_WORLD_SIZE", started))
    if device == "cuda" and torch.cuda.device_count() < num_local:
        raise ArgumentError(
            f"device: got 'cuda', expected 'cpu': {torch.cuda.device_count()} GPUs for {num_local} ranks"
        )
    if started is not None:
        try:
            importlib.import_module(worker).run_rank(settings_json)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"knapformer {command}: rank {os.environ['RANK']} failed: {reason}", file=sys.stderr)
            fail(error)
        return

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher logs what ChildFailedError says again, with a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    for name, value in {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }.items():
        os.environ.setdefault(name, value)
    try:
        with tempfile.TemporaryDirectory(prefix="knapformer-") as log_dir:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            )
            elastic_launch(config, sys.executable)("-m", "knapformer.launch", worker, settings_json)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # From the error file of `fail`; a rank that was killed leaves the launcher's own words.
        message: object = failure.message
        reason = str(message["message"] if isinstance(message, dict) else message).strip()
        if failure.exitcode > 0 and not isinstance(message, dict):
            reason = f"exit status {failure.exitcode}"
        raise StateError(f"rank {rank} failed: {reason.splitlines()[0]}") from None
    except SignalException as error:  # the launcher has ended the ranks
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise StateError(f"ended by {error.sigval.name}") from None
    except RendezvousError as error:
        raise StateError(f"the ranks could not be started: {error}") from None


def fail(error: BaseException) -> NoReturn:
    """Ends this rank with status 1. The launcher reads the reason from its error file."""
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else 1)
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    if not isinstance(error, KeyboardInterrupt):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    leave(1)


def leave(status: int) -> NoReturn:
    """Ends this rank without the interpreter's own end.

    That would take the groups apart: with collectives in flight it could wait for ranks that wait for this one, and now
    and then it aborts in a thread of theirs when all is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as knapformer.cli does
    try:
        # Inside, so that a broken installation is reported like any other failure.
        importlib.import_module(sys.argv[1]).run_rank(sys.argv[2])
    except BaseException as error:
        fail(error)
    leave(0)
