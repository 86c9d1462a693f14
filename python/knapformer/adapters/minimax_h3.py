"""MiniMax-H3: diffusers' MiniMaxH3Transformer3DModel. Text, video and audio lie in a sequence as the sample says; each
token takes its time step and modality along. A prediction is a pair, of video and audio. Texts are refined at home."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.adapter import Adapter, cast_for
from knapformer.adapters.chunks import Chunks, Home, Moved, Packed, Part, RunBlock, call
from knapformer.adapters.joint import self_attention, stream_block
from knapformer.adapters.samples import Samples, check_shape, on_host
from knapformer.attention.packed_rows import modulate, rotation_of, runs_of, to_device

_MODALITIES = 3  # of which each has rows of modulation of its own, for each time step


@dataclass(frozen=True, eq=False, kw_only=True)
class MiniMaxChunks(Chunks):
    def rotated(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """The model turns feature i with feature i + n / 2, of the first n of a head."""
        assert self.rotation is not None
        cos, sin = self.rotation.turns.unbind(-1)
        count, turned = cos.shape[-1], []
        for x in heads:
            a, b, rest = x.tensor_split([count, 2 * count], -1)
            turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype))
        return tuple(turned)


def block(block: Any, x: Tensor, cond: Tensor, rows: Tensor, chunks: MiniMaxChunks) -> Tensor:
    """As MiniMaxH3TransformerBlock.forward; for each run of tokens its embedded time step and its row of modulation."""
    of_runs = (table.index_select(0, rows) for table in block.adaln_proj(cond))
    return stream_block(block, x, partial(self_attention, block.attn, chunks), of_runs, chunks.of_token)


def refiner_block(block: Any, text: Tensor, chunks: Chunks) -> Tensor:
    return stream_block(block, text, partial(self_attention, block.attn, chunks))


def token_refiner(refiner: Any, text: Tensor, chunks: Chunks) -> Tensor:
    return refiner.final_norm(chunks.through(refiner.refiner_blocks, call, text))


def final_norm(norm: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    shift, scale = norm.linear(cast_for(norm.linear, F.silu(cond))).chunk(2, -1)
    return modulate(norm.norm(x), shift, scale, packed.of_token)


class MiniMaxH3(Adapter):
    required = (
        "hidden_states", "audio_hidden_states", "encoder_hidden_states", "timestep", "timestep_indices", "token_tags",
        "position_ids", "video_indices", "audio_indices", "text_indices",
    )  # fmt: skip
    input_layer = "context_embedder"
    blocks = ("transformer_blocks",)
    refiners = ("token_refiner.refiner_blocks",)
    packed = {
        "MiniMaxH3TransformerBlock": block, "MiniMaxH3TokenRefinerBlock": refiner_block,
        "MiniMaxH3TokenRefiner": token_refiner, "MiniMaxH3AdaLayerNormOut": final_norm,
    }  # fmt: skip
    processors = ("MiniMaxH3AttnProcessor",)
    small = {
        "num_attention_heads": 3, "attention_head_dim": 16, "hidden_size": 36, "num_layers": 2, "num_refiner_layers": 2,
        "ffn_dim": 26, "in_channels": 2, "audio_in_channels": 5, "text_dim": 10, "freq_dim": 16,
        "time_embed_hidden_dim": 20, "time_embed_dim": 14, "rope_freq_dim": 2,
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {
        "hidden_states": lambda config, size, draw: draw.normal(1, size.visual_tokens, 8),
        "audio_hidden_states": lambda config, size, draw: draw.normal(1, 4, 5),
        "timestep": lambda config, size, draw: torch.cat([torch.zeros(1), draw.time(), draw.time()]),
        "timestep_indices": lambda config, size, draw: _spread(size, 0, 1, size.text_tokens % 3),
        "token_tags": lambda config, size, draw: _spread(size, 1, 0, 2),
        "position_ids": lambda config, size, draw: 3 * draw.normal(size.text_tokens + size.visual_tokens + 4, 3),
        "text_indices": lambda config, size, draw: _layout(size, 0),
        "video_indices": lambda config, size, draw: _layout(size, 1),
        "audio_indices": lambda config, size, draw: _layout(size, 2),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        lens = [len(samples.tensor(i, "position_ids")) for i in range(len(samples))]
        cos, sin = model.rope(samples.rows_like("position_ids", 3, lens))
        turns = torch.stack([cos, sin], -1)[:, : cos.shape[1] // 2]

        widths = (config.in_channels * math.prod(config.patch_size), config.audio_in_channels, config.text_dim)
        names = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
        (video, *of_video), (audio, *of_audio), (text, text_lens) = map(samples.rows, names, widths)
        text = model.context_embedder(cast_for(model.context_embedder, text))
        text = model.token_refiner(text, Chunks.alone(text_lens, text))
        video, audio = (to(cast_for(to, rows)) for to, rows in ((model.proj_in, video), (model.audio_proj_in, audio)))
        x, places = text.new_zeros(sum(lens), text.shape[1]), {}
        starts = [0, *itertools.accumulate(lens)]
        for name, rows, of in (("text", text, text_lens), ("video", video, *of_video), ("audio", audio, *of_audio)):
            indices = zip(self._integers(samples, f"{name}_indices", of, lens), starts, strict=False)
            places[name] = torch.cat([torch.zeros(0).long(), *(index + start for index, start in indices)])
            x = x.index_copy(0, to_device(places[name], x.device), rows.to(x.dtype))

        given = on_host([torch.as_tensor(value).flatten().float() for value in samples.values("timestep")])
        steps = self._integers(samples, "timestep_indices", lens, list(map(len, given)))
        of_modality = self._integers(samples, "token_tags", lens, [_MODALITIES] * len(lens))
        times = torch.cat([torch.zeros(0), *(time[step] for time, step in zip(given, steps, strict=True))])
        tags = torch.cat([torch.zeros(0).long(), *of_modality])
        rest = (times, *((places[name], of) for name, of in (("video", *of_video), ("audio", *of_audio))))
        return Home(x, lens, [turns, times, tags], rest=rest)

    @staticmethod
    def _integers(samples: Samples, name: str, counts: list[int], ends: list[int]) -> list[Tensor]:
        """So many of each sample, from 0 to below its end, on the CPU: those that come on a device cost a wait."""
        values = [samples.tensor(i, name) for i in range(len(samples))]
        for i, (value, count) in enumerate(zip(values, counts, strict=True)):
            check_shape(f"samples[{i}][{name!r}]", value, (count,))
        found = on_host([value.long() for value in values])
        for i, (value, end) in enumerate(zip(found, ends, strict=True)):
            if len(other := value[(value < 0) | (value >= end)]):
                raise ArgumentError(f"samples[{i}][{name!r}]: got {other[0]}, expected numbers from 0 to {end - 1}")
        return found

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        step, x, (turns, times, tags), _ = moved
        values, of_value = times.unique(return_inverse=True)
        keys, of_token = runs_of(of_value * _MODALITIES + tags, x.device)
        chunks = MiniMaxChunks(step=step, of_token=of_token, rotation=rotation_of(turns, x.dtype))
        cond = self._embedded(model, to_device(values, x.device).index_select(0, keys // _MODALITIES))
        rows = torch.arange(len(keys), device=x.device) * _MODALITIES + keys % _MODALITIES
        return chunks.through(model.transformer_blocks, run, x, cond, rows)

    @staticmethod
    def _embedded(model: Any, times: Tensor) -> Tensor:
        return model.time_embedder(cast_for(model.time_embedder, model.time_proj(times)))

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        times, *modalities = home.rest
        times, of_token = runs_of(times, x.device)
        x = cast_for(model.proj_out, model.norm_out(x, self._embedded(model, times), Packed(of_token)))
        parts = []
        for project, (places, lens) in zip((model.proj_out, model.audio_proj_out), modalities, strict=True):
            rows = to_device(places, x.device)
            parts.append(Part(project(x.index_select(0, rows)), lens, rows))
        return parts


def _layout(size: Any, part: int) -> Tensor:
    """Places of text (0), video (1) and audio (2) among the tokens of a random sample: they lie in a few pieces."""
    counts = [size.text_tokens, size.visual_tokens, 4]
    pieces = torch.arange(sum(counts)).chunk(8)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(sum(counts)))
    return torch.cat([pieces[i] for i in order]).split(counts)[part]


def _spread(size: Any, *values: int) -> Tensor:
    """For each token of such a sample the number of its modality."""
    places = [_layout(size, part) for part in range(3)]
    numbers = torch.tensor(values).repeat_interleave(torch.tensor([len(of) for of in places]))
    return torch.empty_like(numbers).index_copy(0, torch.cat(places), numbers)
