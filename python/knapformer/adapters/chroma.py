"""Chroma: diffusers' ChromaTransformer2DModel. FLUX whose rows of modulation come from one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Home, Packed, RunBlock, clip_half, random_mask
from knapformer.adapters.flux import single
from knapformer.adapters.joint import (
    JointAdapter,
    JointChunks,
    Stream,
    double_stream,
    joint_attention,
    rotations_of_ids,
)
from knapformer.adapters.samples import Samples
from knapformer.models.packing import modulate


def double_block(
    block: Any, text: Tensor, image: Tensor, rows: Tensor, text_rows: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As ChromaTransformerBlock.forward; rows, text_rows (chunks, 6, width)."""
    text, image = double_stream(
        joint_attention(block.attn, chunks),
        Stream(text, text_rows.unbind(1), block.norm1_context.norm, block.norm2_context, block.ff_context),
        Stream(image, rows.unbind(1), block.norm1.norm, block.norm2, block.ff),
        chunks,
    )
    return clip_half(text), image


def single_block(block: Any, x: Tensor, rows: Tensor, chunks: JointChunks) -> Tensor:
    return single(block, x, rows.unbind(1), chunks)


def final_norm(norm: Any, x: Tensor, rows: Tensor, packed: Packed) -> Tensor:
    shift, scale = rows.unbind(1)
    return modulate(norm.norm(x), shift, scale, packed.of_token)


class Chroma(JointAdapter):
    sequence = "text tokens that no mask hides, and image tokens"
    left_out = "ControlNet, IP adapters, masks of numbers (which diffusers adds to the scores)"
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids")
    optional = ("attention_mask",)
    input_layer = "x_embedder"
    blocks = {"transformer_blocks": double_block, "single_transformer_blocks": single_block}  # noqa: RUF012
    modules = {"norm_out": final_norm}  # noqa: RUF012
    forwards = ("ChromaTransformerBlock", "ChromaSingleTransformerBlock", "ChromaAdaLayerNormContinuousPruned")
    in_parts = ("attn", "norm1", "norm1_context", "norm")
    processors = ("FluxAttnProcessor",)
    small = {  # noqa: RUF012
        "in_channels": 6, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 14, "num_attention_heads": 3,
        "joint_attention_dim": 11, "axes_dims_rope": (2, 4, 8), "approximator_num_channels": 16,
        "approximator_hidden_dim": 9, "approximator_layers": 2,
    }  # fmt: skip
    conditions = {"attention_mask": lambda config, size, draw: _random_joint_mask(size)}  # noqa: RUF012

    def embed(self, model: Any, samples: Samples) -> Home:
        image, image_lens = samples.rows("hidden_states", model.config.in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", model.config.joint_attention_dim)
        of_text, of_image = rotations_of_ids(model, samples, text_lens, image_lens, concatenated=True)
        text_lens, text, of_text = samples.unmasked(
            "attention_mask", text_lens, text, of_text, beside=image_lens, boolean=True
        )
        image = model.x_embedder(image)
        table = model.distilled_guidance_layer(
            model.time_text_embed(samples.one_each("timestep").to(image.dtype) * 1000)
        )
        return self.home(model.context_embedder(text), text_lens, image, image_lens, (of_text, of_image), table)

    def compute(self, model: Any, x: Tensor, of_chunk: list[Tensor], chunks: JointChunks, run: RunBlock) -> Tensor:
        doubles, singles = model.transformer_blocks, model.single_transformer_blocks
        sizes = [*[3] * len(singles), *[6] * (2 * len(doubles)), 2]  # singles, images of doubles, their texts, the head
        rows = of_chunk[0].split(sizes, 1)
        of_image, of_text = rows[len(singles) : -1 - len(doubles)], rows[-1 - len(doubles) : -1]
        text, image = chunks.streams.split(x)
        for block, *both in zip(doubles, of_image, of_text, strict=True):
            text, image = run(block, text, image, *both, chunks)
        x = chunks.streams.join(text, image)
        for block, of_block in zip(singles, rows, strict=False):
            x = run(block, x, of_block, chunks)
        return x

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        return super().last(model, image, cond[:, -2:], packed)


def _random_joint_mask(size: Any) -> Tensor | None:
    mask = random_mask(size)
    if mask is None or not size.text_tokens:
        return None
    return torch.cat([mask, torch.ones(1, size.visual_tokens)], 1).bool()
