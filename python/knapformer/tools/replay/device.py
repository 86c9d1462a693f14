"""Runs shares on a device and times them. Needs torch.

A rank's block is run in two phases, between which ranks that share sequences meet: the per-token layers over its chunks
(the whole block, with attention replaced by passing its queries on), and attention over whole sequences on the rank's
heads. What lies between the phases on a cluster, the exchanges, is modelled and not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from knapformer._torch import MaskTables
from knapformer.adapters.config import ModelConfig
from knapformer.models.attention import kernel_for
from knapformer.models.step import Attend, PackedStep
from knapformer.tools.measure.blocks import build_kinds, passes
from knapformer.tools.measure.timing import Work, measured_rounds, relative_spread
from knapformer.tools.replay.shares import AttentionShare, RankSeconds, RankShare


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
class _Piece:
    """One measurement: of which share, what it counts towards, and how often the model has it."""

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
        self._kinds = build_kinds(config, device, dtype, mode)

    @property
    def num_parameters(self) -> int:
        """Of all blocks of the model."""
        return sum(kind.count * parameter.numel() for kind in self._kinds for parameter in kind.block.parameters())

    def num_measurements(self, shares: Sequence[RankShare]) -> int:
        """The number of measurements in a round."""
        return len(self._pieces_of(shares))

    def _pieces_of(self, shares: Sequence[RankShare]) -> list[_Piece]:
        pieces: list[_Piece] = []
        for index, share in enumerate(shares):
            if share.chunk_lens:
                step = _TokenLayers(share.chunk_lens, self._config.d_model)
                for kind in self._kinds:
                    work = partial(kind.work, step, share.text_lens, self._checkpointing)
                    pieces.append(_Piece(index, "token_s", kind.count, work))
            for attention in share.attention:
                field = "whole_attention_s" if attention.degree == 1 else "shared_attention_s"
                pieces.append(_Piece(index, field, self._config.depth, partial(self._attention_work, attention)))
        return pieces

    def run(
        self,
        shares: Sequence[RankShare],
        num_rounds: int,
        num_warmup_rounds: int = 1,
        on_done: Callable[[], None] = lambda: None,
    ) -> tuple[list[RankSeconds], float | None]:
        """Seconds of each share over all blocks of the model, forward, recompute and backward, medians of the rounds;
        and the median spread between rounds, relative, where there are several.

        on_done is called after each measurement: num_measurements times in a round.
        """
        pieces = self._pieces_of(shares)
        rounds = measured_rounds(
            [piece.prepare for piece in pieces], self._device, num_rounds, num_warmup_rounds, on_done
        )
        totals: list[dict[str, float]] = [{} for _ in shares]
        for piece, times in zip(pieces, rounds, strict=True):
            of = totals[piece.share]
            of[piece.field] = of.get(piece.field, 0.0) + piece.times * statistics.median(times)
        noise = statistics.median(map(relative_spread, rounds)) if rounds and num_rounds > 1 else None
        return [RankSeconds(**total) for total in totals], noise

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
