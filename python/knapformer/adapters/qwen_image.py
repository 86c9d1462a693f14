"""Qwen-Image: diffusers' QwenImageTransformer2DModel. Text that `encoder_hidden_states_mask` masks is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.chunks import Home, Moved, RunBlock, clip_half
from knapformer.adapters.drawn import random_mask
from knapformer.adapters.joint import NORM_OUT, JointAdapter, JointChunks, Stream, double_stream
from knapformer.adapters.samples import Samples
from knapformer.attention.packed_rows import rows_of_runs


def block(
    block: Any, text: Tensor, image: Tensor, cond: Tensor, of_image: Tensor, chunks: JointChunks
) -> tuple[Tensor, Tensor]:
    """As QwenImageTransformerBlock.forward; cond, of_image: for each row of chunks.of_text, and of chunks.of_image."""
    text, image = double_stream(
        block.attn,
        Stream(text, block.txt_mod(cond).chunk(6, -1), block.txt_norm1, block.txt_norm2, block.txt_mlp),
        Stream(image, block.img_mod(of_image).chunk(6, -1), block.img_norm1, block.img_norm2, block.img_mlp),
        chunks,
    )
    return clip_half(text), clip_half(image)


class QwenImage(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_shapes")
    optional = ("encoder_hidden_states_mask", "txt_seq_lens", "additional_t_cond")
    input_layer = "img_in"
    blocks = ("transformer_blocks",)
    packed = {"QwenImageTransformerBlock": block, **NORM_OUT}
    refused = ("guidance_embeds",)
    controls = {"controlnet_block_samples": "transformer_blocks"}
    processors = ("QwenDoubleStreamAttnProcessor2_0",)
    small = {
        "in_channels": 7, "out_channels": 2, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
        "joint_attention_dim": 10, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    min_blocks = 2  # the last one writes no text
    named_configs = {
        "qwen-image": {},
        "qwen-image-demo": {
            "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 64, "axes_dims_rope": (8, 28, 28),
            "joint_attention_dim": 64,
        },
    }  # fmt: skip
    conditions = {  # (diffusers refuses an empty text: it gets one token, masked)
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, max(size.text_tokens, 1), 10),
        "encoder_hidden_states_mask": lambda config, size, draw: random_mask(size),
        "txt_seq_lens": lambda config, size, draw: None,  # newer versions do not take it
        # The last row of larger pictures is a reference.
        "img_shapes": lambda config, size, draw: [
            [(f, h, w)] if h < 4 else [(f, h - 1, w), (1, f, w)] for f, h, w in [size.grid]
        ],
        "additional_t_cond": lambda config, size, draw: (
            torch.tensor([size.text_tokens % 2]) if config.use_additional_t_cond else None
        ),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        image, image_lens = samples.rows("hidden_states", model.config.in_channels)
        text, padded_lens = samples.rows("encoder_hidden_states", model.config.joint_attention_dim)
        text_rows, image_rows = self._rotations(model, samples, padded_lens, image_lens, image.device)
        text_lens, text, text_rows = samples.unmasked("encoder_hidden_states_mask", padded_lens, text, text_rows)
        image = model.img_in(image)
        needed = samples.expect("additional_t_cond", model.config.use_additional_t_cond)
        more = samples.one_each("additional_t_cond").long() if needed else None
        time = samples.one_each("timestep").to(image.dtype)
        times = [time, time * 0] if model.zero_cond_t else [time]  # of text and predicted image, and of references
        cond = torch.stack([model.time_text_embed(each, image, more) for each in times], 1)
        text = model.txt_in(model.txt_norm(text))
        kinds = self._kinds(samples) if model.zero_cond_t else None
        return self.home(text, text_lens, image, image_lens, (text_rows, image_rows), cond, kinds)

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, (conds,) = self.chunks(moved), moved.of_chunk
        cond = of_image = conds[:, 0]
        if model.zero_cond_t:
            kinds = chunks.kinds
            of_image, segments = rows_of_runs(conds, chunks.step.chunk_lens, kinds - 1, kinds > 0)
            chunks = replace(chunks, of_image=segments)
        return chunks.through_both(model.transformer_blocks, run, moved.x, cond, of_image, ends_text=True)

    @staticmethod
    def _kinds(samples: Samples) -> Tensor:
        """1 of tokens of the first picture of a sample, 2 of the others."""
        counts = [list(map(math.prod, _shapes(shapes))) for shapes in samples.values("img_shapes")]
        pairs = [count for first, *others in counts for count in (first, sum(others))]
        return torch.tensor([1, 2]).repeat(len(counts)).repeat_interleave(torch.tensor(pairs, dtype=torch.int64))

    @staticmethod
    def _rotations(
        model: Any, samples: Samples, text_lens: list[int], image_lens: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        texts, images = [], []
        for i, shapes in enumerate(samples.values("img_shapes")):
            if isinstance(shapes, list) and isinstance(shapes[0], list) and len(shapes) != 1:
                raise ArgumentError(f"samples[{i}]['img_shapes']: got those of {len(shapes)} samples, expected one's")
            shapes = _shapes(shapes)
            if (count := sum(math.prod(shape) for shape in shapes)) != image_lens[i]:
                raise ArgumentError(f"samples[{i}]['img_shapes']: got {count} tokens, expected {image_lens[i]}")
            image, text = model.pos_embed([shapes], max_txt_seq_len=text_lens[i], device=device)
            images.append(torch.view_as_real(image))
            texts.append(torch.view_as_real(text))
        empty = torch.zeros((0, sum(model.config.axes_dims_rope) // 2, 2), device=device)
        return torch.cat([empty, *texts]), torch.cat([empty, *images])


def _shapes(shapes: Any) -> list[tuple[int, int, int]]:
    """Those of one sample, which may be in a list of samples, or the shape of its only picture."""
    shapes = shapes if isinstance(shapes, list) else [shapes]
    return shapes[0] if isinstance(shapes[0], list) else shapes
