"""What checks of the balancer on real ranks share. A check is a function of (rank, world_size), called on all ranks."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from torch import Tensor

from knapformer import SequenceBalancer

Check = Callable[[int, int], None]
Call = Callable[[SequenceBalancer, int], Any]  # of (balancer, rank)
SOON_S = 30  # far from the groups' timeout, and so long that a busy machine does not matter

LENS = {2: [[3, 9, 1], [14]], 4: [[5, 2, 8], [], [30, 1], [7]]}


def causal_free_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
    """Softmax attention within each sequence, by plain products."""
    repeats = q.shape[1] // k.shape[1] if k.shape[1] else 1
    outs = []
    for qs, ks, vs in zip(*(t.split(seq_lens.tolist()) for t in (q, k, v)), strict=True):
        ks, vs = (t.repeat_interleave(repeats, dim=1) for t in (ks, vs))
        weights = torch.einsum("qhd,khd->hqk", qs, ks).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, vs))
    return torch.cat(outs) if outs else q * 1  # no rows, but with an autograd history


class Listed(torch.utils.data.Dataset[Any]):
    """A data set of these items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def failing_after(items: list[Any], error: BaseException) -> Iterator[Any]:
    yield from items
    raise error


Outcome = tuple[str, str, int, float]


def outcome_of(steps: Iterable[Any]) -> Outcome:
    """The type and the words of the error that a loop ends with, '' for none, after how many steps, and the seconds."""
    count, begin = 0, time.monotonic()
    try:
        for _ in steps:
            count += 1
    except Exception as error:
        return type(error).__name__, str(error), count, time.monotonic() - begin
    return "", "", count, 0.0


def of_all_ranks(own: Any) -> list[Any]:
    """What each rank has, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def new_group(timeout_s: float = 60) -> dist.ProcessGroup:
    """Of all ranks."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=timeout_s))


def errors_of(
    rank: int, calls: dict[str, Call], topology: str, before: Call = lambda balancer, rank: None
) -> dict[str, tuple[str, str, float]]:
    """What error_of says of each call. Each has a balancer and groups of its own, since a rank may be left waiting in
    one; `before` runs on it first, and nobody calls before all ranks are there."""
    errors = {}
    for name, call in calls.items():
        balancer = SequenceBalancer(topology, group=new_group())
        before(balancer, rank)
        dist.barrier()  # a rank that were still making its balancer would hear of the mistake there
        errors[name] = error_of(lambda call=call, balancer=balancer: call(balancer, rank))
        dist.barrier()
    return errors


def check_errors(by_rank: list[dict[str, tuple[str, str, float]]], expected: dict[str, tuple[str, str]]) -> None:
    """That every rank soon raised what is expected of each call: an error of a kind ("": of either), with these words
    (a regular expression)."""
    wrong = []
    for rank, errors in enumerate(by_rank):
        for name, (kind, message, seconds) in errors.items():
            of_kind, words = expected[name]
            if not kind or of_kind not in ("", kind) or not re.search(words, message) or seconds > SOON_S:
                wrong.append(f"rank {rank}, {name}: {kind} after {seconds:.1f} s: {message!r} lacks {words!r}")
    assert not wrong, "\n".join(wrong)


def _run(rank: int, world_size: int, checks: list[Check]) -> list[str]:
    """Runs the checks in turn; a failed one ends the spawn, since ranks are no longer in step."""
    done = []
    for check in checks:
        try:
            check(rank, world_size)
        except BaseException as error:
            raise AssertionError(f"{check.__name__} on rank {rank} of {world_size}") from error
        dist.barrier()
        done.append(check.__name__)
    return done


def run_checks(checks: list[Check], world_size: int) -> None:
    """One spawn for all of them, in order; every rank has to get through each."""
    for done in run_ranks(_run, world_size, checks, timeout_s=300):
        assert done == [check.__name__ for check in checks]
