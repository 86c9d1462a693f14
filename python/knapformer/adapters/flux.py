"""FLUX.1, LongCat-Image, Chroma and FLUX.2: diffusers' FluxTransformer2DModel, LongCatImageTransformer2DModel,
ChromaTransformer2DModel and Flux2Transformer2DModel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from knapformer.adapters.chunks import Home, Moved, Packed, PackedForward, RunBlock, clip_half
from knapformer.adapters.drawn import random_mask
from knapformer.adapters.joint import (
    NORM_OUT,
    JointAdapter,
    JointChunks,
    adaptive_double_block,
    adaptive_rows,
    double_block,
    projected,
    rotations_of_ids,
)
from knapformer.adapters.samples import Samples
from knapformer.attention.packed_rows import gated_add, modulate


def adaptive_single_block(block: Any, x: Tensor, cond: Tensor, chunks: JointChunks) -> Tensor:
    return single_block(block, x, adaptive_rows(block.norm, cond, 3), chunks)


def single_block(block: Any, x: Tensor, rows: Tensor, chunks: JointChunks) -> Tensor:
    """As FluxSingleTransformerBlock.forward, over both streams; rows (chunks, 3, width): shift, scale and gate."""
    shift, scale, gate = rows.unbind(1)
    normed = modulate(block.norm.norm(x), shift, scale, chunks.of_token)
    hidden = block.act_mlp(block.proj_mlp(normed))
    q, k, v = projected(block.attn, normed)
    attended = chunks.attention(block.attn, *chunks.rotated(q, k), v)
    update = block.proj_out(torch.cat([attended, hidden], -1))
    return clip_half(gated_add(x, update, gate, chunks.of_token))


class Flux(JointAdapter):
    required: ClassVar[tuple[str, ...]] = (
        "hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids",
    )  # fmt: skip
    optional: ClassVar[tuple[str, ...]] = ("guidance",)
    input_layer = "x_embedder"
    blocks = ("transformer_blocks", "single_transformer_blocks")
    packed: ClassVar[dict[str, PackedForward]] = {
        "FluxTransformerBlock": adaptive_double_block, "FluxSingleTransformerBlock": adaptive_single_block,
        **NORM_OUT,
    }  # fmt: skip
    in_parts: ClassVar[tuple[str, ...]] = ("attn", "norm1", "norm1_context", "norm")
    processors: ClassVar[tuple[str, ...]] = ("FluxAttnProcessor",)
    controls = {
        "controlnet_block_samples": "transformer_blocks", "controlnet_single_block_samples": "single_transformer_blocks"
    }  # fmt: skip
    small = {
        "in_channels": 6, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 14, "num_attention_heads": 3,
        "joint_attention_dim": 11, "pooled_projection_dim": 9, "guidance_embeds": True, "axes_dims_rope": (2, 4, 8),
    }  # fmt: skip
    block_counts = {"double": "num_layers", "single": "num_single_layers"}
    named_configs = {
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
        of_text, of_image = rotations_of_ids(model, samples, txt_ids=text_lens, img_ids=image_lens)
        text_lens, text, of_text = samples.unmasked(
            "attention_mask", text_lens, text, of_text, beside=image_lens, boolean=True
        )
        x = model.x_embedder(image)
        cond = self._condition(model, samples, image.dtype, x.dtype)
        return self.home(model.context_embedder(text), text_lens, x, image_lens, (of_text, of_image), cond)

    def _condition(self, model: Any, samples: Samples, given: torch.dtype, dtype: torch.dtype) -> Tensor:
        """given: the dtype of the image as it came; dtype: of the image, embedded."""
        pooled = samples.row_each("pooled_projections", model.config.pooled_projection_dim)
        guided = samples.expect("guidance", model.config.guidance_embeds)
        times = [samples.one_each("timestep"), *([samples.one_each("guidance")] if guided else [])]
        return model.time_text_embed(*(time.to(dtype) * 1000 for time in times), pooled)


class LongCatImage(Flux):
    """diffusers' LongCatImageTransformer2DModel: FLUX.1 without pooled text and guidance."""

    required = JointAdapter.required
    optional = ()
    packed = {
        "LongCatImageTransformerBlock": adaptive_double_block,
        "LongCatImageSingleTransformerBlock": adaptive_single_block,
        **NORM_OUT,
    }
    processors = ("LongCatImageAttnProcessor",)
    controls = {}
    small = {name: value for name, value in Flux.small.items() if name != "guidance_embeds"}

    def _condition(self, model: Any, samples: Samples, given: torch.dtype, dtype: torch.dtype) -> Tensor:
        return model.time_embed(samples.one_each("timestep").to(dtype) * 1000, dtype)


def pruned_norm(norm: Any, x: Tensor, rows: Tensor, packed: Packed) -> Tensor:
    shift, scale = rows.unbind(1)
    return modulate(norm.norm(x), shift, scale, packed.of_token)


