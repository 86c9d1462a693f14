"""Qwen-Image 2.1: diffusers' QwenImage21Transformer2DModel. Text is causal; pictures lie in it, and see what is before
them and themselves. A prediction has a row for each token, as the model's own; of text that the mask hides it is 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knapformer import ArgumentError
from knapformer._torch import MaskTables
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.chunks import Chunks, Home, Moved, OfSequences, Packed, Part, RunBlock, clip_half
from knapformer.adapters.samples import Samples, on_host
from knapformer.attention import masked
from knapformer.attention.packed_rows import TwoStreams, gated_add, modulate, rotation_of, rows_of_runs, to_device

_PICTURES = 32  # that a sample has room for; the last is predicted


@dataclass(frozen=True, eq=False, kw_only=True)
class CausalChunks(Chunks):
    sequences: OfSequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(self, attn: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the project's own attention, whatever backend was chosen: others have not this mask."""
        return self.sequences.attention(self.step, q, k, v, masked.attend).flatten(1)


def _layout_of(parts: Tensor, spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Any]:
    """For masked.attend, of sequences of these parts: tokens of text, picture, text, ... A picture attends to all up to
    its end, a token of text up to itself."""
    masks = [" ".join(f"{'cf'[i % 2]}{count}" for i, count in enumerate(of) if count) for of in parts.tolist()]
    lens = parts.sum(1).tolist()
    cuts = [(first, count, 0, length) for (first, count), length in zip(spans, lens, strict=True)]
    return (masked.layout_on(MaskTables(masks, lens, cuts), device),)


def block(block: Any, x: Tensor, rows: Tensor, chunks: CausalChunks) -> Tensor:
    """As QwenImage21TransformerBlock.forward; rows (runs of tokens, 4 width)."""
    attn, of_token = block.attn, chunks.of_token
    scale, gate, scale_ff, gate_ff = rows.chunk(4, -1)
    normed = modulate(block.img_norm1(x), None, scale, of_token)
    q, k, v = (to(normed).unflatten(-1, (attn.heads, -1)) for to in (attn.to_q, attn.to_k, attn.to_v))
    q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
    attended = attn.to_out[1](attn.to_out[0](chunks.attention(attn, *chunks.rotated(q, k), v)))
    x = gated_add(x, attended, gate.tanh(), of_token)
    hidden = block.img_mlp(modulate(block.img_norm2(x), None, scale_ff, of_token))
    return clip_half(gated_add(x, hidden, gate_ff.tanh(), of_token))


