"""FLUX.2: diffusers' Flux2Transformer2DModel. Its blocks share three modulations, computed once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, RunBlock, clip_half
from knapformer.adapters.joint import (
    JointAdapter,
    JointChunks,
    Stream,
    double_stream,
    joint_attention,
    rotations_of_ids,
)
from knapformer.adapters.samples import Samples
from knapformer.models.packing import gated_add, modulate


def double_block(
    block: Any, text: Tensor, image: Tensor, image_rows: Tensor, text_rows: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As Flux2TransformerBlock.forward; image_rows, text_rows (chunks, 6 width)."""
    text, image = double_stream(
        joint_attention(block.attn, chunks),
        Stream(text, text_rows.chunk(6, -1), block.norm1_context, block.norm2_context, block.ff_context),
        Stream(image, image_rows.chunk(6, -1), block.norm1, block.norm2, block.ff),
        chunks,
    )
    return clip_half(text), image


def single_block(block: Any, x: Tensor, rows: Tensor, chunks: JointChunks) -> Tensor:
    """As Flux2SingleTransformerBlock.forward, over both streams; rows (chunks, 3 width)."""
    shift, scale, gate = rows.chunk(3, -1)
    attn = block.attn
    projected = attn.to_qkv_mlp_proj(modulate(block.norm(x), shift, scale, chunks.of_token))
    sizes = [3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor]
    qkv, hidden = projected.split(sizes, -1)
    q, k, v = qkv.unflatten(-1, (3, -1, attn.head_dim)).unbind(1)
    attended = chunks.attention(attn, *chunks.rotated(attn.norm_q(q), attn.norm_k(k)), v)
    update = attn.to_out(torch.cat([attended, attn.mlp_act_fn(hidden)], -1))
    return clip_half(gated_add(x, update, gate, chunks.of_token))


class Flux2(JointAdapter):
    left_out = "the cache of reference images"
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids")
    optional = ("guidance",)
    input_layer = "x_embedder"
    blocks = {"transformer_blocks": double_block, "single_transformer_blocks": single_block}  # noqa: RUF012
    forwards = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock", *JointAdapter.forwards)
    in_parts = ("attn",)
    processors = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")
    small = {  # noqa: RUF012
        "in_channels": 5, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 12, "num_attention_heads": 3,
        "joint_attention_dim": 10, "timestep_guidance_channels": 16, "mlp_ratio": 2.5, "axes_dims_rope": (2, 4, 4, 2),
    }  # fmt: skip
    block_counts = {"double": "num_layers", "single": "num_single_layers"}  # noqa: RUF012
    named_configs = {  # noqa: RUF012
        "flux2": {},
        "flux2-demo": {
            "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64,
            "in_channels": 64, "axes_dims_rope": (16, 16, 16, 16), "joint_attention_dim": 64,
        },
    }  # fmt: skip

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        image, image_lens = samples.rows("hidden_states", config.in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        time = samples.scaled("timestep", 1000, "hidden_states")
        # As in diffusers, guidance is left out where the model was made without it.
        guided = samples.expect("guidance", getattr(config, "guidance_embeds", True))
        guidance = samples.scaled("guidance", 1000, "hidden_states") if guided else None
        cond = model.time_guidance_embed(time, guidance)
        rotation = rotations_of_ids(model, samples, text_lens, image_lens, concatenated=False)
        image, text = model.x_embedder(image), model.context_embedder(text)
        return self.home(text, text_lens, image, image_lens, rotation, cond)

    def compute(self, model: Any, x: Tensor, of_chunk: list[Tensor], chunks: JointChunks, run: RunBlock) -> Tensor:
        (cond,), streams = of_chunk, chunks.streams
        image_rows, text_rows = model.double_stream_modulation_img(cond), model.double_stream_modulation_txt(cond)
        text, image = streams.split(x)
        for block in model.transformer_blocks:
            text, image = run(block, text, image, image_rows, text_rows, chunks)
        x, rows = streams.join(text, image), model.single_stream_modulation(cond)
        for block in model.single_transformer_blocks:
            x = run(block, x, rows, chunks)
        return x
