"""Krea 2: diffusers' Krea2Transformer2DModel. The blocks that fuse and refine a text run where the sample is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.adapters.chunks import Chunks, Home, Moved, Packed, RunBlock, call, rotation_rows
from knapformer.adapters.drawn import random_mask
from knapformer.adapters.joint import JointAdapter, JointChunks, projected, stream_block
from knapformer.adapters.samples import Samples
from knapformer.attention.packed_rows import TwoStreams, modulate, text_flags


def _attended(attn: Any, chunks: Chunks, x: Tensor) -> Tensor:
    """As Krea2AttnProcessor."""
    q, k, v = projected(attn, x)
    attended = chunks.attention(attn, *chunks.rotated(q, k), v)
    return attn.to_out[0](attended * torch.sigmoid(attn.to_gate(x)))


def block(block: Any, x: Tensor, cond: Tensor, chunks: JointChunks) -> Tensor:
    """As Krea2TransformerBlock.forward; cond (chunks, 6 width)."""
    scale, shift, gate, scale_ff, shift_ff, gate_ff = (cond.unflatten(-1, (6, -1)) + block.scale_shift_table).unbind(1)
    rows = (shift, scale, gate, shift_ff, scale_ff, gate_ff)
    return stream_block(block, x, partial(_attended, block.attn, chunks), rows, chunks.of_token)


def refiner_block(block: Any, text: Tensor, chunks: Chunks) -> Tensor:
    """As Krea2TextFusionBlock.forward."""
    return stream_block(block, text, partial(_attended, block.attn, chunks))


def text_fusion(fusion: Any, text: Tensor, chunks: Chunks) -> Tensor:
    """As Krea2TextFusion.forward; text (text tokens, layers of the text encoder, width)."""
    for each in fusion.layerwise_blocks:
        text = each(text)
    text = fusion.projector(text.transpose(1, 2)).squeeze(-1)
    return chunks.through(fusion.refiner_blocks, call, text)


def final_layer(layer: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    scale, shift = (cond.unsqueeze(1) + layer.scale_shift_table).unbind(1)
    return layer.linear(modulate(layer.norm(x), shift, scale, packed.of_token))


class Krea2(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "timestep", "position_ids")
    optional = ("encoder_attention_mask",)
    input_layer = "img_in"
    blocks = ("transformer_blocks",)
    refiners = ("text_fusion.refiner_blocks",)
    packed = {
        "Krea2TransformerBlock": block, "Krea2TextFusionBlock": refiner_block, "Krea2TextFusion": text_fusion,
        "Krea2FinalLayer": final_layer,
    }  # fmt: skip
    processors = ("Krea2AttnProcessor",)
    small = {
        "in_channels": 6, "num_layers": 2, "attention_head_dim": 14, "num_attention_heads": 6, "num_key_value_heads": 3,
        "intermediate_size": 26, "timestep_embed_dim": 16, "text_hidden_dim": 10, "num_text_layers": 3,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 13,
        "axes_dims_rope": (2, 4, 8),
    }  # fmt: skip
    conditions = {
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, max(size.text_tokens, 1), 3, 10),
        "encoder_attention_mask": lambda config, size, draw: None if (m := random_mask(size)) is None else m.bool(),
        "position_ids": lambda config, size, draw: torch.cat(
            [torch.zeros(max(size.text_tokens, 1), 3), torch.cartesian_prod(*map(torch.arange, size.grid)).float()]
        ),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        image, image_lens = samples.rows("hidden_states", config.in_channels)
        text, padded = samples.rows("encoder_hidden_states", config.num_text_layers, config.text_hidden_dim)
        lens = [sum(pair) for pair in zip(padded, image_lens, strict=True)]
        rotation = rotation_rows(*model.rotary_emb(samples.rows_like("position_ids", 3, lens)))
        of_text, of_image = TwoStreams.of_flags(text_flags(padded, image_lens), image.device).split(rotation)
        text_lens, text, of_text = samples.unmasked("encoder_attention_mask", padded, text, of_text, boolean=True)
        image = model.img_in(image)
        text = model.txt_in(model.text_fusion(text, Chunks.alone(text_lens, text.flatten(1))))
        cond = model.time_embed(samples.one_each("timestep"), image.dtype).squeeze(1)
        return self.home(text, text_lens, image, image_lens, (of_text, of_image), cond)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        rows = model.time_mod_proj(F.gelu(moved.of_chunk[0], approximate="tanh"))
        return self.chunks(moved).through(model.transformer_blocks, run, moved.x, rows)

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        return model.final_layer(image, cond, packed)
