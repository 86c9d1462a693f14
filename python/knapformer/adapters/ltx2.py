"""LTX-2: diffusers' LTX2VideoTransformer3DModel. Video and audio of a sample are one sequence, [audio; video], as wide
as the wider. Each attends to itself, to the other, and to its text, which travels beside. A token takes its place and
its time steps along. A prediction is a pair, of video and audio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knapformer import ArgumentError
from knapformer.adapters.adapter import Home, Moved, OfSequences, Part, RunBlock
from knapformer.adapters.drawn import random_mask
from knapformer.adapters.joint import JointAdapter, JointChunks, PartChunks, counts_of, parts_attention, parts_of
from knapformer.adapters.samples import Samples, context_of_rows, rows_of_context
from knapformer.attention.kernels import Pairing, pairing_of
from knapformer.attention.packing import Segments, TwoStreams, gated_add, lengths_list, modulate, runs_of, to_device

_PREFIXES = ("audio_", "")  # of the names of what computes audio, and video: the kinds of tokens, in their order
Turns = tuple[Tensor, Tensor]  # cos and sin, as diffusers' rope gives them


class Stream:
    """The audio, or the video, of the chunks on this rank. No dataclass: FSDP would cast its angles."""

    def __init__(self, own: PartChunks, of_crossing: Segments, times: tuple[Tensor, Tensor], **parts: Any) -> None:
        self.own = own  # its of_token: runs of tokens with the same time step
        self.of_crossing = of_crossing  # runs with the same time step of attention between audio and video
        self.times = times  # those of both kinds of runs
        self.turns: Turns
        self.crossing_turns: Turns
        self.to_text: Pairing
        self.of_text: Segments  # the chunk of each token of the text
        self.__dict__.update(parts)


@dataclass(frozen=True, eq=False, kw_only=True)
class CoupledChunks(JointChunks):
    both: tuple[Stream, Stream]  # audio, video
    parts: OfSequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def crossing(self, attn: nn.Module, *heads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries of audio and of video to keys and values of the other: (its tokens, heads, head_dim) each."""
        return parts_attention(attn, self.step, self.streams, self.parts, *heads, reads=(1, 0))


def _turned(attn: Any, x: Tensor, turns: Turns | None) -> Tensor:
    """(tokens, width) -> (tokens, heads, head_dim)."""
    from diffusers.models.transformers import transformer_ltx2 as ltx2

    if turns is not None and len(x):  # diffusers' functions fail where there are no tokens
        turn = ltx2.apply_interleaved_rotary_emb if attn.rope_type == "interleaved" else ltx2.apply_split_rotary_emb
        x = turn(x.unsqueeze(0), turns)[0]
    return x.unflatten(-1, (attn.heads, -1))


def _turns(rope: Any, coords: Tensor) -> Turns:
    """Of coords (1, axes, tokens). One more is computed: rope fails where there are none."""
    cos, sin = rope(F.pad(coords, (0, 1)))
    return cos[..., :-1, :], sin[..., :-1, :]


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


def _read(block: Any, prefix: str, x: Tensor, text: Tensor, rows: Any, prompt: Tensor | None, stream: Stream) -> Tensor:
    """One modality attends to itself and to its text."""
    of_token = stream.own.of_token
    attn1, attn2 = getattr(block, f"{prefix}attn1"), getattr(block, f"{prefix}attn2")
    shift, scale, gate, _, _, _, *of_text = rows
    normed = modulate(getattr(block, f"{prefix}norm1")(x), shift, scale, of_token)
    k, v = _keys(attn1, normed, stream.turns)
    attended = stream.own.attention(attn1, _queries(attn1, normed, stream.turns), k, v)
    x = gated_add(x, _out(attn1, normed, attended), gate, of_token)

    normed = getattr(block, f"{prefix}norm2")(x)
    if of_text:
        normed = modulate(normed, of_text[0], of_text[1], of_token)
    if block.cross_attn_adaln:
        table = getattr(block, f"{prefix}prompt_scale_shift_table")
        if prompt is None:
            prompt = text.new_zeros(len(stream.own.step.chunk_lens), table.numel())
        shift, scale = _rows(table, prompt)
        text = modulate(text, shift, scale, stream.of_text)
    update = _out(attn2, normed, stream.to_text.attend(_queries(attn2, normed), *_keys(attn2, text)).flatten(1))
    return gated_add(x, update, of_text[2], of_token) if of_text else x + update


