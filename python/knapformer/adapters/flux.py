"""FLUX.1: diffusers' FluxTransformer2DModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, clip_half, rotation_rows
from knapformer.adapters.joint import (
    JointAdapter,
    JointChunks,
    Stream,
    adaptive_rows,
    double_stream,
    joint_attention,
    projected,
    rotated,
)
from knapformer.adapters.samples import Samples
from knapformer.models.packing import gated_add, modulate


def double_block(block: Any, text: Tensor, image: Tensor, cond: Tensor, chunks: JointChunks) -> tuple[Tensor, Tensor]:
    """As FluxTransformerBlock.forward, with a row of modulation for each chunk."""
    rows, text_rows = adaptive_rows(block.norm1, cond, 6), adaptive_rows(block.norm1_context, cond, 6)
    text, image = double_stream(
        joint_attention(block.attn, chunks),
        Stream(text, text_rows, block.norm1_context.norm, block.norm2_context, block.ff_context),
        Stream(image, rows, block.norm1.norm, block.norm2, block.ff),
        chunks,
    )
    return clip_half(text), image


def single_block(block: Any, x: Tensor, cond: Tensor, chunks: JointChunks) -> Tensor:
    """As FluxSingleTransformerBlock.forward, over both streams."""
    shift, scale, gate = adaptive_rows(block.norm, cond, 3)
    normed = modulate(block.norm.norm(x), shift, scale, chunks.of_token)
    hidden = block.act_mlp(block.proj_mlp(normed))
    q, k, v = projected(block.attn, normed)
    attended = chunks.attention(block.attn, *rotated(q, k, chunks), v)
    update = block.proj_out(torch.cat([attended, hidden], -1))
    return clip_half(gated_add(x, update, gate, chunks.of_token))


class Flux(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    optional = ("guidance",)
    blocks = {"transformer_blocks": double_block, "single_transformer_blocks": single_block}  # noqa: RUF012
    processors = ("FluxAttnProcessor",)

    def input_weight(self, model: Any) -> Tensor:
        weight: Tensor = model.x_embedder.weight
        return weight

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        image, image_lens = samples.rows("hidden_states", config.in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        pooled, _ = samples.rows("pooled_projections", config.pooled_projection_dim)
        times = [samples.one_each("timestep"), samples.optional_one_each("guidance", config.guidance_embeds)]
        num_axes = len(config.axes_dims_rope)
        image_ids = samples.rows_like("img_ids", num_axes, image_lens)
        text_ids = samples.rows_like("txt_ids", num_axes, text_lens)

        image = model.x_embedder(image)
        times = [time.to(image.dtype) * 1000 for time in times if time is not None]
        cond = model.time_text_embed(*times, pooled)
        text = model.context_embedder(text)
        rotation = (rotation_rows(*model.pos_embed(text_ids)), rotation_rows(*model.pos_embed(image_ids)))
        return self.home(text, text_lens, image, image_lens, rotation, cond)
