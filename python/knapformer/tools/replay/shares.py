"""What each rank of a plan computes: its chunks, and its heads of whole sequences. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knapformer import Plan
from knapformer._core import head_shares


@dataclass(frozen=True)
class AttentionShare:
    """Sequences of one degree of which a rank computes this many heads."""

    degree: int
    num_heads: int
    num_kv_heads: int
    seq_lens: tuple[int, ...]  # of the whole sequences


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
    seq_lens = [length for lens in plan.seq_lens for length in lens]
    degrees, first_ranks = plan.degree_of_sequence, plan.first_rank_of_sequence
    heads = {degree: head_shares(num_heads, num_kv_heads, degree) for degree in set(degrees)}
    chunk_at = {(sequence, rank): (first, count) for sequence, rank, first, count in plan.chunks}
    shares = []
    for rank, sequences in enumerate(plan.sequences_on):
        chunks = [chunk_at[sequence, rank] for sequence in sequences]
        lens: dict[tuple[int, int, int], list[int]] = {}
        for sequence in sequences:
            degree = degrees[sequence]
            key = (degree, *heads[degree][rank - first_ranks[sequence]])
            lens.setdefault(key, []).append(seq_lens[sequence])
        shares.append(
            RankShare(
                tuple(count for _, count in chunks),
                tuple(
                    text_tokens[sequence] if text_beside else min(max(text_tokens[sequence] - first, 0), count)
                    for sequence, (first, count) in zip(sequences, chunks, strict=True)
                ),
                tuple(AttentionShare(*key, tuple(of)) for key, of in lens.items() if key[1] > 0),
            )
        )
    return shares