def final_norm(norm: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    scale = norm.linear(norm.silu(cond).to(x.dtype))
    return modulate(norm.norm(x), None, scale, packed.of_token)


class QwenImage21(Adapter):
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_shapes", "img_mask")
    optional = ("encoder_hidden_states_mask",)
    input_layer = "img_in"
    blocks = ("transformer_blocks",)
    packed = {"QwenImage21TransformerBlock": block, "QwenImage21AdaLayerNormContinuous": final_norm}
    processors = ("QwenImage21AttnProcessor", "QwenImage21FlexAttnProcessor")
    small = {
        "in_channels": 7, "out_channels": 5, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
        "context_in_dim": 10, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {
        "hidden_states": lambda config, size, draw: draw.normal(1, sum(map(math.prod, _random_shapes(size))), 7),
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, len(_random_layout(size)[1]), 10),
        "img_shapes": lambda config, size, draw: [_random_shapes(size)],
        "img_mask": lambda config, size, draw: _random_layout(size)[0].unsqueeze(0),
        "encoder_hidden_states_mask": lambda config, size, draw: (
            _random_layout(size)[1].unsqueeze(0) if size.text_tokens % 2 else None
        ),
    }

    @staticmethod
    def expected(model: Any, sample: Any) -> Tensor:
        out: Tensor = model(**sample).sample
        _, is_kept, _ = _layout(sample["img_mask"], sample.get("encoder_hidden_states_mask"), sample["img_shapes"])
        return out * is_kept.unsqueeze(1)

    def embed(self, model: Any, samples: Samples) -> Home:
        image, image_lens = samples.rows("hidden_states", model.img_in.in_features)
        text, text_lens = samples.rows("encoder_hidden_states", model.config.context_in_dim)
        slots, texts = (self._masks(samples, name) for name in ("img_mask", "encoder_hidden_states_mask"))
        for i, (mask, length) in enumerate(zip(texts, text_lens, strict=True)):
            if mask is not None and len(mask) != length:
                where = f"samples[{i}]['encoder_hidden_states_mask']"
                raise ArgumentError(f"{where}: got {len(mask)} flags, expected {length}, one for each token")
        layouts = [_layout(*of) for of in zip(slots, texts, samples.values("img_shapes"), strict=True)]
        rotations = [image.new_zeros((0, sum(model.config.axes_dims_rope) // 2, 2), dtype=torch.float32)]
        ids, parts = [torch.zeros(0, dtype=torch.int64)], []
        for i, ((is_image, is_kept, of_text), shapes) in enumerate(
            zip(layouts, samples.values("img_shapes"), strict=True)
        ):
            got = (int(is_image.sum()), sum(map(math.prod, shapes[0])), len(of_text))
            if got != (image_lens[i], image_lens[i], text_lens[i]):
                raise ArgumentError(
                    f"samples[{i}]: got {got[0]} tokens of pictures by img_mask, {got[1]} by img_shapes, {got[2]} of "
                    f"text by img_mask, expected {image_lens[i]} and {text_lens[i]}, as hidden_states have"
                )
            of_tokens = model.pos_embed(shapes[0], is_image, device=image.device)
            rotations.append(torch.view_as_real(of_tokens)[to_device(is_kept, image.device)])
            ids.append(model.build_token_metadata(is_image, shapes[0])[0][is_kept])
            parts.append(_parts(i, ids[-1]))
        kept_text = torch.cat([torch.zeros(0).bool(), *(of_text for *_, of_text in layouts)]).nonzero().squeeze(1)
        text = model.txt_in(text.index_select(0, to_device(kept_text, text.device)))
        image = model.img_in(image)
        x = TwoStreams.of_flags(torch.cat(ids) < 0, image.device).join(text.to(image.dtype), image)

        time = samples.one_each("timestep").to(image.dtype)
        # Of the predicted picture, and of what is known.
        times = [time, time * 0] if model.config.causal_condition else [time]
        cond = torch.stack([model.time_text_embed(each, image) for each in times], 1)
        is_known = torch.cat([torch.zeros(0).bool(), *(of != of[-1] for of in ids[1:])])
        known = is_known.to(torch.uint8) * (len(times) - 1)
        lens = [len(of) for of in ids[1:]]
        of_samples = [cond, torch.tensor(parts, dtype=torch.int64).reshape(len(parts), 2 * _PICTURES)]
        return Home(x, lens, [torch.cat(rotations), known], of_samples, rest=(cond, known, [of[1] for of in layouts]))

    @staticmethod
    def _masks(samples: Samples, name: str) -> list[Tensor | None]:
        """On the CPU: those that come on a device cost a wait."""
        given = [i for i, value in enumerate(samples.values(name)) if value is not None]
        masks = on_host([samples.tensor(i, name).flatten().bool() for i in given])
        return [masks[given.index(i)] if i in given else None for i in range(len(samples))]

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        step, x, (turns, known), (cond, parts) = moved
        rows, of_token = rows_of_runs(cond, step.chunk_lens, known)
        rotation, sequences = rotation_of(turns, x.dtype), OfSequences(parts, _layout_of)
        chunks = CausalChunks(step=step, of_token=of_token, rotation=rotation, sequences=sequences)
        return chunks.through(model.transformer_blocks, run, x, model.modulation(rows))

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        cond, known, _ = home.rest
        rows, of_token = rows_of_runs(cond, home.seq_lens, known)
        out = model.proj_out(model.norm_out(x, rows, Packed(of_token)))
        return [Part(out, home.seq_lens)]

    def predictions(self, model: Any, out: Tensor, lens: Sequence[int], home: Home) -> list[Tensor]:
        predictions = super().predictions(model, out, lens, home)
        for i, is_kept in enumerate(home.rest[2]):
            if not is_kept.all():
                places = to_device(is_kept.nonzero().squeeze(1), out.device)
                predictions[i] = out.new_zeros(1, len(is_kept), out.shape[1]).index_copy(1, places, predictions[i])
        return predictions


def _layout(slots: Any, text_mask: Tensor | None, shapes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens of a sample are of pictures, four for each slot; which are kept; and which rows of its text."""
    slots = slots.flatten().bool()
    is_image = slots.repeat_interleave(torch.where(slots, 4, 1))
    is_text = ~slots[: len(slots) - math.prod(shapes[0][-1]) // 4]
    kept_text = is_text if text_mask is None else is_text & text_mask.flatten().bool()
    is_kept = torch.ones_like(is_image)
    is_kept[~is_image] = kept_text[is_text]
    return is_image, is_kept, kept_text


def _parts(i: int, ids: Tensor) -> list[int]:
    """Tokens of text, picture, text, ... of tokens with these numbers of pictures, -1 of text."""
    parts: list[int] = []
    for picture, count in zip(*(of.tolist() for of in ids.unique_consecutive(return_counts=True)), strict=True):
        parts += [count] if picture < 0 or len(parts) % 2 else [0, count]
    if len(parts) > 2 * _PICTURES:
        raise ArgumentError(f"samples[{i}]['img_shapes']: got {len(parts) // 2} pictures, expected at most {_PICTURES}")
    return parts + [0] * (2 * _PICTURES - len(parts))


def _random_shapes(size: Any) -> list[tuple[int, int, int]]:
    """Longer texts have a reference in them."""
    frames, rows, columns = size.grid
    return [*([(1, 2, 4)] if size.text_tokens > 5 else []), (1, 2 * frames * rows, 2 * columns)]


def _random_layout(size: Any) -> tuple[Tensor, Tensor]:
    """img_mask, and a mask of the text."""
    count, slots = size.text_tokens, 2 * (len(_random_shapes(size)) - 1)
    flags = torch.tensor([False, True, False, True])
    before = min(3, count)
    img_mask = flags.repeat_interleave(torch.tensor([before, slots, count - before, size.visual_tokens]))
    return img_mask, torch.arange(count + slots) < count + slots - count // 3
