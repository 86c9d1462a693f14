"""Models whose text and image tokens attend to each other as one sequence, [text; image]: FLUX, Qwen-Image, ...

What they share: how the two streams become chunks, joint attention over a block's own projections and norms, and the
head. An adapter adds the embedding and the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knapformer.adapters.adapter import Adapter, expect
from knapformer.adapters.chunks import Chunks, Home, Moved, Packed, Part, RunBlock, clip_half, rotation_rows
from knapformer.adapters.samples import Samples
from knapformer.attention.packed_rows import Segments, TwoStreams, gated_add, modulate, rotation_of, text_flags


@dataclass(frozen=True, eq=False, kw_only=True)
class JointChunks(Chunks):
    kinds: Tensor  # (chunk tokens,) on the CPU: 0 of text tokens; of others 1, or more where they are of several kinds
    streams: TwoStreams  # where text and image tokens lie
    of_text: Segments  # of_token of the text tokens alone
    of_image: Segments
    ends_text: bool = False  # in a block behind which nothing reads the text

    def through_both(
        self, blocks: nn.ModuleList, run: RunBlock, x: Tensor, *arguments: Any, ends_text: bool = False
    ) -> Tensor:
        """As through, of blocks that take text and image apart. ends_text: nothing reads the text behind them."""
        text, image = self.streams.split(x)
        for i, block in enumerate(blocks, 1):
            chunks = replace(self, ends_text=True) if ends_text and i == len(blocks) else self
            text, image = run(block, text, image, *arguments, chunks)
        return self.streams.join(text, image)


def final_norm(norm: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    """As AdaLayerNormContinuous.forward and its like, with a row of modulation for each sample."""
    scale, shift = adaptive_rows(norm, cond, 2).unbind(1)
    return modulate(norm.norm(x), shift, scale, packed.of_token)


NORM_OUT = {"AdaLayerNormContinuous": final_norm}  # of Adapter.packed


class JointAdapter(Adapter):
    required: ClassVar[tuple[str, ...]] = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids")

    @staticmethod
    def check_config(config: Any) -> None:
        axes = config.fields.get("axes_dims_rope")
        fit = axes is None or (sum(axes) == config.head_dim and all(axis % 2 == 0 for axis in axes))
        even = f"even numbers that add up to attention_head_dim, {config.head_dim}"
        expect(fit, "axes_dims_rope", axes, even)

    def home(
        self,
        text: Tensor,
        text_lens: list[int],
        image: Tensor,
        image_lens: list[int],
        rotation: tuple[Tensor | None, Tensor] | None,
        cond: Tensor,
        kinds: Tensor | None = None,
        grids: Sequence[Any] = (),
    ) -> Home:
        """text (text tokens, width), image (image tokens, width), rotation: the rows of each, None of text that is not
        rotated. cond (samples, width), or of several rows a sample, of which the head takes the first. kinds (image
        tokens,) from 1 on, on the CPU, where they are of several."""
        # On the CPU: the host reads which tokens of its chunks are text, without waiting for a device.
        is_text = text_flags(text_lens, image_lens)
        kind_of_token = (~is_text).to(torch.uint8)
        if kinds is not None:
            kind_of_token[~is_text] = kinds.to(torch.uint8)
        streams = TwoStreams.of_flags(is_text, image.device)
        dtype = torch.promote_types(text.dtype, image.dtype)
        text, image = text.to(dtype), image.to(dtype)
        features = [kind_of_token]
        if rotation is not None:
            of_text, of_image = rotation
            if of_text is None:
                of_text = torch.tensor([1.0, 0.0], device=text.device).expand(len(text), *of_image.shape[1:])
            features.append(streams.join(of_text, of_image))
        return Home(
            x=streams.join(text, image),
            seq_lens=[text + image for text, image in zip(text_lens, image_lens, strict=True)],
            features=features,
            sequence_features=[cond],
            rest=(streams, image_lens, cond if cond.ndim == 2 else cond[:, 0]),
            grids=list(grids),
        )

    @staticmethod
    def chunks(moved: Moved) -> JointChunks:
        step, x, (kinds, *rotation), _ = moved
        text_lens = step.counts_of(kinds == 0)
        image_lens = [length - text for length, text in zip(step.chunk_lens, text_lens, strict=True)]
        return JointChunks(
            step=step,
            of_token=step.segments(x),
            rotation=rotation_of(rotation[0], x.dtype) if rotation else None,
            kinds=kinds,
            streams=TwoStreams.of_flags(kinds == 0, x.device),
            of_text=Segments.of_lengths(text_lens, x.device),
            of_image=Segments.of_lengths(image_lens, x.device),
        )

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        """Blocks of two streams, then those of one, by the conditioning of each chunk."""
        chunks, (cond,) = self.chunks(moved), moved.of_chunk
        double, *single = map(model.get_submodule, self.blocks)
        x = chunks.through_both(double, run, moved.x, cond, cond, ends_text=not single)
        for blocks in single:
            x = chunks.through(blocks, run, x, cond)
        return x

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        streams, image_lens, cond = home.rest
        _, image = streams.split(x)
        out = self.last(model, image, cond, Packed(Segments.of_lengths(image_lens, image.device)))
        return [Part(out, image_lens, streams.image_rows)]

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        """(image tokens, width), cond as the head takes it -> (image tokens, channels)."""
        return model.proj_out(model.norm_out(image, cond, packed))


def adaptive_rows(norm: Any, cond: Tensor, count: int) -> Tensor:
    """What diffusers' adaptive norms compute from the conditioning vectors: (chunks, count, width)."""
    activation = norm.act_fn if hasattr(norm, "act_fn") else norm.silu
    return norm.linear(activation(cond)).unflatten(-1, (count, -1))


