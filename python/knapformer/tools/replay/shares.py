"""What each rank of a plan computes: its chunks, and its heads and queries of sequences. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knapformer import Plan
from knapformer._core import head_shares


@dataclass(frozen=True)
class AttentionShare:
    """Sequences of one degree of which a rank computes this many heads, and these queries."""

    degree: int
    num_heads: int
    num_kv_heads: int
    rows: tuple[tuple[int, int, int], ...]  # of each: queries, keys, and the first query, counted from the first key


@dataclass(frozen=True)
class RankShare:
    chunk_lens: tuple[int, ...]  # in row order
    text_lens: tuple[int, ...]  # text tokens of each chunk: its first ones, or those of the text beside it
    attention: tuple[AttentionShare, ...]


def shares_of(
    plan: Plan, num_heads: int, num_kv_heads: int, text_tokens: Sequence[int], text_beside: bool = False
) -> list[RankShare]:
    """The share of each rank. text_tokens: of each sequence, its first tokens or, with text_beside, tokens beside it,
    all of which go with each of its chunks.

    Raises ArgumentError where num_kv_heads does not divide num_heads.
    """
    degrees, first_ranks = plan.degree_of_sequence, plan.first_rank_of_sequence
    head_parts = {degree: degree // plan.query_parts.get(degree, 1) for degree in set(degrees)}
    heads = {degree: head_shares(num_heads, num_kv_heads, parts) for degree, parts in head_parts.items()}
    query_parts = plan.parts_of_sequence
    chunk_at = {(sequence, rank): (first, count) for sequence, rank, first, count in plan.chunks}
    shares = []
    for rank, sequences in enumerate(plan.sequences_on):
        chunks = [chunk_at[sequence, rank] for sequence in sequences]
        rows: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for sequence in sequences:
            degree = degrees[sequence]
            part, of_heads = divmod(rank - first_ranks[sequence], head_parts[degree])
            first_query, num_queries, first_key, num_keys, _ = query_parts[sequence][part]
            if num_queries > 0:
                own = (num_queries, num_keys, first_query - first_key)
                rows.setdefault((degree, *heads[degree][of_heads]), []).append(own)
        shares.append(
            RankShare(
                tuple(count for _, count in chunks),
                tuple(
                    text_tokens[sequence] if text_beside else min(max(text_tokens[sequence] - first, 0), count)
                    for sequence, (first, count) in zip(sequences, chunks, strict=True)
                ),
                tuple(AttentionShare(*key, tuple(of)) for key, of in rows.items() if key[1] > 0),
            )
        )
    return shares
