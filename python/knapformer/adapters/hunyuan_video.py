"""HunyuanVideo: diffusers' HunyuanVideoTransformer3DModel. Masked text is left out; texts are refined where the sample
is. A first frame that is given (image_condition_type "token_replace") has rows of modulation of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.adapter import Chunks, Home, Packed, RunBlock, random_mask, rotation_rows, runs_of, unpatched
from knapformer.adapters.flux import adaptive_single_block
from knapformer.adapters.joint import JointAdapter, JointChunks, adaptive_rows, double_block, self_attention
from knapformer.adapters.samples import Samples
from knapformer.device_copies import to_device
from knapformer.models.packing import Segments, gated_add, segment_index

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


def token_refiner(refiner: Any, text: Tensor, times: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideoTokenRefiner.forward, and that of 1.5."""
    counts = to_device(torch.tensor(chunks.step.chunk_lens, dtype=torch.int64), text.device).unsqueeze(1)
    cond = refiner.time_text_embed(times, (chunks.of_token.sum(text.float()) / counts).to(text.dtype))
    text = refiner.proj_in(text)
    for each in refiner.token_refiner.refiner_blocks:
        text = each(text, cond, chunks)
    return text


def video_block(
    block: Any, text: Tensor, video: Tensor, cond: Tensor, of_video: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As HunyuanVideoTransformerBlock.forward and HunyuanVideoTokenReplaceTransformerBlock.forward; cond (chunks,
    width), of_video (runs of video tokens, width)."""
    text_rows, video_rows = adaptive_rows(block.norm1_context, cond, 6), adaptive_rows(block.norm1, of_video, 6)
    return double_block(block, text, video, text_rows, video_rows, chunks)


class Hunyuan(JointAdapter):
    """What HunyuanVideo and HunyuanVideo 1.5 share."""

    input_layer = "x_embedder.proj"
    refiners = {"context_embedder.token_refiner.refiner_blocks": refiner_block}
    modules = JointAdapter.modules | {"context_embedder": token_refiner, "x_embedder": patch_embedder}
    in_parts = ("norm1", "norm1_context", "norm", "norm_out")
    min_text_tokens = 1
    conditions = {
        "hidden_states": lambda config, size, draw: draw.normal(
            1, config.in_channels, size.grid[0] * config.patch_size_t, *(config.patch_size * n for n in size.grid[1:])
        ),
        "timestep": lambda config, size, draw: 1000 * draw.time(),
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, size.text_tokens, config.text_embed_dim),
        "encoder_attention_mask": lambda config, size, draw: text_mask(size),
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
        videos, grids = samples.grids("hidden_states", config.in_channels, self._patch(config))
        lens = list(map(math.prod, grids))
        x = model.x_embedder(videos, Packed(Segments.of_lengths(lens, samples.like.device)))
        rotations = [rotation_rows(*model.rope(video)) for video, _ in zip(videos, grids, strict=False)]
        none = x.new_zeros((0, config.attention_head_dim // 2, 2), dtype=torch.float32)
        unturned = torch.tensor([1.0, 0.0], device=x.device).expand(len(text), *none.shape[1:])
        kinds = torch.cat([torch.ones(0), *(1 + (torch.arange(math.prod(g)) < g[1] * g[2]) for g in grids)])
        rotation = (unturned, torch.cat([none, *rotations]))
        home = self.home(text, text_lens, x, lens, rotation, cond, kinds if first_frame else None)
        home.grids = grids
        return home

    def predictions(self, model: Any, out: Tensor, lens: Sequence[int], home: Home) -> list[Tensor]:
        patch = self._patch(model.config)
        out = out.unflatten(1, (-1, *patch)).movedim(1, -1).flatten(1)
        return [unpatched(part.unsqueeze(0), of, patch) for part, of in zip(out.split(lens), home.grids, strict=True)]

    @staticmethod
    def _patch(config: Any) -> tuple[int, ...]:
        return config.patch_size_t, config.patch_size, config.patch_size


class HunyuanVideo(Hunyuan):
    sequence = "video patches, and text tokens that no mask hides"
    left_out = "texts with the padding in front"
    required = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections")
    optional = ("guidance",)
    blocks = {"transformer_blocks": video_block, "single_transformer_blocks": adaptive_single_block}
    forwards = (
        "HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock",
        "HunyuanVideoTokenReplaceTransformerBlock", "HunyuanVideoTokenReplaceSingleTransformerBlock",
        "HunyuanVideoIndividualTokenRefinerBlock", "HunyuanVideoTokenRefiner", "HunyuanVideoPatchEmbed",
        *JointAdapter.forwards,
    )  # fmt: skip
    processors = ("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0")
    small = {
        "in_channels": 3, "out_channels": 2, "num_attention_heads": 3, "attention_head_dim": 14, "num_layers": 2,
        "num_single_layers": 1, "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 10,
        "pooled_projection_dim": 9, "rope_axes_dim": (2, 4, 8),
    }  # fmt: skip

    def embed(self, model: Any, samples: Samples) -> Home:
        times = samples.one_each("timestep")
        pooled = samples.row_each("pooled_projections", model.config.pooled_projection_dim)
        guided = samples.expect("guidance", model.config.guidance_embeds)
        conds = model.time_text_embed(times, pooled, samples.one_each("guidance") if guided else None)
        cond = torch.stack([cond for cond in conds if cond is not None], 1)  # (samples, 1 or 2, width)
        text, lens = self.refined_text(model, samples, times, leading=True)
        return self.home_of_videos(model, samples, text, lens, cond, first_frame=cond.shape[1] > 1)

    def compute(self, model: Any, x: Tensor, of_chunk: list[Tensor], chunks: JointChunks, run: RunBlock) -> Tensor:
        (cond,), streams = of_chunk, chunks.streams
        row_of_token = cond.shape[1] * segment_index(chunks.step.chunk_lens) + (chunks.kinds == _FIRST_FRAME)
        of_runs, of_token = runs_of(row_of_token, x.device)
        of_video_runs, of_video = runs_of(row_of_token[chunks.kinds > 0], x.device)
        chunks = dataclasses.replace(chunks, of_token=of_token, of_image=of_video)
        rows, video_rows = (cond.flatten(0, 1).index_select(0, of) for of in (of_runs, of_video_runs))
        text, video = streams.split(x)
        for each in model.transformer_blocks:
            text, video = run(each, text, video, cond[:, 0], video_rows, chunks)
        x = streams.join(text, video)
        for each in model.single_transformer_blocks:
            x = run(each, x, rows, chunks)
        return x

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        return super().last(model, image, cond[:, 0], packed)


def text_mask(size: Any) -> Tensor:
    mask = random_mask(size)
    return torch.ones(1, size.text_tokens) if mask is None else mask
