"""Where every sequence lies, as segments of stacked bars: one bar a rank, or a bag where there are many ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from knapformer import Plan


@dataclass(frozen=True)
class Segment:
    """The part of a sequence on a rank, or a whole sequence in a bag. Where sequence is None, several short ones."""

    bar: int  # rank or bag
    sequence: int | None
    seq_len: int  # tokens of the whole sequence; of merged ones, their mean
    num_tokens: int  # that lie here
    work: float  # FLOPs of one block forward that are done here
    hover: str


@dataclass(frozen=True)
class Bars:
    unit: str  # "rank" or "bag"
    num_bars: int
    before: list[Segment]
    after: list[Segment]
    num_merged: int  # sequences or chunks that are drawn together with others


def bars_of(plan: Plan, max_ranks: int = 128, max_segments: int = 5000) -> Bars:
    """The longest is first in every bar. Above max_segments, each bar keeps its longest and merges the others."""
    bag_of_rank = {rank: bag for bag, ranks in enumerate(plan.topology.bags) for rank in ranks}
    by_rank = plan.num_ranks <= max_ranks
    bar_of_rank = {rank: rank for rank in bag_of_rank} if by_rank else bag_of_rank
    num_bars = len(set(bar_of_rank.values()))
    before, merged_before = _fewer(_before(plan, bar_of_rank), num_bars, max_segments)
    under_plan = _chunks(plan) if by_rank else _in_bags(plan, bag_of_rank)
    after, merged_after = _fewer(under_plan, num_bars, max_segments)
    return Bars("rank" if by_rank else "bag", num_bars, before, after, merged_before + merged_after)


def _before(plan: Plan, bar_of_rank: Mapping[int, int]) -> Iterator[Segment]:
    for sequence, ((home, length), work) in enumerate(zip(_homes(plan), plan.sequence_works, strict=True)):
        hover = f"sequence {sequence}<br>{length:,} tokens<br>home: rank {home}"
        yield Segment(bar_of_rank[home], sequence, length, length, work, hover)


def _chunks(plan: Plan) -> Iterator[Segment]:
    homes, first_ranks, degrees = _homes(plan), plan.first_rank_of_sequence, plan.degree_of_sequence
    for (sequence, rank, first, count), work in zip(plan.chunks, plan.chunk_works, strict=True):
        (home, length), degree, first_rank = homes[sequence], degrees[sequence], first_ranks[sequence]
        shared = f"shared by ranks {first_rank} to {first_rank + degree - 1}" if degree > 1 else "whole"
        hover = (
            f"sequence {sequence}<br>{length:,} tokens, {shared}<br>"
            f"chunk: tokens {first:,} to {first + count - 1:,} ({count:,})<br>"
            f"home: rank {home}{' (stays)' if home == rank else ''}"
        )
        yield Segment(rank, sequence, length, count, work, hover)


def _in_bags(plan: Plan, bag_of_rank: Mapping[int, int]) -> Iterator[Segment]:
    places = zip(plan.first_rank_of_sequence, plan.degree_of_sequence, plan.sequence_works, _homes(plan), strict=True)
    for sequence, (first, degree, work, (home, length)) in enumerate(places):
        shared = f"ranks {first} to {first + degree - 1}, {length // degree:,} tokens each"
        where = shared if degree > 1 else f"rank {first}"
        hover = f"sequence {sequence}<br>{length:,} tokens<br>on {where}<br>home: rank {home}"
        yield Segment(bag_of_rank[first], sequence, length, length, work, hover)


def _homes(plan: Plan) -> list[tuple[int, int]]:
    """(home rank, length) of each sequence."""
    return [(home, length) for home, lens in enumerate(plan.seq_lens) for length in lens]


def _fewer(segments: Iterable[Segment], num_bars: int, max_segments: int) -> tuple[list[Segment], int]:
    bars: list[list[Segment]] = [[] for _ in range(num_bars)]
    in_order = sorted(segments, key=lambda s: (-s.seq_len, s.sequence))
    for segment in in_order:
        bars[segment.bar].append(segment)
    keep = max(1, max_segments // num_bars) if len(in_order) > max_segments else len(in_order)
    out: list[Segment] = []
    for bar in bars:
        out += bar[:keep]
        if rest := bar[keep:]:
            tokens, mean = sum(s.num_tokens for s in rest), round(statistics.fmean(s.seq_len for s in rest))
            hover = (
                f"{len(rest):,} shorter sequences<br>{tokens:,} tokens here<br>at most {rest[0].seq_len:,} tokens long"
            )
            out.append(Segment(rest[0].bar, None, mean, tokens, sum(s.work for s in rest), hover))
    return out, sum(len(bar[keep:]) for bar in bars)
