"""Texts of masks, made from parts of a sequence or from a function. docs/masks.md has all forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A part of a sequence: `tokens` that see each other, causally or all.

    sees: the numbers, from 0, of the other parts that they see whole. None: all parts before this one."""

    tokens: int
    causal: bool = False
    sees: Sequence[int] | None = None


def segments(parts: Iterable[Segment]) -> str:
    """The mask of a sequence that has these parts, in this order: 'c120 f1024 f4096@0'."""
    words = []
    for part in parts:
        others = "" if part.sees is None else "@" + ",".join(map(str, sorted(set(part.sees))))
        words.append(f"{'c' if part.causal else 'f'}{part.tokens}{others}")
    return " ".join(words)


def mask_of(sees: Callable[[Tensor, Tensor], Tensor], seq_len: int, max_ranges: int = 16) -> str:
    """The mask of a sequence of `seq_len` tokens by a function, as FlexAttention's mask_mod without batch and head.

    sees(query, key): whether a query sees a key; gets integer tensors that broadcast, (queries, 1) and (1, keys), and
    returns booleans. All pairs are looked at, a block of queries at a time, so keep the text of a long sequence's.
    Raises ValueError where a query sees its keys in more than max_ranges ranges, each of which costs a comparison for
    every pair that a kernel looks at. Of such a mask the number of pairs alone plans ('density:SHARE'), with a kernel
    of your own.
    """
    import torch

    key, rows = torch.arange(seq_len).unsqueeze(0), []
    for queries in torch.arange(seq_len).split(max(1, 2**24 // max(1, seq_len))):
        seen = sees(queries.unsqueeze(1), key).broadcast_to(len(queries), seq_len).to(torch.int8)
        steps = torch.nn.functional.pad(seen, (1, 1)).diff(dim=1)
        begins, ends = ((steps == step).nonzero() for step in (1, -1))
        counts = begins[:, 0].bincount(minlength=len(queries)).tolist()
        if max(counts, default=0) > max_ranges:
            worst = int(queries[0]) + counts.index(max(counts))
            raise ValueError(f"sees: got {max(counts)} ranges of keys for query {worst}, expected at most {max_ranges}")
        flat = iter(torch.stack((begins[:, 1], ends[:, 1]), 1).tolist())
        rows += [[end for pair in itertools.islice(flat, count) for end in pair] for count in counts]
    runs: list[_Run] = []
    for row, before in zip(rows, [None, *rows], strict=False):
        moves = None
        if before is not None and len(row) == len(before):
            moves = [end - end_before for end, end_before in zip(row, before, strict=True)]
        if moves is None or not {*moves} <= {0, 1} or runs[-1].moves not in (None, moves):
            runs.append(_Run(row))
        else:
            runs[-1].moves = moves
            runs[-1].num_queries += 1
    return "ranges:" + ";".join(map(str, runs))


@dataclass
class _Run:
    """Consecutive queries: begins and ends of the first one's ranges of keys, and by how much they move with each."""

    ends: list[int]
    moves: list[int] | None = None
    num_queries: int = 1

    def __str__(self) -> str:
        moves = self.moves or [0] * len(self.ends)
        texts = [f"{end}{'+' if moved else ''}" for end, moved in zip(self.ends, moves, strict=True)]
        keys = ",".join("-".join(pair) for pair in zip(texts[::2], texts[1::2], strict=True))
        return f"{self.num_queries}={keys}"
