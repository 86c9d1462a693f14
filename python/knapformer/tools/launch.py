"""Runs a command on ranks, each with its device, in one group: ranks that torchrun has started, or local ones that its
launcher starts here.

A rank that is started here runs the command again, with the same arguments. A rank that fails hands the reason to the
launcher, and the command ends with one line of error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from knapformer import ArgumentError, StateError

if TYPE_CHECKING:
    import torch

_RUN_ID = "knapformer"  # torchrun's id of a run: marks ranks that were started here
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def started_here() -> bool:
    """Whether this process is a rank that run_on_ranks has started."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == _RUN_ID


def speaks() -> bool:
    """Whether this process reports what all ranks of a command find in the same way."""
    return os.environ.get("RANK", "0") == "0" and not started_here()


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


def check_device(name: str, num_local: int) -> int:
    """How many GPUs this machine has. Raises ArgumentError where name is "cuda" and they are too few for its ranks."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and num_gpus < num_local:
        raise ArgumentError(f"device: got 'cuda', expected 'cpu': {num_gpus} GPUs for {num_local} ranks")
    return num_gpus


def use_device(name: str, local_rank: int = 0, num_local: int = 1) -> torch.device:
    """The device of this rank among the ranks of its machine, made the current device.

    name: "auto" (CUDA where there is a GPU for each), "cpu" or "cuda". On the CPU it computes in one thread, or as many
    as OMP_NUM_THREADS says. Raises ArgumentError where CUDA lacks devices.
    """
    import torch

    num_gpus = check_device(name, num_local)
    if name == "cuda" or (name == "auto" and num_gpus >= num_local):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if name == "auto" and num_gpus > 0 and local_rank == 0:
        print(f"knapformer: runs on the CPU, as it sees {num_gpus} GPUs for {num_local} ranks", file=sys.stderr)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


@contextlib.contextmanager
def joined_group(name: str) -> Iterator[torch.device]:
    """Joins the world that torchrun's environment variables describe; yields this rank's device."""
    import torch.distributed as dist

    device = use_device(name, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    yield device
    # Not after an error: taking groups apart waits for collectives in flight, which other ranks may never join.
    gc.collect()  # frees objects that still hold a group
    dist.destroy_process_group()


def run_on_ranks(args: argparse.Namespace, num_ranks: int, work: Callable[[torch.device], None]) -> None:
    """Runs `work` on every rank, with its device, in one group; rank 0 reports. The process of a rank ends here.

    args: of the command, with its command line in args.argv. Raises ArgumentError where this machine lacks the devices,
    and a StateError of one line where a rank fails.
    """
    started = started_ranks()
    num_local = num_ranks if started is None else int(os.environ.get("LOCAL_WORLD_SIZE", started))
    check_device(args.device, num_local)
    if started is None:
        _start_ranks(args.argv, num_local)
        return
    try:
        with joined_group(args.device) as device:
            work(device)
    except BaseException as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        if not started_here():
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"knapformer {args.command}: rank {os.environ['RANK']} failed: {reason}", file=sys.stderr)
        _leave(1)
    _leave(0)


def _start_ranks(argv: Sequence[str], num_ranks: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher would log, with a traceback, what its errors say already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with tempfile.TemporaryDirectory(prefix="knapformer-") as log_dir:
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=_RUN_ID, rdzv_backend="c10d",
                rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0,
                # Not SIGINT, which would be handed on: ranks in which Python still starts would print a traceback.
                signals_to_handle="SIGTERM,SIGHUP,SIGQUIT", logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            )  # fmt: skip
            elastic_launch(config, sys.executable)("-m", "knapformer", *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        recorded = failure.message  # what the rank said of itself; a text of the launcher where it was killed
        reason = recorded["message"] if isinstance(recorded, dict) else f"exit status {failure.exitcode}"
        raise StateError(f"rank {rank} failed: {str(reason).strip().splitlines()[0]}") from None
    except SignalException as error:  # the launcher has ended the ranks
        raise StateError(f"ended by {error.sigval.name}") from None


def _leave(status: int) -> NoReturn:
    """Ends this rank without the interpreter's own end.

    The interpreter's end would destroy the process groups. With collectives in flight it could wait for ranks that wait
    for this one, and even when all is done it sometimes aborts in one of the groups' threads.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
