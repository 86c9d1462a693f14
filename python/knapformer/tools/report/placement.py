"""Where every sequence lies, as segments of stacked bars, one a rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from knapformer import Plan

MAX_RANKS = 128  # more are not drawn


@dataclass(frozen=True)
class Segment:
    """The part of a sequence that lies on a rank. Where sequence is None, those of several short ones."""

    rank: int
    sequence: int | None
    seq_len: int  # tokens of the whole sequence; of merged ones, their mean
    num_tokens: int  # that lie here
    work: float  # FLOPs of one block forward that are done here
    hover: str


@dataclass(frozen=True)
class Bars:
    before: list[Segment]
    after: list[Segment]
    num_merged: int  # sequences or chunks that are drawn together with others


def bars_of(plan: Plan, max_segments: int = 5000) -> Bars:
    """The longest is first in every bar. Above max_segments, each bar keeps its longest and merges the others."""
    homes = [(home, length) for home, lens in enumerate(plan.seq_lens) for length in lens]
    before, merged_before = _fewer(
        (
            Segment(home, number, length, length, work, f"sequence {number}<br>{length:,} tokens<br>home: rank {home}")
            for number, ((home, length), work) in enumerate(zip(homes, plan.sequence_works, strict=True))
        ),
        max_segments,
    )
    after, merged_after = _fewer(_chunks(plan, homes), max_segments)
    return Bars(before, after, merged_before + merged_after)


def _chunks(plan: Plan, homes: list[tuple[int, int]]) -> Iterator[Segment]:
    first_ranks, degrees = plan.first_rank_of_sequence, plan.degree_of_sequence
    for (sequence, rank, first, count), work in zip(plan.chunks, plan.chunk_works, strict=True):
        (home, length), degree, first_rank = homes[sequence], degrees[sequence], first_ranks[sequence]
        shared = f"shared by ranks {first_rank} to {first_rank + degree - 1}" if degree > 1 else "whole"
        hover = (
            f"sequence {sequence}<br>{length:,} tokens, {shared}<br>"
            f"chunk: tokens {first:,} to {first + count - 1:,} ({count:,})<br>"
            f"home: rank {home}{' (stays)' if home == rank else ''}"
        )
        yield Segment(rank, sequence, length, count, work, hover)


def _fewer(segments: Iterable[Segment], max_segments: int) -> tuple[list[Segment], int]:
    in_order = sorted((s for s in segments if s.rank < MAX_RANKS), key=lambda s: (-s.seq_len, s.sequence))
    bars: dict[int, list[Segment]] = {}
    for segment in in_order:
        bars.setdefault(segment.rank, []).append(segment)
    keep = max(1, max_segments // len(bars)) if len(in_order) > max_segments else len(in_order)
    out: list[Segment] = []
    for rank, bar in bars.items():
        out += bar[:keep]
        if rest := bar[keep:]:
            tokens, mean = sum(s.num_tokens for s in rest), round(statistics.fmean(s.seq_len for s in rest))
            hover = f"{len(rest):,} shorter sequences<br>{tokens:,} tokens here<br>at most {rest[0].seq_len:,} long"
            out.append(Segment(rank, None, mean, tokens, sum(s.work for s in rest), hover))
    return out, sum(len(bar[keep:]) for bar in bars.values())
