"""Qwen-Image: diffusers' QwenImageTransformer2DModel. Text that `encoder_hidden_states_mask` masks is left out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.adapter import Home, clip_half
from knapformer.adapters.joint import JointAdapter, JointChunks, Stream, double_stream, joint_attention
from knapformer.adapters.samples import Samples


def block(block: Any, text: Tensor, image: Tensor, cond: Tensor, chunks: JointChunks) -> tuple[Tensor, Tensor]:
    """As QwenImageTransformerBlock.forward, with a row of modulation for each chunk."""
    text, image = double_stream(
        joint_attention(block.attn, chunks),
        Stream(text, block.txt_mod(cond).chunk(6, -1), block.txt_norm1, block.txt_norm2, block.txt_mlp),
        Stream(image, block.img_mod(cond).chunk(6, -1), block.img_norm1, block.img_norm2, block.img_mlp),
        chunks,
    )
    return clip_half(text), clip_half(image)


class QwenImage(JointAdapter):
    required = ("hidden_states", "encoder_hidden_states", "timestep", "img_shapes")
    optional = ("encoder_hidden_states_mask", "txt_seq_lens")
    input_layer = "img_in"
    blocks = {"transformer_blocks": block}  # noqa: RUF012
    forwards = ("QwenImageTransformerBlock", *JointAdapter.forwards)
    refused = ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds")
    in_parts = ("attn",)
    processors = ("QwenDoubleStreamAttnProcessor2_0",)
    named_configs = {  # noqa: RUF012
        "qwen-image": {},
        "qwen-image-demo": {
            "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 64, "axes_dims_rope": (8, 28, 28),
            "joint_attention_dim": 64,
        },
    }  # fmt: skip

    def embed(self, model: Any, samples: Samples) -> Home:
        image, image_lens = samples.rows("hidden_states", model.config.in_channels)
        text, padded_lens = samples.rows("encoder_hidden_states", model.config.joint_attention_dim)
        text_rows, image_rows = self._rotations(model, samples, padded_lens, image_lens, image.device)
        text_lens, text, text_rows = samples.unmasked("encoder_hidden_states_mask", padded_lens, text, text_rows)
        image = model.img_in(image)
        cond = model.time_text_embed(samples.one_each("timestep").to(image.dtype), image)
        text = model.txt_in(model.txt_norm(text))
        return self.home(text, text_lens, image, image_lens, (text_rows, image_rows), cond)

    @staticmethod
    def _rotations(
        model: Any, samples: Samples, text_lens: list[int], image_lens: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        texts, images = [], []
        for i, shapes in enumerate(samples.values("img_shapes")):
            shapes = shapes if isinstance(shapes, list) else [shapes]
            if isinstance(shapes[0], list):
                if len(shapes) != 1:
                    raise ArgumentError(
                        f"samples[{i}]['img_shapes']: got those of {len(shapes)} samples, expected one's"
                    )
                shapes = shapes[0]
            if (count := sum(math.prod(shape) for shape in shapes)) != image_lens[i]:
                raise ArgumentError(f"samples[{i}]['img_shapes']: got {count} tokens, expected {image_lens[i]}")
            image, text = model.pos_embed([shapes], max_txt_seq_len=text_lens[i], device=device)
            images.append(torch.view_as_real(image))
            texts.append(torch.view_as_real(text))
        empty = torch.zeros((0, sum(model.config.axes_dims_rope) // 2, 2), device=device)
        return torch.cat([empty, *texts]), torch.cat([empty, *images])
