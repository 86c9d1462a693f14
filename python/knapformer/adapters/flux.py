"""FLUX.1: diffusers' FluxTransformer2DModel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, clip_half
from knapformer.adapters.joint import (
    JointAdapter,
    JointChunks,
    adaptive_double_block,
    adaptive_rows,
    projected,
    rotations_of_ids,
)
from knapformer.adapters.samples import Samples
from knapformer.models.packing import gated_add, modulate


def single_block(block: Any, x: Tensor, cond: Tensor, chunks: JointChunks) -> Tensor:
    return single(block, x, adaptive_rows(block.norm, cond, 3), chunks)


def single(block: Any, x: Tensor, rows: Sequence[Tensor], chunks: JointChunks) -> Tensor:
    """As FluxSingleTransformerBlock.forward, over both streams; rows: shift, scale and gate, (chunks, width)."""
    shift, scale, gate = rows
    normed = modulate(block.norm.norm(x), shift, scale, chunks.of_token)
    hidden = block.act_mlp(block.proj_mlp(normed))
    q, k, v = projected(block.attn, normed)
    attended = chunks.attention(block.attn, *chunks.rotated(q, k), v)
    update = block.proj_out(torch.cat([attended, hidden], -1))
    return clip_half(gated_add(x, update, gate, chunks.of_token))


class Flux(JointAdapter):
    left_out = "ControlNet, IP adapters"
    required: ClassVar[tuple[str, ...]] = (
        "hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids",
    )  # fmt: skip
    optional: ClassVar[tuple[str, ...]] = ("guidance",)
    input_layer = "x_embedder"
    blocks = {"transformer_blocks": adaptive_double_block, "single_transformer_blocks": single_block}  # noqa: RUF012
    forwards = ("FluxTransformerBlock", "FluxSingleTransformerBlock", *JointAdapter.forwards)
    in_parts = ("attn", "norm1", "norm1_context", "norm")
    processors = ("FluxAttnProcessor",)
    small = {  # noqa: RUF012
        "in_channels": 6, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 14, "num_attention_heads": 3,
        "joint_attention_dim": 11, "pooled_projection_dim": 9, "guidance_embeds": True, "axes_dims_rope": (2, 4, 8),
    }  # fmt: skip
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
        image, image_lens = samples.rows("hidden_states", model.config.in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", model.config.joint_attention_dim)
        image = model.x_embedder(image)
        cond = self._condition(model, samples, image.dtype)
        text = model.context_embedder(text)
        rotation = rotations_of_ids(model, samples, text_lens, image_lens, concatenated=True)
        return self.home(text, text_lens, image, image_lens, rotation, cond)

    def _condition(self, model: Any, samples: Samples, dtype: torch.dtype) -> Tensor:
        pooled = samples.row_each("pooled_projections", model.config.pooled_projection_dim)
        guided = samples.expect("guidance", model.config.guidance_embeds)
        times = [samples.one_each("timestep"), *([samples.one_each("guidance")] if guided else [])]
        cond: Tensor = model.time_text_embed(*(time.to(dtype) * 1000 for time in times), pooled)
        return cond


class LongCatImage(Flux):
    """diffusers' LongCatImageTransformer2DModel: FLUX.1 without pooled text and guidance."""

    left_out = ""
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids")
    optional = ()
    forwards = ("LongCatImageTransformerBlock", "LongCatImageSingleTransformerBlock", *JointAdapter.forwards)
    processors = ("LongCatImageAttnProcessor",)
    small = {name: value for name, value in Flux.small.items() if name != "guidance_embeds"}  # noqa: RUF012
    named_configs = {}  # noqa: RUF012

    def _condition(self, model: Any, samples: Samples, dtype: torch.dtype) -> Tensor:
        cond: Tensor = model.time_embed(samples.one_each("timestep").to(dtype) * 1000, dtype)
        return cond
