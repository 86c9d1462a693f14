"""What each rank of a plan computes, and from its measured seconds to the figures of a step. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from knapformer import Cluster, Plan, StepTime, TrainedModel, predict_step
from knapformer._core import head_shares
from knapformer.tools.ways import Step, means, measured, number_or_none

# Standard deviation over mean of the ranks' planned work, below which no correlation is computed.
_MIN_SPREAD_OF_WORK = 0.01


class QueryRows(NamedTuple):
    """The queries of a sequence that a rank computes, and the keys that they see."""

    mask: str
    seq_len: int
    first_query: int
    num_queries: int
    first_key: int
    num_keys: int


@dataclass(frozen=True)
class AttentionShare:
    """Sequences of one degree of which a rank computes this many heads, and these queries."""

    degree: int
    num_heads: int
    num_kv_heads: int
    rows: tuple[QueryRows, ...]


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
    lens = [length for of_rank in plan.seq_lens for length in of_rank]
    masks = plan.masks or ["full"] * len(lens)
    chunk_at = {(sequence, rank): (first, count) for sequence, rank, first, count in plan.chunks}
    shares = []
    for rank, sequences in enumerate(plan.sequences_on):
        chunks = [chunk_at[sequence, rank] for sequence in sequences]
        rows: dict[tuple[int, int, int], list[QueryRows]] = {}
        for sequence in sequences:
            degree = degrees[sequence]
            part, of_heads = divmod(rank - first_ranks[sequence], head_parts[degree])
            own = QueryRows(masks[sequence], lens[sequence], *query_parts[sequence][part][:4])
            if own.num_queries > 0:
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


class RankSeconds(NamedTuple):
    """What a rank computes in a step, over all blocks: forward, recompute and backward."""

    token_s: float = 0.0
    whole_attention_s: float = 0.0  # on sequences that lie whole there
    shared_attention_s: float = 0.0


@dataclass(frozen=True)
class Variant:
    """One way to place the sequences, and what was measured of it: for each step, each of its micro-batches."""

    name: str | None  # None: every sequence at home
    steps: Sequence[Step]
    measured: Sequence[Sequence[Sequence[RankSeconds]]]  # of each rank

    def figures(self, cluster: Cluster, model: TrainedModel, peak_tflops: float | None) -> dict[str, Any]:
        """Means over the steps of the measured compute, with the waits and communication that the cluster model adds;
        ready for JSON: infinite or undefined figures become None. Work and seconds of ranks are listed by micro-batch,
        all steps one after another."""
        # The model wants seconds of one block's forward pass.
        layers, attention = model.num_blocks * model.token_passes, model.num_blocks * model.attention_passes

        def time_of(plan: Plan, ranks: Sequence[RankSeconds]) -> StepTime:
            of_block = [
                (r.token_s / layers, r.whole_attention_s / attention, r.shared_attention_s / attention) for r in ranks
            ]
            return predict_step(plan, cluster, model.replace(routed=plan.model.routed), of_block)

        steps = [
            replace(step, times=list(map(time_of, step.plans, of_plans)))
            for step, of_plans in zip(self.steps, self.measured, strict=True)
        ]
        mean = means(steps, None)
        plans = [plan for step in self.steps for plan in step.plans]
        of_ranks = [ranks for of_step in self.measured for ranks in of_step]
        seconds, work = [[sum(rank) for rank in ranks] for ranks in of_ranks], [plan.workload_after for plan in plans]
        busy = [k for k, plan in enumerate(plans) if plan.num_tokens > 0]  # a planned step may have empty micro-batches
        busy_work, busy_seconds = ([of[k] for k in busy] for of in (work, seconds))
        topology = None if self.name is None else str(steps[0].plans[0].topology)
        of_steps = [step.figures["total_s"] for step in steps]
        return {
            **measured(self.name, topology, steps, of_steps, model, peak_tflops),
            **{term: mean[term] for term in (*StepTime.labels(), "fsdp_bytes")},
            "slowest_rank_s": math.fsum(max(of) for of in seconds) / len(steps),
            "measured_wir": number_or_none(statistics.fmean(_max_over_min(of) for of in busy_seconds)),
            "exchanged_bytes": mean["route_bytes"] + mean["attention_bytes"],
            "correlation": correlation(busy_work, busy_seconds),
            "spread": spread(busy_work, busy_seconds),
            "work_per_rank": work,
            "seconds_per_rank": of_ranks,
        }


def correlation(work: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> float | None:
    """Correlation of planned work and measured seconds, each over its micro-batch's mean; None where one is even."""
    planned, measured = ([v / statistics.fmean(of) for of in values for v in of] for values in (work, seconds))
    if statistics.pstdev(planned) < _MIN_SPREAD_OF_WORK:
        return None
    return None if statistics.pstdev(measured) == 0 else statistics.correlation(planned, measured)


def spread(work: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> float:
    """How much the measured seconds per planned FLOP differ between ranks: standard deviation over mean."""
    pairs = (pair for of in zip(work, seconds, strict=True) for pair in zip(*of, strict=True))
    per_flop = [s / w for w, s in pairs if w > 0]
    return statistics.pstdev(per_flop) / statistics.fmean(per_flop)


def _max_over_min(values: Sequence[float]) -> float:
    return max(values) / min(values) if min(values) > 0 else math.inf
