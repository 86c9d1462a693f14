"""Stable Diffusion 3 and 3.5 large: diffusers' SD3Transformer2DModel, without blocks of two attentions (3.5 medium)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer import Sample, StateError
from knapformer.adapters.adapter import Home, clip_half, grid_of
from knapformer.adapters.joint import JointAdapter, JointChunks, Stream, adaptive_rows, double_stream, joint_attention
from knapformer.adapters.samples import Samples
from knapformer.models.model import Draw


def block(block: Any, text: Tensor, image: Tensor, cond: Tensor, chunks: JointChunks) -> tuple[Tensor, Tensor]:
    """As JointTransformerBlock.forward, with a row of modulation for each chunk."""
    if block.context_pre_only:  # the last block: text is read, and no longer written
        scale, shift = adaptive_rows(block.norm1_context, cond, 2)
        text_rows: tuple[Tensor, ...] = (shift, scale)
    else:
        text_rows = adaptive_rows(block.norm1_context, cond, 6)
    text, image = double_stream(
        joint_attention(block.attn, chunks),
        Stream(text, text_rows, block.norm1_context.norm, block.norm2_context, block.ff_context),
        Stream(image, adaptive_rows(block.norm1, cond, 6), block.norm1.norm, block.norm2, block.ff),
        chunks,
    )
    return text if block.context_pre_only else clip_half(text), image


class StableDiffusion3(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    blocks = {"transformer_blocks": block}  # noqa: RUF012
    forwards = ("JointTransformerBlock", *JointAdapter.forwards)
    in_parts = ("attn", "norm1", "norm1_context")
    processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")
    of_grids = True
    min_blocks = 2  # the last one writes no text
    named_configs = {  # noqa: RUF012
        "sd3": {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192},
        "sd3.5-large": {
            "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        "sd3-demo": {
            "num_layers": 3, "num_attention_heads": 4, "caption_projection_dim": 256, "joint_attention_dim": 64,
            "pooled_projection_dim": 32, "pos_embed_max_size": 192,
        },
    }  # fmt: skip

    def check(self, model: Any) -> None:
        super().check(model)
        if model.config.dual_attention_layers:
            raise StateError(
                f"transformer: got dual_attention_layers {model.config.dual_attention_layers}, expected ()"
            )
        fused = any(type(block.attn.processor).__name__.startswith("Fused") for block in model.transformer_blocks)
        if fused and model.config.qk_norm is not None:
            raise StateError(
                f"transformer: got fused projections with qk_norm {model.config.qk_norm!r}, which diffusers leaves out "
                "there, expected unfuse_qkv_projections()"
            )

    def input_weight(self, model: Any) -> Tensor:
        weight: Tensor = model.pos_embed.proj.weight
        return weight

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        size = config.patch_size
        images = samples.grids("hidden_states", config.in_channels, (size, size))
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        pooled = samples.row_each("pooled_projections", config.pooled_projection_dim)
        # Without samples it runs on a batch of 0, so that its weights get gradients.
        grids = images or [samples.like.new_zeros((0, config.in_channels, size, size))]
        image = torch.cat([model.pos_embed(grid).flatten(0, 1) for grid in grids])
        cond = model.time_text_embed(samples.one_each("timestep"), pooled)
        image_lens = [grid.shape[2] // size * (grid.shape[3] // size) for grid in images]
        home = self.home(model.context_embedder(text), text_lens, image, image_lens, None, cond)
        home.grids = [(grid.shape[2] // size, grid.shape[3] // size) for grid in images]
        return home

    def head(self, model: Any, x: Tensor, home: Home) -> tuple[list[Tensor], Tensor]:
        predictions, out = super().head(model, x, home)
        size = model.config.patch_size
        pictures = [
            patches.unflatten(2, (size, size, -1)).unflatten(1, grid)  # (1, rows, columns, size, size, channels)
            for patches, grid in zip(predictions, home.grids, strict=True)
        ]
        return [p.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3) for p in pictures], out

    @staticmethod
    def random_sample(config: Any, size: Sample, draw: Draw) -> dict[str, Any]:
        rows, columns = grid_of(size.visual_tokens)
        return {
            "hidden_states": draw.normal(1, config.in_channels, rows * config.patch_size, columns * config.patch_size),
            "encoder_hidden_states": draw.normal(1, size.text_tokens, config.joint_attention_dim),
            "pooled_projections": draw.normal(1, config.pooled_projection_dim),
            "timestep": 1000 * draw.time(),
        }
