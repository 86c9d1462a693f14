"""FLUX.1: diffusers' FluxTransformer2DModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, clip_half
from knapformer.adapters.joint import (
    JointAdapter,
    JointChunks,
    adaptive_double_block,
    adaptive_rows,
    projected,
    rotated,
    rotations_of_ids,
)
from knapformer.adapters.samples import Samples
from knapformer.models.packing import gated_add, modulate


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
    input_layer = "x_embedder"
    blocks = {"transformer_blocks": adaptive_double_block, "single_transformer_blocks": single_block}  # noqa: RUF012
    forwards = ("FluxTransformerBlock", "FluxSingleTransformerBlock", *JointAdapter.forwards)
    in_parts = ("attn", "norm1", "norm1_context", "norm")
    processors = ("FluxAttnProcessor",)
    block_counts = {"double": "num_layers", "single": "num_single_layers"}  # noqa: RUF012
    named_configs = {  # noqa: RUF012
        "flux": {"guidance_embeds": True},
        # An eighth of the width, with as many heads and blocks: for replaying plans of FLUX on a CPU.
        "flux-narrow": {
            "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "joint_attention_dim": 64,
            "pooled_projection_dim": 32, "guidance_embeds": True,
        },
        # Width and depth for one core per rank: wide enough that matrix products dominate, as they do at full size.
        "flux-demo": {
            "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64,
            "axes_dims_rope": (8, 28, 28), "joint_attention_dim": 64, "pooled_projection_dim": 32,
            "guidance_embeds": True,
        },
        "flux-tiny": {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
            "in_channels": 8, "axes_dims_rope": (4, 6, 6), "joint_attention_dim": 24, "pooled_projection_dim": 12,
            "guidance_embeds": True,
        },
    }  # fmt: skip

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        image, image_lens = samples.rows("hidden_states", config.in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        pooled = samples.row_each("pooled_projections", config.pooled_projection_dim)
        guided = samples.expect("guidance", config.guidance_embeds)
        times = [samples.one_each("timestep"), *([samples.one_each("guidance")] if guided else [])]
        image = model.x_embedder(image)
        times = [time.to(image.dtype) * 1000 for time in times]
        cond = model.time_text_embed(*times, pooled)
        text = model.context_embedder(text)
        rotation = rotations_of_ids(model, samples, text_lens, image_lens, concatenated=True)
        return self.home(text, text_lens, image, image_lens, rotation, cond)
