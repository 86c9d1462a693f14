"""Tokens of one kind of each sequence, apart from its others: what their blocks get, and attention of and between such
parts, also where ranks share a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.adapters.chunks import Chunks, OfSequences, RunBlock, attend_by
from knapformer.adapters.joint import JointChunks
from knapformer.attention.kernels import PackedAttention
from knapformer.attention.packed_rows import Rotation, Segments, TwoStreams
from knapformer.models.packed_step import PackedStep


@dataclass(frozen=True, eq=False, kw_only=True)
class PartChunks(Chunks):
    """What blocks get that compute the tokens of one kind of each sequence, apart from its other tokens."""

    streams: TwoStreams  # where other tokens and these lie
    parts: OfSequences
    own: PackedStep | None  # of these tokens, where none of their sequences is shared

    def through(self, blocks: nn.ModuleList, run: RunBlock, x: Tensor, *arguments: Any) -> Tensor:
        others, own = self.streams.split(x)
        return self.streams.join(others, super().through(blocks, run, own, *arguments))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(self, attn: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of q, k, v of these tokens alone. Those that travel do so in their places in the sequence, beside zeros."""
        if self.own is not None:
            return self.own.attention(q, k, v, attend_by(attn)).flatten(1)
        others = len(self.streams.text_rows)
        both = ((t.new_zeros((others, *t.shape[1:])), t) for t in (q, k, v))
        return parts_attention(attn, self.step, self.streams, self.parts, *both, reads=(None, 1))[1].flatten(1)


def part_of(chunks: JointChunks, kind: int, lens: Tensor) -> PartChunks:
    """The tokens of one kind alone, which attend to each other. lens (chunks, kinds): how many of each kind the whole
    sequence of a chunk has; they lie in the order of their kinds."""
    flags, device = chunks.kinds == kind, chunks.streams.text_rows.device
    streams = TwoStreams.of_flags(~flags, device)
    rotation = None if chunks.rotation is None else Rotation(streams.split(chunks.rotation.turns)[1])
    own_lens = chunks.step.counts_of(flags)
    own = PackedStep(own_lens, 0) if chunks.step.is_alone else None
    of_token, parts = Segments.of_lengths(own_lens, device), parts_of(lens, kind)
    return PartChunks(step=chunks.step, of_token=of_token, rotation=rotation, streams=streams, parts=parts, own=own)


def parts_of(lens: Tensor, kind: int) -> OfSequences:
    """For parts_attention: tokens of other kinds, and of this kind. lens: as in part_of."""

    def prepare(lens: Tensor, spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Any, ...]:
        keys = [torch.arange(lens.shape[1]).repeat_interleave(row) == kind for row in lens]
        queries = [flags[first : first + count] for flags, (first, count) in zip(keys, spans, strict=True)]
        places = (TwoStreams.of_flags(~torch.cat([torch.zeros(0).bool(), *of]), device) for of in (queries, keys))
        counts = ([[int((flags == own).sum()) for flags in of] for own in (False, True)] for of in (queries, keys))
        return *places, *counts

    return OfSequences(lens, prepare)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective, and kernels that take lengths
def parts_attention(
    attn: nn.Module,
    step: PackedStep,
    streams: TwoStreams,
    parts: OfSequences,
    *heads: tuple[Tensor, Tensor],
    reads: tuple[int | None, int],
) -> tuple[Tensor, Tensor]:
    """Attention between the two parts of each sequence that `parts` and `streams` are of. heads: queries, keys, values,
    of both parts each; reads: for both the part to which its queries attend, None: to nothing (zeros)."""
    kernel = attend_by(attn) or PackedAttention()

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: TwoStreams, keys: TwoStreams, *counts: Any) -> Tensor:
        of_keys, outs = list(zip(keys.split(k), keys.split(v), counts[1], strict=True)), []
        for part, num_queries, read in zip(queries.split(q), counts[0], reads, strict=True):
            if read is None:
                outs.append(torch.zeros_like(part))
            else:
                k, v, num_keys = of_keys[read]
                outs.append(kernel(part, k, v, num_queries, num_keys))
        return queries.join(*outs)

    q, k, v = (streams.join(*pair) for pair in heads)
    return streams.split(parts.attention(step, q, k, v, attend))
