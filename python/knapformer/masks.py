"""Texts of masks, made from parts of a sequence or from a function. docs/masks.md has all forms."""

from __future__ import annotations

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

    key, runs = torch.arange(seq_len).unsqueeze(0), list[_Run]()
    for queries in torch.arange(seq_len).split(max(1, 2**24 // max(1, seq_len))):
        seen = sees(queries.unsqueeze(1), key).broadcast_to(len(queries), seq_len).to(torch.int8)
        steps = torch.nn.functional.pad(seen, (1, 1)).diff(dim=1)
        for query, row in zip(queries.tolist(), steps, strict=True):
            ends = row.nonzero().flatten().tolist()
            if len(ends) > 2 * max_ranges:
                got = f"{len(ends) // 2} ranges of keys for query {query}"
                raise ValueError(f"sees: got {got}, expected at most {max_ranges}")
            if not (runs and runs[-1].goes_on(ends)):
                runs.append(_Run(ends, ends))
    return "ranges:" + ";".join(map(str, runs))


@dataclass
class _Run:
    """Consecutive queries: begins and ends, in turn, of the first and the last one's ranges of keys, and by how much
    they move with each query."""

    ends: list[int]
    last: list[int]
    moves: list[int] | None = None
    num_queries: int = 1

    def goes_on(self, ends: list[int]) -> bool:
        """Takes the query behind it, if its ranges move as those before."""
        moves = [end - before for end, before in zip(ends, self.last, strict=False)]
        if len(ends) != len(self.last) or not {*moves} <= {0, 1} or self.moves not in (None, moves):
            return False
        self.last, self.moves = ends, moves
        self.num_queries += 1
        return True

    def __str__(self) -> str:
        moves = self.moves or [0] * len(self.ends)
        texts = [f"{end}{'+' if moved else ''}" for end, moved in zip(self.ends, moves, strict=True)]
        keys = ",".join("-".join(pair) for pair in zip(texts[::2], texts[1::2], strict=True))
        return f"{self.num_queries}={keys}"
