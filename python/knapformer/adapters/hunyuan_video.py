"""HunyuanVideo and 1.5: diffusers' HunyuanVideoTransformer3DModel and HunyuanVideo15Transformer3DModel. Masked text is
left out; texts are refined where the sample is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.chunks import Chunks, Home, Moved, Packed, RunBlock, call, rotations_of_grids
from knapformer.adapters.drawn import random_mask
from knapformer.adapters.flux import adaptive_single_block
from knapformer.adapters.joint import NORM_OUT, JointAdapter, adaptive_double_block, self_attention
from knapformer.adapters.samples import Samples, on_host, one_after_another
from knapformer.attention.packed_rows import Segments, gated_add, rows_of_runs, to_device

_FIRST_FRAME = 2  # kind of a token; those of other frames are 1


def patch_embedder(embedder: Any, videos: list[Tensor], packed: Packed) -> Tensor:
    """As HunyuanVideoPatchEmbed.forward, and that of 1.5, of each video: (tokens, width). Called once, as often as on
    other ranks: it may be a unit of FSDP."""
    return torch.cat([embedder.proj(video).flatten(2).transpose(1, 2).flatten(0, 1) for video in videos])


def refiner_block(block: Any, text: Tensor, cond: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideoIndividualTokenRefinerBlock.forward, and that of 1.5."""
    gate, gate_ff = block.norm_out.linear(block.norm_out.nonlinearity(cond)).chunk(2, 1)
    text = gated_add(text, self_attention(block.attn, chunks, block.norm1(text)), gate, chunks.of_token)
    return gated_add(text, block.ff(block.norm2(text)), gate_ff, chunks.of_token)


def refiner_blocks(refiner: Any, text: Tensor, cond: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideoIndividualTokenRefiner.forward, and that of 1.5."""
    return chunks.through(refiner.refiner_blocks, call, text, cond)


def token_refiner(refiner: Any, text: Tensor, times: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideoTokenRefiner.forward, and that of 1.5."""
    counts = to_device(torch.tensor(chunks.step.chunk_lens, dtype=torch.int64), text.device).unsqueeze(1)
    cond = refiner.time_text_embed(times, (chunks.of_token.sum(text.float()) / counts).to(text.dtype))
    return refiner.token_refiner(refiner.proj_in(text), cond, chunks)


class Hunyuan(JointAdapter):
    """What HunyuanVideo and HunyuanVideo 1.5 share."""

    input_layer = "x_embedder.proj"
    of_grids = channels_first = True
    refiners = ("context_embedder.token_refiner.refiner_blocks",)
    in_parts = ("attn", "norm1", "norm1_context", "norm", "norm_out")
    min_text_tokens = 1
    small = {
        "in_channels": 3, "out_channels": 2, "num_attention_heads": 3, "attention_head_dim": 14, "num_layers": 2,
        "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 10, "rope_axes_dim": (2, 4, 8),
    }  # fmt: skip
    conditions = {
        "timestep": lambda config, size, draw: 1000 * draw.time(),
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, size.text_tokens, config.text_embed_dim),
        "encoder_attention_mask": lambda config, size, draw: random_mask(size, needed=True),
    }

    def refined_text(self, model: Any, samples: Samples, times: Tensor, leading: bool) -> tuple[Tensor, list[int]]:
        """The text that the mask keeps, and how many tokens of each sample. leading: as of Samples.unmasked."""
        text, padded = samples.rows("encoder_hidden_states", model.config.text_embed_dim)
        lens, text = samples.unmasked("encoder_attention_mask", padded, text, leading=leading)
        if 0 in lens:  # whose mean would be NaN, and so would all gradients
            where = f"samples[{lens.index(0)}]['encoder_attention_mask']"
            raise ArgumentError(f"{where}: got a text without a token that counts, expected one at least")
        return model.context_embedder(text, times, Chunks.alone(lens, text)), lens

    def home_of_videos(
        self, model: Any, samples: Samples, text: Tensor, text_lens: list[int], cond: Tensor, first_frame: bool = False
    ) -> Home:
        """first_frame: whether the first frame's tokens are a kind of their own."""
        config = model.config
        videos, grids = samples.grids("hidden_states", config.in_channels, self.patch(config))
        lens = list(map(math.prod, grids))
        x = model.x_embedder(videos, Packed(Segments.of_lengths(lens, samples.like.device)))
        turns = rotations_of_grids(model.rope, videos)
        kinds = torch.cat([torch.ones(0), *(1 + (torch.arange(math.prod(g)) < g[1] * g[2]) for g in grids)])
        return self.home(text, text_lens, x, lens, (None, turns), cond, kinds if first_frame else None, grids)

    @staticmethod
    def patch(config: Any) -> tuple[int, ...]:
        return config.patch_size_t, config.patch_size, config.patch_size


