"""What each rank of a plan computes, run on one device and timed; and from its seconds to the figures of a step.

A rank's block is run in two phases, between which ranks that share sequences meet: the per-token layers over its chunks
(the whole block, with attention replaced by passing its queries on), and attention over whole sequences on the rank's
heads. What lies between the phases on a cluster, the exchanges, is modelled and not run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from knapformer import Cluster, MicroBatchTime, Plan, TrainedModel, predict_micro_batch
from knapformer._core import head_shares
from knapformer._torch import MaskTables
from knapformer.adapters.named import ModelConfig
from knapformer.attention.kernels import kernel_for
from knapformer.models.packed_step import Attend, PackedStep
from knapformer.tools.measure.blocks import kinds_of, passes
from knapformer.tools.measure.timing import Work, measured_rounds
from knapformer.tools.ways import OptimizerStep, means, measured, number_or_none

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


def figures(
    name: str | None, steps: Sequence[OptimizerStep], by_step: Sequence[Sequence[Sequence[RankSeconds]]],
    cluster: Cluster, model: TrainedModel, peak_tflops: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Means over the steps of the measured compute, with the waits and communication that the cluster model adds; ready
    for JSON: infinite or undefined figures become None. Work and seconds of ranks are listed by micro-batch, all steps
    one after another. name: None: every sequence at home. by_step: what was measured, [step][micro-batch][rank]."""
    # The model wants seconds of one block's forward pass.
    layers, attention = model.num_blocks * model.token_passes, model.num_blocks * model.attention_passes

    def time_of(plan: Plan, ranks: Sequence[RankSeconds]) -> MicroBatchTime:
        of_block = [
            (r.token_s / layers, r.whole_attention_s / attention, r.shared_attention_s / attention) for r in ranks
        ]
        return predict_micro_batch(plan, cluster, model.replace(routed=plan.model.routed), of_block)

    times = [list(map(time_of, step.plans, of_plans)) for step, of_plans in zip(steps, by_step, strict=True)]
    steps = [replace(step, times=of) for step, of in zip(steps, times, strict=True)]
    mean = means(steps, None)
    plans = [plan for step in steps for plan in step.plans]
    of_ranks = [ranks for of_step in by_step for ranks in of_step]
    seconds, work = [[sum(rank) for rank in ranks] for ranks in of_ranks], [plan.workload_after for plan in plans]
    busy = [k for k, plan in enumerate(plans) if plan.num_tokens > 0]  # a planned step may have empty micro-batches
    busy_work, busy_seconds = ([of[k] for k in busy] for of in (work, seconds))
    wirs = [max(of) / min(of) if min(of) > 0 else math.inf for of in busy_seconds]
    return {
        **measured(name, steps, [step.figures["total_s"] for step in steps], model, peak_tflops),
        **{term: mean[term] for term in (*MicroBatchTime.labels(), "compute_s", "fsdp_bytes")},
        "slowest_rank_s": math.fsum(max(of) for of in seconds) / len(steps),
        "measured_wir": number_or_none(statistics.fmean(wirs)),
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


class _PassThrough(torch.autograd.Function):
    """Replaces attention without computing it: q becomes o, and o's gradient goes to q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.num_kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_kv = grad[:, : ctx.num_kv_heads]
        return grad, of_kv, of_kv


class _TokenLayers(PackedStep):
    """A step whose blocks compute everything but attention."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Tensor:
        return cast(Tensor, _PassThrough.apply(q, k, v))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Piece:
    """One measurement of a round: of which share, what it counts towards, and how often the model has it."""

    share: int
    field: str  # of RankSeconds
    times: int
    prepare: Callable[[], Work]


class Replayer:
    """A model's blocks, one of each kind, on a device."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, checkpointing: bool, mode: str = "training"
    ) -> None:
        self._config, self._device, self._dtype, self._checkpointing = config, device, dtype, checkpointing
        self._kinds = kinds_of(config, device, dtype, mode)

    @property
    def num_parameters(self) -> int:
        """Of all blocks of the model."""
        return sum(kind.count * parameter.numel() for kind in self._kinds for parameter in kind.block.parameters())

    def pieces_of(self, shares: Sequence[RankShare]) -> list[Piece]:
        pieces: list[Piece] = []
        for index, share in enumerate(shares):
            if share.chunk_lens:
                step = _TokenLayers(share.chunk_lens, self._config.d_model)
                for kind in self._kinds:
                    work = partial(kind.work, step, share.text_lens, self._checkpointing)
                    pieces.append(Piece(index, "token_s", kind.count, work))
            for attention in share.attention:
                field = "whole_attention_s" if attention.degree == 1 else "shared_attention_s"
                pieces.append(Piece(index, field, self._config.depth, partial(self._attention_work, attention)))
        return pieces

    def run(
        self, pieces: Sequence[Piece], num_shares: int, num_rounds: int, num_warmup_rounds: int = 1,
        on_done: Callable[[], None] = lambda: None,
    ) -> list[RankSeconds]:  # fmt: skip
        """Of each share over all blocks of the model, forward, recompute and backward, medians of the rounds.

        on_done is called after each piece in each round.
        """
        prepare = [piece.prepare for piece in pieces]
        rounds = measured_rounds(prepare, self._device, num_rounds, num_warmup_rounds, on_done)
        totals: list[dict[str, float]] = [{} for _ in range(num_shares)]
        for piece, times in zip(pieces, rounds, strict=True):
            of = totals[piece.share]
            of[piece.field] = of.get(piece.field, 0.0) + piece.times * statistics.median(times)
        return [RankSeconds(**total) for total in totals]

    def _attention_work(self, share: AttentionShare) -> Work:
        def rows(lens: Sequence[int], num_heads: int) -> Tensor:
            shape = (sum(lens), num_heads, self._config.head_dim)
            return torch.randn(shape, device=self._device, dtype=self._dtype, requires_grad=True)

        queries, keys = [of.num_queries for of in share.rows], [of.num_keys for of in share.rows]
        q, k, v = rows(queries, share.num_heads), rows(keys, share.num_kv_heads), rows(keys, share.num_kv_heads)
        masks, lens, *parts = zip(*share.rows, strict=True)
        attend = kernel_for(masks[0] if len(set(masks)) == 1 else None)
        what: tuple[Any, ...] = (queries, keys, [of.first_query - of.first_key for of in share.rows])
        if attend.takes_masks:
            what = (MaskTables(masks, lens, list(zip(*parts, strict=True))),)
        return passes(attend, (q, k, v, *what), self._checkpointing)
