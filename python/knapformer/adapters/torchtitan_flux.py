"""FLUX.1 as torchtitan has it: torchtitan.models.flux.model.model.FluxModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, Packed
from knapformer.adapters.joint import JointAdapter, JointChunks, Stream, double_stream
from knapformer.adapters.samples import Samples
from knapformer.models.packing import gated_add, modulate


def _projected(qkv: Tensor, norm: Any, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, 3 * width) -> q, k, v: (tokens, heads, head_dim), q and k normed."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    q, k = norm(q, k, v)
    return q, k, v


def _rows(modulation: Any, cond: Tensor) -> list[Tensor]:
    """Shift, scale and gate of attention, and of the feed-forward where `modulation` has it: (chunks, width) each."""
    outs = (out for out in modulation(cond) if out is not None)
    return [row.squeeze(1) for out in outs for row in (out.shift, out.scale, out.gate)]


def double_block(block: Any, text: Tensor, image: Tensor, cond: Tensor, chunks: JointChunks) -> tuple[Tensor, Tensor]:
    """As DoubleStreamBlock.forward, with a row of modulation for each chunk."""

    def attend(text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        of_text = _projected(block.txt_attn.qkv(text), block.txt_attn.norm, block.num_heads)
        of_image = _projected(block.img_attn.qkv(image), block.img_attn.norm, block.num_heads)
        q, k, v = (chunks.streams.join(t, i) for t, i in zip(of_text, of_image, strict=True))
        text, image = chunks.streams.split(chunks.attention(block.inner_attention, *chunks.rotated(q, k), v))
        return block.txt_attn.proj(text), block.img_attn.proj(image)

    return double_stream(
        attend,
        Stream(text, _rows(block.txt_mod, cond), block.txt_norm1, block.txt_norm2, block.txt_mlp),
        Stream(image, _rows(block.img_mod, cond), block.img_norm1, block.img_norm2, block.img_mlp),
        chunks,
    )


def single_block(block: Any, x: Tensor, cond: Tensor, chunks: JointChunks) -> Tensor:
    """As SingleStreamBlock.forward, over both streams."""
    shift, scale, gate = _rows(block.modulation, cond)
    hidden = block.linear1(modulate(block.pre_norm(x), shift, scale, chunks.of_token))
    qkv, mlp = hidden.split([3 * block.hidden_size, block.mlp_hidden_dim], -1)
    q, k, v = _projected(qkv, block.norm, block.num_heads)
    attended = chunks.attention(block.inner_attention, *chunks.rotated(q, k), v)
    return gated_add(x, block.linear2(torch.cat([attended, block.mlp_act(mlp)], -1)), gate, chunks.of_token)


def final_layer(layer: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    shift, scale = layer.adaLN_modulation(cond).chunk(2, -1)
    return layer.linear(modulate(layer.norm_final(x), shift, scale, packed.of_token))


class TorchtitanFlux(JointAdapter):
    since = "0.3"
    required = ("img", "img_ids", "txt", "txt_ids", "timesteps", "y")  # in the order of forward
    batched = required
    input_layer = "img_in"
    blocks = {"double_blocks": double_block, "single_blocks": single_block}
    modules = {"final_layer": final_layer}
    forwards = ("DoubleStreamBlock", "SingleStreamBlock", "LastLayer")
    attentions = ()
    processors = ()

    def embed(self, model: Any, samples: Samples) -> Home:
        from torchtitan.models.flux.model.layers import timestep_embedding

        image, image_lens = samples.rows("img", model.in_channels)
        text, text_lens = samples.rows("txt", model.txt_in.in_features)
        pooled = samples.row_each("y", model.vector_in.in_layer.in_features)
        num_axes = len(model.pe_embedder.axes_dim)
        ids = (
            samples.rows_like("txt_ids", num_axes, text_lens, beside="img_ids"),
            samples.rows_like("img_ids", num_axes, image_lens, beside="txt_ids"),
        )
        # The first column of the matrix [[cos, -sin], [sin, cos]] of every pair.
        text_rotation, image_rotation = (model.pe_embedder(rows[None])[0, :, 0, ..., 0] for rows in ids)

        cond = model.time_in(timestep_embedding(samples.one_each("timesteps"), 256)) + model.vector_in(pooled)
        rotation = (text_rotation, image_rotation)
        return self.home(model.txt_in(text), text_lens, model.img_in(image), image_lens, rotation, cond)

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        return model.final_layer(image, cond, packed)
