"""Wan 2.1 and 2.2: diffusers' WanTransformer3DModel, with its image branch and with a time step per token.

The sequences that are planned and moved are the video's. The embedded text of a sample travels beside it as one row,
with room for max_text_tokens, to every rank that holds a chunk of it; so does the image of the image-to-video models.
A token takes its time step along; the rows of modulation are computed where the token is, one for each run of tokens
with the same time step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from knapformer import ArgumentError, StateError
from knapformer.adapters.adapter import Adapter, cast_for
from knapformer.adapters.chunks import Chunks, Home, Moved, Part, RunBlock, rotations_of_grids
from knapformer.adapters.drawn import random_grid, random_image, random_times
from knapformer.adapters.samples import Samples, check_shape, context_of_rows, one_after_another, rows_of_context
from knapformer.attention.kernels import Pairing, pairing_of
from knapformer.attention.packed_rows import gated_add, modulate, rotation_of, runs_of


@dataclass(frozen=True, eq=False, kw_only=True)
class WanChunks(Chunks):
    to_context: list[Pairing]  # to the text; to the image, where it is apart


def _attention_inputs(attn: Any, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q of x; k and v of the context: (tokens, heads, head_dim). Queries and keys are normed across heads."""
    heads = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
    q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in heads)
    return q, k, v


def _cross_attention(attn: Any, x: Tensor, contexts: list[Tensor], chunks: WanChunks) -> Tensor:
    (to_text, *to_image), (text, *image) = chunks.to_context, contexts
    q, k, v = _attention_inputs(attn, x, text)
    attended = to_text.attend(q, k, v)
    for to, context in zip(to_image, image, strict=True):
        heads = attn.norm_added_k(attn.add_k_proj(context)), attn.add_v_proj(context)
        attended = attended + to.attend(q, *(t.unflatten(-1, (attn.heads, -1)) for t in heads))
    return attn.to_out[1](attn.to_out[0](attended.flatten(1)))


def block(block: Any, x: Tensor, contexts: list[Tensor], time_rows: Tensor, chunks: WanChunks) -> Tensor:
    """As WanTransformerBlock.forward; contexts: text, and image where it is apart; time_rows (time steps, 6, width)."""
    of_token, dtype = chunks.of_token, x.dtype
    rows = (block.scale_shift_table + time_rows.float()).unbind(1)
    shift, scale, gate, shift_ff, scale_ff, gate_ff = rows
    normed = modulate(block.norm1(x.float()), shift, scale, of_token).to(dtype)
    q, k, v = _attention_inputs(block.attn1, normed, normed)
    attended = chunks.attention(block.attn1, *chunks.rotated(q, k), v)
    attended = block.attn1.to_out[1](block.attn1.to_out[0](attended))
    x = gated_add(x.float(), attended.float(), gate, of_token).to(dtype)

    x = x + _cross_attention(block.attn2, block.norm2(x.float()).to(dtype), contexts, chunks)

    hidden = block.ffn(modulate(block.norm3(x.float()), shift_ff, scale_ff, of_token).to(dtype))
    return gated_add(x.float(), hidden.float(), gate_ff, of_token).to(dtype)


def vace_block(
    vace: Any, x: Tensor, control: Tensor, contexts: list[Tensor], time_rows: Tensor, chunks: WanChunks
) -> tuple[Tensor, Tensor]:
    """As WanVACETransformerBlock.forward: what is added to the video, and the control for the next such block."""
    if vace.proj_in is not None:
        control = vace.proj_in(control) + x
    control = block(vace, control, contexts, time_rows, chunks)
    return vace.proj_out(control), control


