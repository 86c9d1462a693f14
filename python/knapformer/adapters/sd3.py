"""Stable Diffusion 3 and 3.5 large: diffusers' SD3Transformer2DModel, without blocks of two attentions (3.5 medium)."""

from __future__ import annotations

import math
from typing import Any

import torch

from knapformer.adapters.chunks import Home
from knapformer.adapters.joint import NORM_OUT, JointAdapter, adaptive_double_block
from knapformer.adapters.samples import Samples


class StableDiffusion3(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    input_layer = "pos_embed.proj"
    blocks = ("transformer_blocks",)
    packed = {"JointTransformerBlock": adaptive_double_block, **NORM_OUT}
    refused = ("dual_attention_layers",)
    in_parts = ("attn", "norm1", "norm1_context")
    processors = ("JointAttnProcessor2_0",)
    controls = {"block_controlnet_hidden_states": "transformer_blocks"}
    of_grids = True
    small = {
        "sample_size": 16, "patch_size": 2, "in_channels": 3, "num_layers": 3, "attention_head_dim": 8,
        "num_attention_heads": 3, "joint_attention_dim": 10, "caption_projection_dim": 24, "pooled_projection_dim": 9,
        "out_channels": 5, "pos_embed_max_size": 12, "qk_norm": "rms_norm",
    }  # fmt: skip
    min_blocks = 2  # the last one writes no text
    named_configs = {
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
    conditions = {"timestep": lambda config, size, draw: 1000 * draw.time()}

    @staticmethod
    def control_of(block: int, num_blocks: int, num_controls: int) -> int:
        return int(block / (num_blocks / num_controls))

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        pictures, grids = samples.grids("hidden_states", config.in_channels, self.patch(config))
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        pooled = samples.row_each("pooled_projections", config.pooled_projection_dim)
        image = torch.cat([model.pos_embed(picture).flatten(0, 1) for picture in pictures])
        cond = model.time_text_embed(samples.one_each("timestep"), pooled)
        text, lens = model.context_embedder(text), list(map(math.prod, grids))
        return self.home(text, text_lens, image, lens, None, cond, grids=grids)