def projected(attn: Any, x: Tensor, added: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a stream, q and k normed: (tokens, width) -> (tokens, heads, head_dim)."""
    layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj) if added else (attn.to_q, attn.to_k, attn.to_v)
    norms = (attn.norm_added_q, attn.norm_added_k) if added else (attn.norm_q, attn.norm_k)
    head_dim = attn.head_dim if hasattr(attn, "head_dim") else attn.inner_dim // attn.heads
    q, k, v = (layer(x).unflatten(-1, (-1, head_dim)) for layer in layers)
    q, k = (heads if norm is None else norm(heads) for norm, heads in zip(norms, (q, k), strict=True))
    return q, k, v


def self_attention(attn: Any, chunks: Chunks, x: Tensor) -> Tensor:
    """As diffusers' attention modules compute it for one stream: (tokens, width) -> the same."""
    q, k, v = projected(attn, x)
    attended = chunks.attention(attn, *chunks.rotated(q, k), v)
    return attn.to_out[1](attn.to_out[0](attended))


@dataclass(frozen=True, eq=False)
class Stream:
    """The one stream in a block, or one of two.

    rows: the rows of modulation, (runs of tokens, width) each: shift, scale and gate of attention, then of the
    feed-forward. Only the first two where the block reads the stream and does not write it.
    """

    x: Tensor
    rows: Sequence[Tensor]
    norm: Callable[[Tensor], Tensor]
    norm_feed_forward: Callable[[Tensor], Tensor]
    feed_forward: Callable[[Tensor], Tensor]

    def read(self, of_token: Segments) -> Tensor:
        return modulate(self.norm(self.x), self.rows[0], self.rows[1], of_token)

    def written(self, update: Tensor, of_token: Segments) -> Tensor:
        _, _, gate, shift_ff, scale_ff, gate_ff = self.rows
        x = gated_add(self.x, update, gate, of_token)
        hidden = self.feed_forward(modulate(self.norm_feed_forward(x), shift_ff, scale_ff, of_token))
        return gated_add(x, hidden, gate_ff, of_token)


def stream_block(
    block: Any, x: Tensor, attend: Callable[[Tensor], Tensor], rows: Any = (), of_token: Any = None
) -> Tensor:
    """A block of one stream: attention, then the feed-forward, each behind a norm, and modulated where there are rows,
    as of Stream."""
    if not (rows := tuple(rows)):
        x = x + attend(block.norm1(x))
        return x + block.ff(block.norm2(x))
    stream = Stream(x, rows, block.norm1, block.norm2, block.ff)
    return stream.written(attend(stream.read(of_token)), of_token)


def double_stream(attn: Any, text: Stream, image: Stream, chunks: JointChunks) -> tuple[Tensor, Tensor]:
    """Joint attention as diffusers' attention modules compute it, then each stream's feed-forward."""
    streams = chunks.streams
    of_text, of_image = projected(attn, text.read(chunks.of_text), True), projected(attn, image.read(chunks.of_image))
    q, k, v = (streams.join(*pair) for pair in zip(of_text, of_image, strict=True))
    out_text, out_image = streams.split(chunks.attention(attn, *chunks.rotated(q, k), v))
    image_x = image.written(attn.to_out[1](attn.to_out[0](out_image)), chunks.of_image)
    if len(text.rows) == 2:
        return text.x, image_x
    if chunks.ends_text:  # of no rows, so that weights get their gradients of zeros
        none = text.feed_forward(text.norm_feed_forward(attn.to_add_out(out_text[:0])))
        return torch.cat([text.x, none]), image_x
    return text.written(attn.to_add_out(out_text), chunks.of_text), image_x


def double_block(
    block: Any, text: Tensor, image: Tensor, text_rows: Tensor, image_rows: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As a double-stream block of the FLUX family; text_rows, image_rows (chunks, 6, width)."""
    norm_text, norm_image = (getattr(norm, "norm", norm) for norm in (block.norm1_context, block.norm1))
    text, image = double_stream(
        block.attn,
        Stream(text, text_rows.unbind(1), norm_text, block.norm2_context, block.ff_context),
        Stream(image, image_rows.unbind(1), norm_image, block.norm2, block.ff),
        chunks,
    )
    return clip_half(text), image


def adaptive_double_block(
    block: Any, text: Tensor, image: Tensor, cond: Tensor, of_image: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As FluxTransformerBlock.forward and its like; cond, of_image: for each row of chunks.of_text, and of
    chunks.of_image."""
    # SD3's last block reads the text, and writes it no longer; the norm there gives the scale first.
    is_read = getattr(block, "context_pre_only", False)
    norm = block.norm1_context
    text_rows = adaptive_rows(norm, cond, 2).flip(1) if is_read else adaptive_rows(norm, cond, 6)
    return double_block(block, text, image, text_rows, adaptive_rows(block.norm1, of_image, 6), chunks)


def rotations_of_ids(model: Any, samples: Samples, **lens: list[int]) -> tuple[Tensor, ...]:
    """By the positions in these arguments. lens: how many rows of each argument each sample has."""
    num_axes = len(model.config.axes_dims_rope)
    all_ids = (samples.rows_like(name, num_axes, of) for name, of in lens.items())
    return tuple(rotation_rows(*model.pos_embed(ids)) for ids in all_ids)