class Wan(Adapter):
    required: ClassVar[tuple[str, ...]] = ("hidden_states", "timestep", "encoder_hidden_states")
    optional: ClassVar[tuple[str, ...]] = ("encoder_hidden_states_image",)
    input_layer = "patch_embedding"
    blocks: ClassVar[tuple[str, ...]] = ("blocks",)
    packed = {"WanTransformerBlock": block}
    in_parts = ("attn1", "attn2", "condition_embedder")
    processors = ("WanAttnProcessor",)
    small = {
        "patch_size": (1, 2, 2), "num_attention_heads": 3, "attention_head_dim": 14, "in_channels": 3,
        "out_channels": 2, "text_dim": 10, "freq_dim": 16, "ffn_dim": 50, "num_layers": 2, "rope_max_seq_len": 32,
    }  # fmt: skip
    text_beside = True
    of_grids = True
    named_configs = {
        "wan-14b": {},  # text to video
        "wan-1.3b": {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        "wan2.2-5b": {
            "num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48,
        },
        "wan-demo": {
            "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024, "text_dim": 64,
            "freq_dim": 32,
        },
        "wan-tiny": {
            "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 144, "in_channels": 2,
            "out_channels": 2, "text_dim": 10, "freq_dim": 16,
        },
    }  # fmt: skip
    conditions = {
        "timestep": lambda config, size, draw: random_times(size, draw),
        # With layers for the image, diffusers takes the last 512 tokens for the text.
        "encoder_hidden_states": lambda config, size, draw: draw.normal(
            1, 512 if config.added_kv_proj_dim else size.text_tokens, config.text_dim
        ),
        "encoder_hidden_states_image": lambda config, size, draw: random_image(config, draw, 7),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config, embedder = model.config, model.condition_embedder
        videos, grids = samples.grids("hidden_states", config.in_channels, self.patch(config))
        lens = list(map(math.prod, grids))
        x = _patched(model.patch_embedding, videos)
        rotation = rotations_of_grids(model.rope, videos)

        text, text_lens = samples.rows("encoder_hidden_states", config.text_dim)
        text = embedder.text_embedder(text)
        room, limit = self.max_text_tokens, f"{self.max_text_tokens} (max_text_tokens)"
        of_images: list[Tensor] = []
        if samples.expect("encoder_hidden_states_image", embedder.image_embedder is not None):
            image, image_lens = self._images(embedder.image_embedder, samples, config)
            image_room = config.pos_embed_seq_len or _CLIP_TOKENS
            if config.added_kv_proj_dim is None:  # as in diffusers: one context, read by the projections of the text
                text, text_lens = one_after_another((image, image_lens), (text, text_lens))
                room, limit = room + image_room, f"{limit} and {image_room} of the picture"
            else:
                name = "encoder_hidden_states_image"
                of_images = rows_of_context(name, image, image_lens, image_room, str(image_room))
        of_sequences = [*rows_of_context("encoder_hidden_states", text, text_lens, room, limit), *of_images]
        times = torch.cat([torch.zeros(0), *samples.time_each_token("timestep", lens)])
        return Home(x, lens, [rotation, times], of_sequences, rest=times, grids=grids)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        (step, x, (turns, times), of_chunk), embedder = moved, model.condition_embedder
        of_runs, of_token = runs_of(times, x.device)
        crosses = [pairing_of(step.chunk_lens, lens) for lens in of_chunk[1::2]]
        chunks = WanChunks(step=step, of_token=of_token, rotation=rotation_of(turns, x.dtype), to_context=crosses)
        contexts = [context_of_rows(*pair, x.shape[1]) for pair in zip(of_chunk[::2], of_chunk[1::2], strict=True)]
        cond = _time_embedding(embedder, of_runs, x.dtype)
        time_rows = embedder.time_proj(embedder.act_fn(cond)).unflatten(1, (6, -1))
        return chunks.through(model.blocks, run, x, contexts, time_rows)

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        times, of_token = runs_of(home.rest, x.device)
        cond = _time_embedding(model.condition_embedder, times, x.dtype)
        shift, scale = (model.scale_shift_table + cond.unsqueeze(1)).unbind(1)
        normed = modulate(model.norm_out(x.float()), shift, scale, of_token).to(x.dtype)
        return [Part(model.proj_out(normed), home.seq_lens)]

    @staticmethod
    def _images(image_embedder: Any, samples: Samples, config: Any) -> tuple[Tensor, list[int]]:
        """Embedded sample by sample: with a position table, two pictures (first and last frame) are one context."""
        name, room = "encoder_hidden_states_image", config.pos_embed_seq_len
        values = [samples.tensor(i, name) for i in range(len(samples))]
        for i, value in enumerate(values):
            shape = (1, "tokens") if room is None else (2, room // 2)
            check_shape(f"samples[{i}][{name!r}]", value, (*shape, config.image_dim))
        if not values:  # no rows, but computed through the weights, for their gradients
            none = samples.like.new_zeros((1, 0, config.image_dim))
            none = none if image_embedder.pos_embed is None else none + image_embedder.pos_embed[:, :0]
            return image_embedder.norm2(image_embedder.ff(image_embedder.norm1(none))).flatten(0, 1), []
        rows = [image_embedder(value).flatten(0, 1) for value in values]
        return torch.cat(rows), [len(row) for row in rows]


class ChronoEdit(Wan):
    """diffusers' ChronoEditTransformer3DModel, whose frames have other positions."""


class SkyReelsV2(Wan):
    """diffusers' SkyReelsV2Transformer3DModel where attention is full: Wan's blocks, and one time step a sample."""

    packed = {"SkyReelsV2TransformerBlock": block}
    processors = ("SkyReelsV2AttnProcessor",)
    refused = ("inject_sample_info",)
    conditions = Wan.conditions | {"timestep": lambda config, size, draw: 1000 * draw.time()}

    def check(self, model: Any) -> None:
        if (frames := model.config.num_frame_per_block) > 1:
            raise StateError(f"transformer: got a model with num_frame_per_block {frames}, expected 1")


class WanVACE(Wan):
    """diffusers' WanVACETransformer3DModel. Blocks of their own read the control, which travels with its tokens."""

    required = (*Wan.required, "control_hidden_states")
    blocks = ("vace_blocks", "blocks")
    packed = Wan.packed | {"WanVACETransformerBlock": vace_block}
    small = Wan.small | {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 5}
    conditions = Wan.conditions | {
        "timestep": lambda config, size, draw: 1000 * draw.time(),
        "control_hidden_states": lambda config, size, draw: random_grid(config, size, draw, config.vace_in_channels),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        home, config = super().embed(model, samples), model.config
        videos, grids = samples.grids("control_hidden_states", config.vace_in_channels, self.patch(config))
        for i, (got, expected) in enumerate(zip(grids, home.grids, strict=True)):
            if got != expected:
                where = f"samples[{i}]['control_hidden_states']"
                raise ArgumentError(f"{where}: got {got} patches, expected {expected}, as hidden_states have")
        home.features.append(_patched(model.vace_patch_embedding, videos))
        return home

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        *features, control = moved.features
        layers = dict(zip(sorted(model.config.vace_layers), model.vace_blocks, strict=True))
        hints: dict[Any, Tensor] = {}

        def run_controlled(block: Any, x: Tensor, *conditions: Any) -> Tensor:
            nonlocal control
            if not hints:  # before the first block
                for layer, of_control in layers.items():
                    hints[model.blocks[layer]], control = run(of_control, x, control, *conditions)
            x = run(block, x, *conditions)
            return x + hints[block] if block in hints else x

        return super().compute(model, moved._replace(features=features), run_controlled)


def _patched(embedding: Any, videos: list[Tensor]) -> Tensor:
    return torch.cat([embedding(video).flatten(2).transpose(1, 2).flatten(0, 1) for video in videos])


_CLIP_TOKENS = 257  # of a picture


def _time_embedding(embedder: Any, times: Tensor, dtype: torch.dtype) -> Tensor:
    projected = embedder.timesteps_proj(times)
    return embedder.time_embedder(cast_for(embedder.time_embedder, projected)).to(dtype)
