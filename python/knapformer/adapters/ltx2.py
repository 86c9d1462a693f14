"""LTX-2: diffusers' LTX2VideoTransformer3DModel. Video and audio of a sample are one sequence, [audio; video], as wide
as the wider. Each attends to itself, to the other, and to its text, which travels beside. A token takes its place and
its time steps along. A prediction is a pair, of video and audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.chunks import Home, Moved, Part, RunBlock
from knapformer.adapters.drawn import random_mask, random_times
from knapformer.adapters.joint import JointAdapter, JointChunks
from knapformer.adapters.parts import PartChunks, part_of, parts_attention
from knapformer.adapters.samples import Samples, context_of_rows, rows_of_context
from knapformer.attention.kernels import Pairing, pairing_of
from knapformer.attention.packed_rows import Segments, TwoStreams, gated_add, lengths_list, modulate, runs_of, to_device

_PREFIXES = ("audio_", "")  # of the names of what computes audio, and video: the kinds of tokens, in their order
Pair = tuple[Tensor, Tensor]  # of audio, and of video


class Turns:
    """cos and sin of tokens at coords (1, axes, tokens). No dataclass: FSDP would cast them."""

    def __init__(self, rope: Any, coords: Tensor) -> None:
        cos, sin = rope(F.pad(coords, (0, 1)))  # of one more: rope fails where there are none
        self.cos_sin = cos[..., :-1, :], sin[..., :-1, :]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream(PartChunks):
    """The audio, or the video, of the chunks on this rank. of_token: runs of tokens with the same time step."""

    prefix: str
    of_crossing: Segments  # runs with the same time step of attention between audio and video
    turns: Turns
    crossing_turns: Turns
    to_text: Pairing
    of_text: Segments  # the chunk of each token of the text


@dataclass(frozen=True, eq=False, kw_only=True)
class CoupledChunks(JointChunks):
    both: tuple[Stream, Stream]  # audio, video


class Beside(NamedTuple):
    """What blocks get beside a stream: its text, and what modulates it before each block adds its tables."""

    text: Tensor  # (its tokens, width)
    of_text: Tensor  # (chunks, 2 widths): shift and scale
    own: Tensor  # (runs, 6 or 9 widths): shift, scale, gate of its attention, its feed-forward, its attention to text
    crossing: Tensor  # (crossing runs, 4 widths): scale and shift of what attends into video, then of what into audio
    crossing_gate: Tensor  # (crossing runs, width): of what comes from the other stream


def _turned(attn: Any, x: Tensor, turns: Turns | None) -> Tensor:
    """(tokens, width) -> (tokens, heads, head_dim)."""
    from diffusers.models.transformers import transformer_ltx2 as ltx2

    if turns is not None and len(x):  # diffusers' functions fail where there are no tokens
        turn = ltx2.apply_interleaved_rotary_emb if attn.rope_type == "interleaved" else ltx2.apply_split_rotary_emb
        x = turn(x.unsqueeze(0), turns.cos_sin)[0]
    return x.unflatten(-1, (attn.heads, -1))


def _queries(attn: Any, x: Tensor, turns: Turns | None = None) -> Tensor:
    return _turned(attn, attn.norm_q(attn.to_q(x)), turns)


def _keys(attn: Any, x: Tensor, turns: Turns | None = None) -> tuple[Tensor, Tensor]:
    return _turned(attn, attn.norm_k(attn.to_k(x)), turns), _turned(attn, attn.to_v(x), None)


def _out(attn: Any, x: Tensor, attended: Tensor) -> Tensor:
    """attended (tokens, width); x: what the queries are of."""
    if attn.to_gate_logits is not None:
        gates = 2 * torch.sigmoid(attn.to_gate_logits(x))
        attended = (attended.unflatten(-1, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(1)
    return attn.to_out[1](attn.to_out[0](attended))


def _rows(table: Tensor, cond: Tensor) -> tuple[Tensor, ...]:
    return (table + cond.unflatten(-1, (len(table), -1))).unbind(1)


def _attend_to_itself(block: Any, x: Tensor, rows: Sequence[Tensor], _: Beside, stream: Stream) -> Tensor:
    attn, of_token = getattr(block, f"{stream.prefix}attn1"), stream.of_token
    shift, scale, gate = rows[:3]
    normed = modulate(getattr(block, f"{stream.prefix}norm1")(x), shift, scale, of_token)
    q, (k, v) = _queries(attn, normed, stream.turns), _keys(attn, normed, stream.turns)
    return gated_add(x, _out(attn, normed, stream.attention(attn, q, k, v)), gate, of_token)


def _attend_to_text(block: Any, x: Tensor, rows: Sequence[Tensor], beside: Beside, stream: Stream) -> Tensor:
    attn, of_token, text = getattr(block, f"{stream.prefix}attn2"), stream.of_token, beside.text
    normed = getattr(block, f"{stream.prefix}norm2")(x)
    if of_queries := rows[6:]:
        normed = modulate(normed, of_queries[0], of_queries[1], of_token)
    if block.cross_attn_adaln:
        shift, scale = _rows(getattr(block, f"{stream.prefix}prompt_scale_shift_table"), beside.of_text)
        text = modulate(text, shift, scale, stream.of_text)
    attended = stream.to_text.attend(_queries(attn, normed), *_keys(attn, text))
    update = _out(attn, normed, attended.flatten(1))
    return gated_add(x, update, of_queries[2], of_token) if of_queries else x + update


def _attend_to_each_other(
    block: Any, audio: Tensor, video: Tensor, beside: Sequence[Beside], chunks: CoupledChunks
) -> Pair:
    """Both at once, by one exchange."""
    into_audio, into_video = block.video_to_audio_attn, block.audio_to_video_attn
    tables = (block.audio_a2v_cross_attn_scale_shift_table, block.video_a2v_cross_attn_scale_shift_table)
    turns_audio, turns_video = (stream.crossing_turns for stream in chunks.both)

    def modulated(x: Tensor, kind: int) -> list[Tensor]:
        """For attention into video, and into audio."""
        rows, of_token = _rows(tables[kind][:4], beside[kind].crossing), chunks.both[kind].of_crossing
        return [modulate(x, shift, scale, of_token) for scale, shift in (rows[:2], rows[2:])]

    def updated(x: Tensor, update: Tensor, kind: int) -> Tensor:
        return gated_add(x, update, tables[kind][4:] + beside[kind].crossing_gate, chunks.both[kind].of_crossing)

    audio_keys, audio_queries = modulated(block.video_to_audio_norm(audio), 0)
    video_queries, video_keys = modulated(block.audio_to_video_norm(video), 1)
    of_audio = _queries(into_audio, audio_queries, turns_audio), *_keys(into_video, audio_keys, turns_audio)
    of_video = _queries(into_video, video_queries, turns_video), *_keys(into_audio, video_keys, turns_video)
    heads, parts = zip(of_audio, of_video, strict=True), chunks.both[1].parts
    to_audio, to_video = parts_attention(into_audio, chunks.step, chunks.streams, parts, *heads, reads=(1, 0))
    audio = updated(audio, _out(into_audio, audio_queries, to_audio.flatten(1)), 0)
    return audio, updated(video, _out(into_video, video_queries, to_video.flatten(1)), 1)


def _feed_forward(block: Any, x: Tensor, rows: Sequence[Tensor], _: Beside, stream: Stream) -> Tensor:
    shift, scale, gate = rows[3:6]
    normed = modulate(getattr(block, f"{stream.prefix}norm3")(x), shift, scale, stream.of_token)
    return gated_add(x, getattr(block, f"{stream.prefix}ff")(normed), gate, stream.of_token)


def block(block: Any, audio: Tensor, video: Tensor, beside: Sequence[Beside], chunks: CoupledChunks) -> Pair:
    """As LTX2VideoTransformerBlock.forward; beside: audio, and video."""
    pairs = zip(beside, chunks.both, strict=True)
    rows = [_rows(getattr(block, f"{stream.prefix}scale_shift_table"), of.own) for of, stream in pairs]

    def of_both(part: Callable[..., Tensor], *xs: Tensor) -> Pair:
        audio, video = (part(block, *of) for of in zip(xs, rows, beside, chunks.both, strict=True))
        return audio, video

    audio, video = of_both(_attend_to_itself, audio, video)
    audio, video = of_both(_attend_to_text, audio, video)
    audio, video = _attend_to_each_other(block, audio, video, beside, chunks)
    return of_both(_feed_forward, audio, video)


class LTX2(JointAdapter):
    required = (
        "hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states", "timestep",
    )  # fmt: skip
    optional = (
        "audio_timestep", "sigma", "audio_sigma", "encoder_attention_mask", "audio_encoder_attention_mask",
        "num_frames", "height", "width", "fps", "audio_num_frames", "video_coords", "audio_coords",
        "use_cross_timestep",
    )  # fmt: skip
    input_layer = "proj_in"
    blocks = ("transformer_blocks",)
    packed = {"LTX2VideoTransformerBlock": block}
    in_parts = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
    processors = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
    small = {
        "in_channels": 6, "out_channels": 5, "num_attention_heads": 3, "attention_head_dim": 12,
        "cross_attention_dim": 36, "audio_in_channels": 4, "audio_out_channels": 3, "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 10,
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {
        "audio_hidden_states": lambda config, size, draw: draw.normal(1, 4, config.audio_in_channels),
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, size.text_tokens, _text_width(config, "")),
        "audio_encoder_hidden_states": lambda config, size, draw: draw.normal(
            1, size.text_tokens, _text_width(config, "audio_")
        ),
        "encoder_attention_mask": lambda config, size, draw: random_mask(size),
        "audio_encoder_attention_mask": lambda config, size, draw: random_mask(size),
        "timestep": lambda config, size, draw: random_times(size, draw),
        "audio_timestep": lambda config, size, draw: 1000 * draw.time(),
        "sigma": lambda config, size, draw: 1000 * draw.time(),
        "audio_sigma": lambda config, size, draw: 1000 * draw.time() if size.text_tokens % 2 else None,
        "num_frames": lambda config, size, draw: size.grid[0],
        "height": lambda config, size, draw: size.grid[1],
        "width": lambda config, size, draw: size.grid[2],
        "fps": lambda config, size, draw: 12.0 + size.text_tokens,
        "audio_num_frames": lambda config, size, draw: 4,
        "video_coords": lambda config, size, draw: (
            draw.normal(1, 3, size.visual_tokens, 2) if size.text_tokens % 3 == 1 else None
        ),
        "audio_coords": lambda config, size, draw: draw.normal(1, 1, 4) if size.text_tokens % 3 == 1 else None,
        "use_cross_timestep": lambda config, size, draw: size.text_tokens % 2 == 0,
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        video, video_lens = samples.rows("hidden_states", config.in_channels)
        audio, audio_lens = samples.rows("audio_hidden_states", config.audio_in_channels)
        video, audio = model.proj_in(video), model.audio_proj_in(audio)
        sigmas = self._sigmas(model, samples)
        of_both = (("audio_timestep", audio_lens, sigmas[:, 0]), ("timestep", video_lens, sigmas[:, 1]))
        times = [self._times(samples, *of) for of in of_both]
        width = max(video.shape[1], audio.shape[1])
        audio, video = (F.pad(x, (0, width - x.shape[1])) for x in (audio, video))
        home = self.home(audio, audio_lens, video, video_lens, None, to_device(sigmas, video.device))
        streams, on_host = home.rest[0], TwoStreams.of_flags(home.features[0] == 0)
        home.features += [streams.join(*self._places(model, samples, audio_lens, video_lens)), on_host.join(*times)]
        home.sequence_features.append(torch.tensor([audio_lens, video_lens], dtype=torch.int64).t())
        for prefix in _PREFIXES:
            home.sequence_features += self._text(model, samples, prefix)
        home.rest = (streams, times, (audio_lens, video_lens))
        return home

    @staticmethod
    def _sigmas(model: Any, samples: Samples) -> Tensor:
        """(samples, 2): that of the video, by which audio reads it, and that of the audio."""
        needed = model.prompt_modulation and model.config.use_prompt_adaln_single
        values = samples.values("sigma")
        for i, (value, cross) in enumerate(zip(values, samples.values("use_cross_timestep"), strict=True)):
            if value is None and (needed or cross):
                raise ArgumentError(f"samples[{i}]['sigma']: got none, expected one, as the model's config says")
        ones = [1] * len(values)
        both = (samples.time_each_token(name, ones, "sigma") for name in ("sigma", "audio_sigma"))
        return torch.stack([torch.cat([torch.zeros(0), *times]) for times in both], 1)

    @staticmethod
    def _times(samples: Samples, name: str, lens: list[int], of_other: Tensor) -> Tensor:
        """(tokens, 2) on the CPU: of tokens, and that by which they attend to the other stream."""
        of_each, times = samples.time_each_token(name, lens, "timestep"), [torch.zeros(0, 2)]
        for own, sigma, crosses in zip(of_each, of_other, samples.values("use_cross_timestep"), strict=True):
            times.append(torch.stack([own, sigma.expand(len(own)) if crosses else own], 1))
        return torch.cat(times)

    @staticmethod
    def _places(model: Any, samples: Samples, audio_lens: list[int], video_lens: list[int]) -> Pair:
        """(tokens, 3) of audio, of video: time, row and column, as the model's rope takes them; audio has times."""
        none = torch.zeros(0, 3, device=samples.like.device)
        audio, video = [none], [none]
        names = ("num_frames", "height", "width", "fps", "video_coords", "audio_num_frames", "audio_coords")
        for i, (*grid, fps, of_video, num_frames, of_audio) in enumerate(zip(*map(samples.values, names), strict=True)):
            if of_video is None:
                fps = 24.0 if fps is None else fps
                of_video = model.rope.prepare_video_coords(1, *grid, none.device, fps=fps)
            if of_audio is None:
                of_audio = model.audio_rope.prepare_audio_coords(1, num_frames, none.device)
            video.append((of_video[0].mean(-1) if of_video.ndim == 4 else of_video[0]).t())
            audio.append(F.pad((of_audio[0].mean(-1) if of_audio.ndim == 4 else of_audio[0]).t(), (0, 2)))
            for name, got, expected in (("audio", audio[-1], audio_lens[i]), ("video", video[-1], video_lens[i])):
                if len(got) != expected:
                    raise ArgumentError(f"samples[{i}]: got places of {len(got)} tokens of {name}, expected {expected}")
        return torch.cat(audio), torch.cat(video)

    def _text(self, model: Any, samples: Samples, prefix: str) -> list[Tensor]:
        name, config = f"{prefix}encoder_hidden_states", model.config
        text, lens = samples.rows(name, _text_width(config, prefix))
        lens, text = samples.unmasked(f"{prefix}encoder_attention_mask", lens, text)
        if 0 in lens:  # the model subtracts the same of all scores, and attends to all
            raise ArgumentError(f"samples[{lens.index(0)}][{name!r}]: got no tokens, expected one that the mask keeps")
        if config.use_prompt_embeddings:
            text = getattr(model, f"{prefix}caption_projection")(text)
        return rows_of_context(name, text, lens, self.max_text_tokens, f"{self.max_text_tokens} (max_text_tokens)")

    def _of_kind(self, model: Any, moved: Moved, base: JointChunks, kind: int) -> tuple[Stream, Beside]:
        step, x, (kinds, places, times), (sigmas, lens, *contexts) = moved
        prefix, config, is_kind = _PREFIXES[kind], model.config, kinds == kind
        context, text_lens = contexts[2 * kind : 2 * kind + 2]
        own_times, of_token = runs_of(times[is_kind, 0], x.device)
        crossing_times, of_crossing = runs_of(times[is_kind, 1], x.device)
        coords = base.streams.split(places)[kind].t().unsqueeze(0)
        ropes = (model.rope, model.cross_attn_rope) if kind else (model.audio_rope, model.cross_attn_audio_rope)
        stream = Stream(
            **vars(part_of(base, kind, lens)) | {"of_token": of_token},
            prefix=prefix,
            of_crossing=of_crossing,
            turns=Turns(ropes[0], coords[:, : 3 if kind else 1]),
            crossing_turns=Turns(ropes[1], coords[:, :1]),
            to_text=pairing_of(step.counts_of(is_kind), lengths_list(text_lens)),
            of_text=Segments.of_lengths(text_lens, x.device),
        )

        def embedded(name: str, times: Tensor) -> Tensor:
            return getattr(model, name)(times, hidden_dtype=x.dtype)[0]

        crossing, gate = ("video", "a2v") if kind else ("audio", "v2a")
        factor = config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier
        width = getattr(model, f"{prefix}proj_in").out_features
        of_text = x.new_zeros(len(sigmas), 2 * width)
        if model.prompt_modulation and config.use_prompt_adaln_single:
            of_text = embedded(f"{prefix}prompt_adaln", sigmas[:, 1 - kind])
        return stream, Beside(
            text=context_of_rows(context, text_lens, width),
            of_text=of_text,
            own=embedded(f"{prefix}time_embed", own_times),
            crossing=embedded(f"av_cross_attn_{crossing}_scale_shift", crossing_times),
            crossing_gate=embedded(f"av_cross_attn_{crossing}_{gate}_gate", crossing_times * factor),
        )

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        x, base = moved.x, self.chunks(moved._replace(features=moved.features[:1]))
        both, beside = zip(*(self._of_kind(model, moved, base, kind) for kind in (0, 1)), strict=True)
        chunks = CoupledChunks(**vars(base), both=both)
        audio, video = (of[:, : given.text.shape[1]] for of, given in zip(base.streams.split(x), beside, strict=True))
        for each in model.transformer_blocks:
            audio, video = run(each, audio, video, beside, chunks)
        return chunks.streams.join(*(F.pad(of, (0, x.shape[1] - of.shape[1])) for of in (audio, video)))

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        streams, times, both_lens = home.rest
        parts, places = [], (streams.text_rows, streams.image_rows)
        for prefix, of, time, lens, rows in zip(_PREFIXES, streams.split(x), times, both_lens, places, strict=True):
            project = getattr(model, f"{prefix}proj_out")
            of_runs, of_token = runs_of(time[:, 0], x.device)
            table = getattr(model, f"{prefix}scale_shift_table")
            cond = getattr(model, f"{prefix}time_embed")(of_runs, hidden_dtype=x.dtype)[1]
            shift, scale = (table + cond.unsqueeze(1)).unbind(1)
            normed = getattr(model, f"{prefix}norm_out")(of[:, : table.shape[1]])
            parts.append(Part(project(modulate(normed, shift, scale, of_token)), lens, rows))
        return parts[::-1]  # a prediction is video and audio


def _text_width(config: Any, prefix: str) -> int:
    name = "caption_channels" if config.use_prompt_embeddings else f"{prefix}cross_attention_dim"
    return int(getattr(config, name))
