"""What the other ranks see when one of them ends or stops, on real ranks that really do (test_faults.py). Mistakes in a
call are those of test_errors.py.

The store is served by the process that starts the ranks, as torchrun's agent serves it, so that any rank may be the one
that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from typing import Any, NamedTuple

FAULTS = ("kill", "stop", "exception", "return", "sigint", "sigterm")
CALLS = ("plan", "route", "attention", "backward", "reverse", "loader")
TOPOLOGIES = {("flat", 2): "g2n1", ("nested", 2): "g2/1n1", ("flat", 4): "g2n2", ("nested", 4): "g4/2/1n1"}
STEP_OF_FAULT = 2  # steps repeat by then, so that ranks predict each other's calls
NUM_STEPS = 5
STOP_S = 9.0
LIMIT_S = 10.0
GROUP_TIMEOUT_S = 120.0
HEADS, HEAD_DIM = 4, 2
D_MODEL = 3072  # the width that is planned for, so large that sharing the longest sequence pays


class Case(NamedTuple):
    fault: str
    call: str
    bags: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.fault} in {self.call}, {self.bags}, {self.num_ranks} ranks"

    @property
    def victim(self) -> int:
        return self.num_ranks - 1


class Outcome(NamedTuple):
    kind: str  # of the exception; "" for none
    message: str
    time: float


class _Left(Exception):
    """The victim is to return from its loop."""


def all_cases() -> list[Case]:
    return [Case(*case) for case in itertools.product(FAULTS, CALLS, ("flat", "nested"), (2, 4))]


class _Victim:
    """Commits the case's fault at its call in STEP_OF_FAULT, if this rank is the victim; other ranks never do."""

    def __init__(self, case: Case, rank: int, report: Connection) -> None:
        self._case, self._rank, self._report = case, rank, report
        self.step = -1

    def comes_to(self, call: str) -> None:
        if self._rank != self._case.victim or (call, self.step) != (self._case.call, STEP_OF_FAULT):
            return
        self._report.send(("fault", time.time()))
        fault = self._case.fault
        if fault == "exception":
            raise OSError("this rank's disk is full")
        if fault == "return":
            raise _Left
        name = {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(fault, fault.upper())
        os.kill(os.getpid(), getattr(signal, name))


def _lengths(rank: int, step: int) -> list[int]:
    even, odd = [[400, 3], [5], [7, 2], [11]], [[4, 300], [6, 9], [8], [12, 1]]
    return (odd if step % 2 else even)[rank % 4]


def _train(rank: int, case: Case, victim: _Victim) -> None:
    import torch
    from balancer_checks import causal_free_attention

    from knapformer import BalancedLoader, SequenceBalancer

    balancer = SequenceBalancer(TOPOLOGIES[case.bags, case.num_ranks], effort="low", d_model=D_MODEL)
    batches: Iterator[Any] | None = None
    if case.call == "loader":
        data = ({"seq_lens": _lengths(rank, step)} for step in range(NUM_STEPS))
        batches = iter(BalancedLoader(data, balancer, seq_lens=itemgetter("seq_lens"), empty=lambda: {"seq_lens": []}))
    for victim.step in range(NUM_STEPS):
        if batches is not None:
            victim.comes_to("loader")
            next(batches)
        else:
            victim.comes_to("plan")
            balancer.plan_routing(_lengths(rank, victim.step))
            assert case.bags == "flat" or max(balancer.plan.degree_of_sequence) > 1
        x = torch.randn(int(balancer.seq_lens.sum()), HEADS * HEAD_DIM, requires_grad=True)
        victim.comes_to("route")
        q = balancer.route(x)[1].reshape(-1, HEADS, HEAD_DIM)
        victim.comes_to("attention")
        y = balancer.attention(q, q, q, causal_free_attention).flatten(1)
        victim.comes_to("reverse")
        back = balancer.reverse_route(y)[1]
        victim.comes_to("backward")
        back.sum().backward()


def _rank_main(rank: int, case: Case, port: int, report: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks, timeout=timeout)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _train(rank, case, _Victim(case, rank, report))
        outcome = Outcome("", "", time.time())
    except _Left:
        outcome = Outcome("", "left", time.time())
    except BaseException as error:
        # As the interpreter does with an uncaught exception: frames are freed, then exit functions run.
        outcome = Outcome(type(error).__name__, str(error), time.time())
        error.__traceback__ = None
    with contextlib.suppress(OSError):
        report.send(("outcome", outcome))
    atexit._run_exitfuncs()
    os._exit(0)


def run(case: Case) -> tuple[float, list[Outcome | None]]:
    """When the fault came, and what each rank raised; None for a rank that ended without a report."""
    from torch.distributed import TCPStore

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "knapformer.balancer", "knapformer.loader"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(case.num_ranks)]
    processes = [
        context.Process(target=_rank_main, args=(rank, case, store.port, pipes[rank][1]), daemon=True)
        for rank in range(case.num_ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    fault_time, outcomes = 0.0, [None] * case.num_ranks  # type: tuple[float, list[Outcome | None]]
    open_pipes = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
    deadline, resume = time.time() + 60, float("inf")
    try:
        while open_pipes and time.time() < deadline:
            for receiver in wait(list(open_pipes), timeout=0.1):
                rank = open_pipes[receiver]  # type: ignore[index]
                try:
                    name, value = receiver.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    del open_pipes[receiver]  # type: ignore[arg-type]
                    continue
                if name == "fault":
                    fault_time = value
                    resume = value + STOP_S if case.fault == "stop" else resume
                else:
                    outcomes[rank] = value
            if time.time() >= resume:
                os.kill(processes[case.victim].pid or 0, signal.SIGCONT)
                resume = float("inf")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return fault_time, outcomes


def problem(case: Case, fault_time: float, outcomes: list[Outcome | None]) -> str:
    """What is not as promised; empty where all is."""
    if fault_time == 0:
        return f"the fault never came: {outcomes}"
    others = [rank for rank in range(case.num_ranks) if rank != case.victim]
    for rank in [*others, case.victim] if case.fault == "stop" else others:
        outcome = outcomes[rank]
        if outcome is None:
            return f"rank {rank} ended without a word, or hangs"
        if case.fault == "stop":
            if outcome.kind:
                return f"rank {rank} raised {outcome.kind}: {outcome.message}"
            continue
        if outcome.kind not in ("StateError", "ArgumentError"):
            return f"rank {rank} raised {outcome.kind or 'nothing'}: {outcome.message}"
        if outcome.time - fault_time > LIMIT_S:
            return f"rank {rank} raised after {outcome.time - fault_time:.1f} s: {outcome.message}"
        if f"rank {case.victim}" not in outcome.message:
            return f"rank {rank} names no rank {case.victim}: {outcome.message}"
    return ""
