"""HunyuanVideo 1.5: diffusers' HunyuanVideo15Transformer3DModel. Masked text is left out, and so is a picture of zeros,
by which the model knows text-to-video. Texts are refined where the sample is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.adapter import Chunks, Home, random_mask, rotation_rows, unpatched
from knapformer.adapters.joint import JointAdapter, adaptive_double_block, self_attention
from knapformer.adapters.samples import Samples, on_host, one_after_another
from knapformer.device_copies import to_device
from knapformer.models.packing import gated_add


def refiner_block(block: Any, text: Tensor, cond: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideo15IndividualTokenRefinerBlock.forward."""
    gate, gate_ff = block.norm_out.linear(block.norm_out.nonlinearity(cond)).chunk(2, 1)
    text = gated_add(text, self_attention(block.attn, chunks, block.norm1(text)), gate, chunks.of_token)
    return gated_add(text, block.ff(block.norm2(text)), gate_ff, chunks.of_token)


def token_refiner(refiner: Any, text: Tensor, times: Tensor, chunks: Chunks) -> Tensor:
    """As HunyuanVideo15TokenRefiner.forward."""
    counts = to_device(torch.tensor(chunks.step.chunk_lens, dtype=torch.int64), text.device).unsqueeze(1)
    cond = refiner.time_text_embed(times, (chunks.of_token.sum(text.float()) / counts).to(text.dtype))
    text = refiner.proj_in(text)
    for each in refiner.token_refiner.refiner_blocks:
        text = each(text, cond, chunks)
    return text


class HunyuanVideo15(JointAdapter):
    sequence = "video patches, and tokens of texts and picture that no mask hides"
    required = (
        "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2",
        "encoder_attention_mask_2", "image_embeds",
    )  # fmt: skip
    optional = ("timestep_r",)
    input_layer = "x_embedder.proj"
    blocks = {"transformer_blocks": adaptive_double_block}
    refiners = {"context_embedder.token_refiner.refiner_blocks": refiner_block}
    modules = JointAdapter.modules | {"context_embedder": token_refiner}
    forwards = (
        "HunyuanVideo15TransformerBlock", "HunyuanVideo15IndividualTokenRefinerBlock", "HunyuanVideo15TokenRefiner",
        *JointAdapter.forwards,
    )  # fmt: skip
    in_parts = ("norm1", "norm1_context", "norm_out")
    processors = ("HunyuanVideo15AttnProcessor2_0", "AttnProcessor2_0")
    small = {
        "in_channels": 3, "out_channels": 2, "num_attention_heads": 3, "attention_head_dim": 14, "num_layers": 2,
        "num_refiner_layers": 2, "mlp_ratio": 2.0, "patch_size": 2, "text_embed_dim": 10, "text_embed_2_dim": 9,
        "image_embed_dim": 11, "rope_axes_dim": (2, 4, 8),
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {
        "hidden_states": lambda config, size, draw: draw.normal(
            1, 3, size.grid[0] * config.patch_size_t, *(config.patch_size * n for n in size.grid[1:])
        ),
        "timestep": lambda config, size, draw: 1000 * draw.time(),
        "timestep_r": lambda config, size, draw: 1000 * draw.time() if config.use_meanflow else None,
        "encoder_hidden_states": lambda config, size, draw: draw.normal(1, size.text_tokens, 10),
        "encoder_attention_mask": lambda config, size, draw: _random_mask(size),
        "encoder_hidden_states_2": lambda config, size, draw: draw.normal(1, size.text_tokens, 9),
        # The second text may be nothing but padding; and half of the samples have a picture.
        "encoder_attention_mask_2": lambda config, size, draw: _random_mask(size) * (size.grid[2] > 2),
        "image_embeds": lambda config, size, draw: draw.normal(1, 5, 11) * (size.grid[2] == 3),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config, patch = model.config, self._patch(model.config)
        videos, grids = samples.grids("hidden_states", config.in_channels, patch)
        x = torch.cat([model.x_embedder(video).flatten(0, 1) for video in videos])
        rotations = [rotation_rows(*model.rope(video)) for video, _ in zip(videos, grids, strict=False)]
        times = samples.one_each("timestep")
        cond = model.time_embed(
            times, samples.one_each("timestep_r") if samples.expect("timestep_r", config.use_meanflow) else None
        )

        text, lens = samples.rows("encoder_hidden_states", config.text_embed_dim)
        text_lens, text = samples.unmasked("encoder_attention_mask", lens, text)
        text = model.context_embedder(text, times, Chunks.alone(text_lens, text))
        second, lens = samples.rows("encoder_hidden_states_2", config.text_embed_2_dim)
        second_lens, second = samples.unmasked("encoder_attention_mask_2", lens, second)
        image, image_lens = samples.rows("image_embeds", config.image_embed_dim)
        parts = image.split(image_lens)
        given = [bool(flag) for flag in on_host([part.any().reshape(1) for part in parts])]
        image = torch.cat([image[:0], *(part for part, flag in zip(parts, given, strict=True) if flag)])
        image_lens = [length * flag for length, flag in zip(image_lens, given, strict=True)]
        of_kind = model.cond_type_embed(torch.arange(3, device=x.device))
        context, context_lens = one_after_another(
            (text + of_kind[0], text_lens),
            (model.context_embedder_2(second) + of_kind[1], second_lens),
            (model.image_embedder(image) + of_kind[2], image_lens),
        )
        none = x.new_zeros((0, config.attention_head_dim // 2, 2), dtype=torch.float32)
        unturned = torch.tensor([1.0, 0.0], device=x.device).expand(len(context), *none.shape[1:])
        rotation = (unturned, torch.cat([none, *rotations]))
        home = self.home(context, context_lens, x, list(map(math.prod, grids)), rotation, cond)
        home.grids = grids
        return home

    def predictions(self, model: Any, out: Tensor, lens: Sequence[int], home: Home) -> list[Tensor]:
        patch = self._patch(model.config)
        out = out.unflatten(1, (-1, *patch)).movedim(1, -1).flatten(1)
        return [unpatched(part.unsqueeze(0), of, patch) for part, of in zip(out.split(lens), home.grids, strict=True)]

    @staticmethod
    def _patch(config: Any) -> tuple[int, ...]:
        return config.patch_size_t, config.patch_size, config.patch_size


def _random_mask(size: Any) -> Tensor:
    mask = random_mask(size)
    return torch.ones(1, size.text_tokens) if mask is None else mask
