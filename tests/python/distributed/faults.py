"""What the other ranks see when one of them fails, on real ranks that really end (test_faults.py).

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
from typing import Any, NamedTuple

FAULTS = ("kill", "stop", "exception", "return", "sigint", "sigterm", "skipped", "doubled", "shape")
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

    def is_due(self, call: str) -> bool:
        return self._rank == self._case.victim and (call, self.step) == (self._case.call, STEP_OF_FAULT)

    def times(self, call: str) -> int:
        """How often to make this call. Commits the faults that end or stop the process, raise, or leave the loop."""
        if not self.is_due(call):
            return 1
        self._report.send(("fault", time.time()))
        fault = self._case.fault
        if fault in ("kill", "stop", "sigint", "sigterm"):
            name = {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(fault, fault.upper())
            os.kill(os.getpid(), getattr(signal, name))
        if fault == "exception":
            raise OSError("this rank's disk is full")
        if fault == "return":
            raise _Left
        return {"skipped": 0, "doubled": 2}.get(fault, 1)

    def lengths(self, step: int) -> list[int]:
        """The lengths of a step's data, which a loader takes ahead of the step."""
        if (*self._case[:2], self._case.victim, STEP_OF_FAULT) != ("shape", "loader", self._rank, step):
            return _lengths(self._rank, step)
        self._report.send(("fault", time.time()))
        return [-1]

    def width(self, call: str, width: int) -> int:
        return width + 1 if self._case.fault == "shape" and self.is_due(call) else width


def _lengths(rank: int, step: int) -> list[int]:
    even, odd = [[400, 3], [5], [7, 2], [11]], [[4, 300], [6, 9], [8], [12, 1]]
    return (odd if step % 2 else even)[rank % 4]


def _train(rank: int, case: Case, victim: _Victim) -> None:
    import torch
    from balancer_checks import causal_free_attention

    from knapformer import BalancedLoader, SequenceBalancer

    balancer = SequenceBalancer(TOPOLOGIES[case.bags, case.num_ranks], effort="low", d_model=D_MODEL)
    steps = iter(range(NUM_STEPS))
    batches: Iterator[Any] | None = None
    if case.call == "loader":
        data = ({"seq_lens": victim.lengths(step)} for step in range(NUM_STEPS))
        batches = iter(BalancedLoader(data, balancer, empty=lambda: {"seq_lens": []}))
    for step in steps:
        victim.step = step
        if batches is not None:
            for _ in range(victim.times("loader")):
                batch, _plan = next(batches)
            lens = batch["seq_lens"]
        else:
            lens = _lengths(rank, step)
            for _ in range(victim.times("plan")):
                balancer.plan_routing(lens, victim.width("plan", D_MODEL))
            assert case.bags == "flat" or max(balancer.plan.degree_of_sequence) > 1
        tokens = sum(balancer.seq_lens.tolist())
        width = HEADS * HEAD_DIM
        x = torch.randn(tokens, victim.width("route", width), requires_grad=True)
        moved = x
        for _ in range(victim.times("route")):
            moved = balancer.route(x)[1]
        if moved.shape[0] != int(balancer.plan.tokens_after[rank]) or moved.shape[1] != width:
            moved = torch.zeros(int(balancer.plan.tokens_after[rank]), width, requires_grad=True)
        q = moved.reshape(-1, HEADS, HEAD_DIM)
        o = q
        for _ in range(victim.times("attention")):
            k = q.repeat(1, 1, 2) if victim.width("attention", 0) else q
            o = balancer.attention(k, k, k, causal_free_attention)[..., :HEAD_DIM]
        y = o.flatten(1)
        back = y
        for _ in range(victim.times("reverse")):
            wide = torch.nn.functional.pad(y, (0, 1)) if victim.width("reverse", 0) else y
            back = balancer.reverse_route(wide)[1]
        if case.call == "backward":
            if victim.width("backward", 0):
                back.backward(torch.ones_like(back).double())  # refused by torch itself, on this rank alone
            for i in range(victim.times("backward")):
                back.backward(torch.ones_like(back), retain_graph=i == 0)
        else:
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
    for rank in [*others, case.victim] if case.fault in ("stop", "skipped", "doubled") else others:
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
        named = f"rank {case.victim}" if rank != case.victim else "rank "
        if named not in outcome.message:
            return f"rank {rank} names no {named}: {outcome.message}"
    return ""
