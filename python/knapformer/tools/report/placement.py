"""Where every sequence lies, as segments of stacked bars: one bar a rank, or a bag where there are many ranks."""

from __future__ import annotations

from dataclasses import dataclass

from knapformer import Plan


@dataclass(frozen=True)
class Segment:
    """Part of a sequence on a rank (or all of it, in a bag). Or, with no sequence, several small ones together."""

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
    """Largest first in every bar. Of too many, each bar keeps its largest and shows the others as one."""
    by_rank = plan.num_ranks <= max_ranks
    bags = plan.topology.bags
    bar_of_rank = list(range(plan.num_ranks))
    if not by_rank:
        for bag, ranks in enumerate(bags):
            for rank in ranks:
                bar_of_rank[rank] = bag
    num_bars = plan.num_ranks if by_rank else len(bags)
    before = _before(plan, bar_of_rank)
    after = _after_by_rank(plan) if by_rank else _after_by_bag(plan)
    before, merged_before = _fewer(before, num_bars, max_segments)
    after, merged_after = _fewer(after, num_bars, max_segments)
    return Bars("rank" if by_rank else "bag", num_bars, before, after, merged_before + merged_after)


def _homes(plan: Plan) -> list[tuple[int, int]]:
    """(home rank, length) of each sequence."""
    return [(home, length) for home, lens in enumerate(plan.seq_lens) for length in lens]


def _before(plan: Plan, bar_of_rank: list[int]) -> list[Segment]:
    works = plan.sequence_works
    return [
        Segment(
            bar_of_rank[home], sequence, length, length, works[sequence],
            f"sequence {sequence}<br>{length:,} tokens<br>home: rank {home}",
        )
        for sequence, (home, length) in enumerate(_homes(plan))
    ]  # fmt: skip


def _after_by_rank(plan: Plan) -> list[Segment]:
    homes = _homes(plan)
    first_ranks, degrees = plan.first_rank_of_sequence, plan.degree_of_sequence
    segments = []
    for (sequence, rank, first, count), work in zip(plan.chunks, plan.chunk_works, strict=True):
        home, length = homes[sequence]
        degree, first_rank = degrees[sequence], first_ranks[sequence]
        shared = f"shared by ranks {first_rank} to {first_rank + degree - 1}" if degree > 1 else "whole"
        segments.append(
            Segment(
                rank, sequence, length, count, work,
                f"sequence {sequence}<br>{length:,} tokens, {shared}<br>"
                f"chunk: tokens {first:,} to {first + count - 1:,} ({count:,})<br>"
                f"home: rank {home}{' (stays)' if home == rank else ''}",
            )
        )  # fmt: skip
    return segments


def _after_by_bag(plan: Plan) -> list[Segment]:
    works = plan.sequence_works
    bags, first_ranks, degrees = plan.bag_of_sequence, plan.first_rank_of_sequence, plan.degree_of_sequence
    segments = []
    for sequence, (home, length) in enumerate(_homes(plan)):
        first, degree = first_ranks[sequence], degrees[sequence]
        where = (
            f"ranks {first} to {first + degree - 1}, {length // degree:,} tokens each"
            if degree > 1
            else f"rank {first}"
        )
        segments.append(
            Segment(
                bags[sequence], sequence, length, length, works[sequence],
                f"sequence {sequence}<br>{length:,} tokens<br>on {where}<br>home: rank {home}",
            )
        )  # fmt: skip
    return segments


def _fewer(segments: list[Segment], num_bars: int, max_segments: int) -> tuple[list[Segment], int]:
    bars: list[list[Segment]] = [[] for _ in range(num_bars)]
    for segment in segments:
        bars[segment.bar].append(segment)
    for bar in bars:
        bar.sort(key=lambda s: (-s.seq_len, s.sequence))
    keep = max(1, max_segments // num_bars) if len(segments) > max_segments else len(segments)
    out: list[Segment] = []
    merged = 0
    for bar in bars:
        out += bar[:keep]
        rest = bar[keep:]
        if rest:
            merged += len(rest)
            tokens = sum(s.num_tokens for s in rest)
            mean = round(sum(s.seq_len for s in rest) / len(rest))
            hover = (
                f"{len(rest):,} shorter sequences<br>{tokens:,} tokens here<br>at most {rest[0].seq_len:,} tokens long"
            )
            out.append(Segment(rest[0].bar, None, mean, tokens, sum(s.work for s in rest), hover))
    return out, merged
