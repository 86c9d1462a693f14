"""Runs a function on several real ranks over Gloo: the launcher of every test that needs more than one process.

    def check(rank: int, world_size: int) -> Any: ...      # at module level; may use torch.distributed

    results = run_ranks(check, world_size=2)               # of each rank, in rank order

Ranks are forked once a call, from a process that has imported torch, and diffusers where tests here use it: that takes
milliseconds, where an interpreter needs seconds to import them. An exception on any rank fails the call with that
rank's traceback; ranks that do not come back in time are killed, with the stacks of where they hang.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

GROUP_TIMEOUT_S = 60
_IMPORTED = ("torch", "torch.distributed", "torch.distributed.fsdp", "knapformer.balancer")
# Modules that take a rank two to four seconds more to import. Imported beforehand only if a collected test uses them.
_IMPORTED_WHERE_USED = ("torch._dynamo", "diffusers.models.transformers.transformer_flux", "knapformer.adapters.named")


def error_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and the words of the project's error that a call raises, and the seconds until then."""
    from knapformer import ArgumentError, StateError  # not by the process that ranks are forked from

    begin = time.monotonic()
    try:
        call()
    except (ArgumentError, StateError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "nothing was raised", time.monotonic() - begin


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on `world_size` processes with a default Gloo group. Returns what each rank
    returned (pickled).

    Each rank computes with one thread. env: set on each rank before `fn`, after the import of torch. timeout_s: for the
    whole call.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *(name for name in _IMPORTED_WHERE_USED if name in sys.modules)])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world_size)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, args, folder, pipes[rank][1], group_timeout_s, env or {}),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        # For the process that ranks are forked from: the first start() below starts it.
        with _environment({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}):
            for process in processes:
                process.start()
        for _, sender in pipes:
            sender.close()
        try:
            pids = [process.pid or 0 for process in processes]
            return _collect([receiver for receiver, _ in pipes], pids, folder, timeout_s)
        finally:
            for receiver, _ in pipes:
                receiver.close()  # lets the rank go
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], pids: list[int], folder: str, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
    open_ranks = dict(enumerate(receivers))
    while open_ranks:
        # Once a rank has failed the others are likely to wait for it in vain.
        left_s = (deadline - datetime.datetime.now()).total_seconds() if not failures else 10.0
        ready = wait(list(open_ranks.values()), timeout=max(left_s, 0))
        if not ready:
            for rank in open_ranks:
                os.kill(pids[rank], signal.SIGUSR1)
            time.sleep(0.5)
            failures += [f"rank {rank} did not come back:\n{_stack_of(folder, rank)}" for rank in open_ranks]
            break
        for rank, receiver in list(open_ranks.items()):
            if receiver not in ready:
                continue
            del open_ranks[rank]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except (EOFError, ConnectionResetError):
                ok, value = False, "ended without a result (crashed?)\n" + _stack_of(folder, rank)
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
    if failures:
        raise AssertionError("\n".join(failures))
    return [results[rank] for rank in sorted(results)]


def _stack_of(folder: str, rank: int) -> str:
    with contextlib.suppress(OSError), open(f"{folder}/stack{rank}") as file:
        return file.read()
    return ""


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tcp_store(rank: int, world_size: int, port_path: str, timeout: datetime.timedelta) -> Any:
    """The store that launchers use. Rank 0 serves it on a free port, and writes the port's number into a file."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        with open(f"{port_path}.new", "w") as file:
            file.write(str(store.port))
        os.rename(f"{port_path}.new", port_path)
        return store
    while not os.path.exists(port_path):
        time.sleep(0.01)
    with open(port_path) as file:
        port = int(file.read())
    return TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: str,
    pipe: Connection,
    group_timeout_s: float,
    env: dict[str, str],
) -> None:
    os.environ.update(env)
    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            timeout = datetime.timedelta(seconds=group_timeout_s)
            store = _tcp_store(rank, world_size, f"{folder}/port", timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            # Not pipe.send: that hands a tensor over as a file which ends with this process.
            pipe.send_bytes(pickle.dumps((True, fn(rank, world_size, *args))))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    # Rank 0 serves the store, which a slower rank may still need to join the group: nobody leaves before all are done.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    # Skips the interpreter's normal exit, in which a group whose ranks raised in the middle of a collective waits for
    # its timeout.
    os._exit(0)