class HunyuanVideo(Hunyuan):
    """A first frame that is given (image_condition_type "token_replace") has rows of modulation of its own."""

    required = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections")
    optional = ("guidance",)
    blocks = ("transformer_blocks", "single_transformer_blocks")
    packed = {
        "HunyuanVideoTransformerBlock": adaptive_double_block,
        "HunyuanVideoTokenReplaceTransformerBlock": adaptive_double_block,
        "HunyuanVideoSingleTransformerBlock": adaptive_single_block,
        "HunyuanVideoTokenReplaceSingleTransformerBlock": adaptive_single_block,
        "HunyuanVideoIndividualTokenRefinerBlock": refiner_block,
        "HunyuanVideoIndividualTokenRefiner": refiner_blocks,
        "HunyuanVideoTokenRefiner": token_refiner,
        "HunyuanVideoPatchEmbed": patch_embedder,
        **NORM_OUT,
    }
    processors = ("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0")
    small = Hunyuan.small | {"num_single_layers": 1, "pooled_projection_dim": 9}

    def embed(self, model: Any, samples: Samples) -> Home:
        times = samples.one_each("timestep")
        pooled = samples.row_each("pooled_projections", model.config.pooled_projection_dim)
        guided = samples.expect("guidance", model.config.guidance_embeds)
        conds = model.time_text_embed(times, pooled, samples.one_each("guidance") if guided else None)
        cond = torch.stack([cond for cond in conds if cond is not None], 1)  # (samples, 1 or 2, width)
        text, lens = self.refined_text(model, samples, times, leading=True)
        return self.home_of_videos(model, samples, text, lens, cond, first_frame=cond.shape[1] > 1)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, (cond,) = self.chunks(moved), moved.of_chunk
        of_tokens = cond, chunks.step.chunk_lens, chunks.kinds == _FIRST_FRAME
        (rows, of_token), (of_video, of_image) = rows_of_runs(*of_tokens), rows_of_runs(*of_tokens, chunks.kinds > 0)
        chunks = dataclasses.replace(chunks, of_token=of_token, of_image=of_image)
        x = chunks.through_both(model.transformer_blocks, run, moved.x, cond[:, 0], of_video)
        return chunks.through(model.single_transformer_blocks, run, x, rows)


class HunyuanVideo15(Hunyuan):
    """A picture of zeros, by which the model knows text-to-video, is left out like masked text."""

    required = (
        "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2",
        "encoder_attention_mask_2", "image_embeds",
    )  # fmt: skip
    optional = ("timestep_r",)
    blocks = ("transformer_blocks",)
    packed = {
        "HunyuanVideo15TransformerBlock": adaptive_double_block,
        "HunyuanVideo15IndividualTokenRefinerBlock": refiner_block,
        "HunyuanVideo15IndividualTokenRefiner": refiner_blocks,
        "HunyuanVideo15TokenRefiner": token_refiner,
        "HunyuanVideo15PatchEmbed": patch_embedder,
        **NORM_OUT,
    }
    processors = ("HunyuanVideo15AttnProcessor2_0", "AttnProcessor2_0")
    small = Hunyuan.small | {"patch_size": 2, "text_embed_2_dim": 9, "image_embed_dim": 11}
    conditions = Hunyuan.conditions | {
        "timestep_r": lambda config, size, draw: 1000 * draw.time() if config.use_meanflow else None,
        "encoder_hidden_states_2": lambda config, size, draw: draw.normal(1, size.text_tokens, 9),
        # The second text may be nothing but padding; and half of the samples have a picture.
        "encoder_attention_mask_2": lambda config, size, draw: random_mask(size, needed=True) * (size.grid[2] > 2),
        "image_embeds": lambda config, size, draw: draw.normal(1, 5, 11) * (size.grid[2] == 3),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        times = samples.one_each("timestep")
        cond = model.time_embed(
            times, samples.one_each("timestep_r") if samples.expect("timestep_r", config.use_meanflow) else None
        )
        text, text_lens = self.refined_text(model, samples, times, leading=False)
        second, lens = samples.rows("encoder_hidden_states_2", config.text_embed_2_dim)
        second_lens, second = samples.unmasked("encoder_attention_mask_2", lens, second)
        image, image_lens = samples.rows("image_embeds", config.image_embed_dim)
        parts = image.split(image_lens)
        given = [bool(flag) for flag in on_host([part.any().reshape(1) for part in parts])]
        image = torch.cat([image[:0], *(part for part, flag in zip(parts, given, strict=True) if flag)])
        image_lens = [length * flag for length, flag in zip(image_lens, given, strict=True)]
        of_kind = model.cond_type_embed(torch.arange(3, device=text.device))
        context, context_lens = one_after_another(
            (text + of_kind[0], text_lens),
            (model.context_embedder_2(second) + of_kind[1], second_lens),
            (model.image_embedder(image) + of_kind[2], image_lens),
        )
        return self.home_of_videos(model, samples, context, context_lens, cond)