class Chroma(Flux):
    """FLUX whose rows of modulation come from one layer."""

    required = JointAdapter.required
    optional = ("attention_mask",)
    packed = {
        "ChromaTransformerBlock": double_block, "ChromaSingleTransformerBlock": single_block,
        "ChromaAdaLayerNormContinuousPruned": pruned_norm,
    }  # fmt: skip
    small = {name: of for name, of in Flux.small.items() if name not in ("guidance_embeds", "pooled_projection_dim")}
    small |= {"approximator_num_channels": 16, "approximator_hidden_dim": 9, "approximator_layers": 2}
    conditions = {"attention_mask": lambda config, size, draw: _random_joint_mask(size)}

    def embed(self, model: Any, samples: Samples) -> Home:
        home = super().embed(model, samples)
        (table,), rest = home.sequence_features, home.rest
        home.rest = (*rest[:2], table[:, -2:])
        return home

    def _condition(self, model: Any, samples: Samples, given: torch.dtype, dtype: torch.dtype) -> Tensor:
        times = model.time_text_embed(samples.one_each("timestep").to(dtype) * 1000)
        return model.distilled_guidance_layer(times)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        """Rows of modulation: of single blocks, of images in double blocks, of texts there, of the head."""
        chunks, double, single = self.chunks(moved), model.transformer_blocks, model.single_transformer_blocks
        counts = [3 * len(single), 6 * len(double), 6 * len(double), 2]
        of_single, of_image, of_text, _ = moved.of_chunk[0].split(counts, 1)
        text, image = chunks.streams.split(moved.x)
        for block, *rows in zip(double, of_text.split(6, 1), of_image.split(6, 1), strict=False):
            text, image = run(block, text, image, *rows, chunks)
        x = chunks.streams.join(text, image)
        for block, of_block in zip(single, of_single.split(3, 1), strict=False):
            x = run(block, x, of_block, chunks)
        return x


def _random_joint_mask(size: Any) -> Tensor | None:
    mask = random_mask(size)
    if mask is None or not size.text_tokens:
        return None
    return torch.cat([mask, torch.ones(1, size.visual_tokens)], 1).bool()


def parallel_block(block: Any, x: Tensor, rows: Tensor, chunks: JointChunks) -> Tensor:
    """As Flux2SingleTransformerBlock.forward, over both streams; rows (chunks, 3, width)."""
    shift, scale, gate = rows.unbind(1)
    attn = block.attn
    projected = attn.to_qkv_mlp_proj(modulate(block.norm(x), shift, scale, chunks.of_token))
    sizes = [3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor]
    qkv, hidden = projected.split(sizes, -1)
    q, k, v = qkv.unflatten(-1, (3, -1, attn.head_dim)).unbind(1)
    attended = chunks.attention(attn, *chunks.rotated(attn.norm_q(q), attn.norm_k(k)), v)
    update = attn.to_out(torch.cat([attended, attn.mlp_act_fn(hidden)], -1))
    return clip_half(gated_add(x, update, gate, chunks.of_token))


class Flux2(Flux):
    """Its blocks share three modulations, computed once a step."""

    required = JointAdapter.required
    in_parts = ("attn",)
    controls = {}
    packed = {"Flux2TransformerBlock": double_block, "Flux2SingleTransformerBlock": parallel_block, **NORM_OUT}
    processors = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")
    small = {
        "in_channels": 5, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 12, "num_attention_heads": 3,
        "joint_attention_dim": 10, "timestep_guidance_channels": 16, "mlp_ratio": 2.5, "axes_dims_rope": (2, 4, 4, 2),
    }  # fmt: skip
    named_configs = {
        "flux2": {},
        "flux2-demo": {
            "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64,
            "in_channels": 64, "axes_dims_rope": (16, 16, 16, 16), "joint_attention_dim": 64,
        },
    }  # fmt: skip

    def _condition(self, model: Any, samples: Samples, given: torch.dtype, dtype: torch.dtype) -> Tensor:
        # As in diffusers, guidance is left out where the model was made without it.
        guided = samples.expect("guidance", getattr(model.config, "guidance_embeds", True))
        guidance = samples.one_each("guidance").to(given) * 1000 if guided else None
        return model.time_guidance_embed(samples.one_each("timestep").to(given) * 1000, guidance)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, (cond,) = self.chunks(moved), moved.of_chunk
        double = (model.double_stream_modulation_txt, model.double_stream_modulation_img)
        rows = (modulation(cond).unflatten(-1, (6, -1)) for modulation in double)
        x = chunks.through_both(model.transformer_blocks, run, moved.x, *rows)
        rows_single = model.single_stream_modulation(cond).unflatten(-1, (3, -1))
        return chunks.through(model.single_transformer_blocks, run, x, rows_single)
