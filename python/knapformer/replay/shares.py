"""What each rank of a plan computes: its chunks, and its heads of whole sequences. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knapformer import Plan, WorkloadModel
from knapformer._core import head_shares


@dataclass(frozen=True)
class AttentionShare:
    """Sequences, shared by equally many ranks, of which a rank computes these heads."""

    degree: int
    num_heads: int
    num_kv_heads: int
    seq_lens: tuple[int, ...]  # of the whole sequences


@dataclass(frozen=True)
class RankShare:
    chunk_lens: tuple[int, ...]  # in row order
    text_lens: tuple[int, ...]  # how many tokens of each chunk, the first ones, are text
    attention: tuple[AttentionShare, ...]

    def work(self, workload: WorkloadModel, d_model: int, num_heads: int) -> float:
        """FLOPs of one block forward, as the plan counts them: 24 n d^2, and each head its part of attention."""
        flops = workload.work(1, d_model) - _attention_work(workload, 1, d_model)
        attention = (
            _attention_work(workload, length, d_model) * share.num_heads / num_heads
            for share in self.attention
            for length in share.seq_lens
        )
        return flops * sum(self.chunk_lens) + sum(attention)


def _attention_work(workload: WorkloadModel, length: int, d_model: int) -> float:
    return workload.gamma * workload.mask_factor * 4 * length**2 * d_model


def shares_of(plan: Plan, num_heads: int, num_kv_heads: int, text_tokens: Sequence[int]) -> list[RankShare]:
    """Of each rank. text_tokens: of each sequence, at its front.

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
                    min(max(text_tokens[sequence] - first, 0), count)
                    for sequence, (first, count) in zip(sequences, chunks, strict=True)
                ),
                tuple(AttentionShare(*key, tuple(of)) for key, of in lens.items() if key[1] > 0),
            )
        )
    return shares
