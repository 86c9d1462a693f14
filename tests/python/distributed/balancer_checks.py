"""What checks of the balancer on real ranks share. A check is a function of (rank, world_size), called on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

Check = Callable[[int, int], None]

LENS = {2: [[3, 9, 1], [14]], 4: [[5, 2, 8], [], [30, 1], [7]]}


def own(lens: list[list[int]], rank: int) -> list[int]:
    return lens[rank]


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