def block(
    block: Any, audio: Tensor, video: Tensor, texts: Sequence[Tensor], conds: Sequence[Any], chunks: CoupledChunks
) -> tuple[Tensor, Tensor]:
    """As LTX2VideoTransformerBlock.forward; texts and conds: of audio, and of video. A cond: for runs of tokens what
    modulates them, reads the other modality, and gates that; and what modulates the text, where the model has it."""
    own = [_rows(getattr(block, f"{p}scale_shift_table"), cond[0]) for p, cond in zip(_PREFIXES, conds, strict=True)]
    parts = zip(_PREFIXES, (audio, video), texts, own, (cond[3] for cond in conds), chunks.both, strict=True)
    audio, video = (_read(block, prefix, x, text, rows, prompt, of) for prefix, x, text, rows, prompt, of in parts)

    attns = (block.video_to_audio_attn, block.audio_to_video_attn)  # into audio, into video
    norms = (block.video_to_audio_norm, block.audio_to_video_norm)
    tables = (block.audio_a2v_cross_attn_scale_shift_table, block.video_a2v_cross_attn_scale_shift_table)
    heads, updates = [], []
    for kind, (x, cond, of) in enumerate(zip((audio, video), conds, chunks.both, strict=True)):
        rows, normed = _rows(tables[kind][:4], cond[1]), norms[kind](x)
        # Scale and shift of what goes into video, then of what goes into audio.
        for_video, for_audio = (modulate(normed, rows[i + 1], rows[i], of.of_crossing) for i in (0, 2))
        reads, is_read = (for_video, for_audio) if kind else (for_audio, for_video)
        queries = _queries(attns[kind], reads, of.crossing_turns)
        heads.append((queries, *_keys(attns[1 - kind], is_read, of.crossing_turns)))
        updates.append((x, partial(_out, attns[kind], reads), tables[kind][4:] + cond[2]))

    outs = []
    crossed = chunks.crossing(attns[0], *zip(*heads, strict=True))
    for prefix, (x, out, gate), attended, rows, of in zip(_PREFIXES, updates, crossed, own, chunks.both, strict=True):
        x = gated_add(x, out(attended.flatten(1)), gate, of.of_crossing)
        shift, scale, gate = rows[3:6]
        normed = modulate(getattr(block, f"{prefix}norm3")(x), shift, scale, of.own.of_token)
        outs.append(gated_add(x, getattr(block, f"{prefix}ff")(normed), gate, of.own.of_token))
    return outs[0], outs[1]


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
        # One for all tokens, or 0 for those of the first frame, which is known.
        "timestep": lambda config, size, draw: (
            1000 * draw.time() * (torch.arange(size.visual_tokens) >= size.grid[1] * size.grid[2] * (size.grid[0] > 1))
        ).unsqueeze(0),
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
        cross = [bool(value) for value in samples.values("use_cross_timestep")]
        times = []
        for name, lens, other in (("audio_timestep", audio_lens, 0), ("timestep", video_lens, 1)):
            given = samples.time_each_token(name, lens, "timestep")
            of_other = [sigma[other].expand(len(time)) for sigma, time in zip(sigmas, given, strict=True)]
            crossing = (other if flag else time for other, time, flag in zip(of_other, given, cross, strict=True))
            pairs = (torch.stack(pair, 1) for pair in zip(given, crossing, strict=True))
            times.append(torch.cat([torch.zeros(0, 2), *pairs]))

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
        pairs = zip(*(samples.time_each_token(name, ones, "sigma") for name in ("sigma", "audio_sigma")), strict=True)
        return torch.stack([torch.zeros(2), *(torch.cat(pair) for pair in pairs)])[1:]

    @staticmethod
    def _places(model: Any, samples: Samples, audio_lens: list[int], video_lens: list[int]) -> tuple[Tensor, Tensor]:
        """(tokens, 3) of audio, of video: time, row and column, as the model's rope takes them; audio has times."""
        none = torch.zeros(0, 3, device=samples.like.device)
        audio, video = [none], [none]
        for i in range(len(samples)):
            get = samples.sample(i).get
            coords = get("video_coords")
            if coords is None:
                frames, fps = (get("num_frames"), get("height"), get("width")), get("fps")
                coords = model.rope.prepare_video_coords(1, *frames, none.device, fps=24.0 if fps is None else fps)
            video.append(coords[0].mean(-1).t() if coords.ndim == 4 else coords[0].t())
            coords = get("audio_coords")
            if coords is None:
                coords = model.audio_rope.prepare_audio_coords(1, get("audio_num_frames"), none.device)
            audio.append(F.pad((coords[0].mean(-1) if coords.ndim == 4 else coords[0]).t(), (0, 2)))
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

    def _coupled(self, model: Any, moved: Moved) -> CoupledChunks:
        step, x, (kinds, places, times), of_chunk = moved
        base = self.chunks(moved._replace(features=[kinds]))
        lens, text_lens = of_chunk[1], [lengths_list(of) for of in of_chunk[3::2]]
        both = []
        for kind, own_places in enumerate(base.streams.split(places)):
            part = base.part(kind, lens)
            of_own, of_crossing = (runs_of(of, x.device) for of in times[kinds == kind].unbind(1))
            rope, crossing = (
                (model.rope, model.cross_attn_rope) if kind else (model.audio_rope, model.cross_attn_audio_rope)
            )
            coords = own_places.t().unsqueeze(0)
            chunk_lens = counts_of(kinds == kind, step.chunk_lens)
            both.append(
                Stream(
                    replace(part, of_token=of_own[1]),
                    of_crossing[1],
                    (of_own[0], of_crossing[0]),
                    turns=_turns(rope, coords[:, : 3 if kind else 1]),
                    crossing_turns=_turns(crossing, coords[:, :1]),
                    to_text=pairing_of(chunk_lens, text_lens[kind]),
                    of_text=Segments.of_lengths(text_lens[kind], x.device),
                )
            )
        return CoupledChunks(**vars(base), both=(both[0], both[1]), parts=parts_of(lens, 1))

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, x, of_chunk, config = self._coupled(model, moved), moved.x, moved.of_chunk, model.config
        sigmas = of_chunk[0]
        factor = config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier
        widths = (model.audio_proj_in.out_features, model.proj_in.out_features)
        has_prompt = model.prompt_modulation and config.use_prompt_adaln_single
        conds, texts = [], []
        for kind, (prefix, of, of_crossing, gate) in enumerate(
            zip(_PREFIXES, chunks.both, ("av_cross_attn_audio", "av_cross_attn_video"), ("v2a", "a2v"), strict=True)
        ):
            times = {f"{prefix}time_embed": of.times[0], f"{of_crossing}_scale_shift": of.times[1]}
            times[f"{of_crossing}_{gate}_gate"] = of.times[1] * factor
            if has_prompt:
                times[f"{prefix}prompt_adaln"] = sigmas[:, 1 - kind]
            cond = [getattr(model, name)(time, hidden_dtype=x.dtype)[0] for name, time in times.items()]
            conds.append((*cond, *([] if has_prompt else [None])))
            texts.append(context_of_rows(of_chunk[2 + 2 * kind], of_chunk[3 + 2 * kind], widths[kind]))
        audio, video = (of[:, :width] for of, width in zip(chunks.streams.split(x), widths, strict=True))
        for each in model.transformer_blocks:
            audio, video = run(each, audio, video, texts, conds, chunks)
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
