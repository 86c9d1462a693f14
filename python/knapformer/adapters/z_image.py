"""Z-Image: diffusers' ZImageTransformer2DModel, one image a sample. The model pads image and caption to multiples of 32
tokens, with tokens that it learned; so does a packed call. Captions are refined where the sample is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError, StateError
from knapformer.adapters.chunks import Chunks, Home, Moved, Packed, RunBlock, call
from knapformer.adapters.joint import JointAdapter, self_attention
from knapformer.adapters.parts import part_of
from knapformer.adapters.samples import Samples, check_shape
from knapformer.attention.packed_rows import gated_add, modulate, rotation_of


def block(block: Any, x: Tensor, cond: Tensor | None, chunks: Chunks) -> Tensor:
    """As ZImageTransformerBlock.forward, with a time step for each chunk; cond: None where it refines a text."""
    of_token = chunks.of_token
    if cond is None:
        x = x + block.attention_norm2(self_attention(block.attention, chunks, block.attention_norm1(x)))
        return x + block.ffn_norm2(block.feed_forward(block.ffn_norm1(x)))
    scale, gate, scale_ff, gate_ff = block.adaLN_modulation(cond).chunk(4, 1)
    attended = self_attention(block.attention, chunks, modulate(block.attention_norm1(x), None, scale, of_token))
    x = gated_add(x, block.attention_norm2(attended), gate.tanh(), of_token)
    hidden = block.feed_forward(modulate(block.ffn_norm1(x), None, scale_ff, of_token))
    return gated_add(x, block.ffn_norm2(hidden), gate_ff.tanh(), of_token)


def final_layer(layer: Any, x: Tensor, cond: Tensor, packed: Packed) -> Tensor:
    scale = layer.adaLN_modulation(cond)
    return layer.linear(modulate(layer.norm_final(x), None, scale, packed.of_token))


class ZImage(JointAdapter):
    required = ("x", "t", "cap_feats")
    input_layer = "cap_embedder.1"
    blocks = ("noise_refiner", "layers")
    refiners = ("context_refiner",)
    packed = {"ZImageTransformerBlock": block, "FinalLayer": final_layer}
    in_parts = ("attention",)
    processors = ("ZSingleStreamAttnProcessor",)
    refused = ("siglip_feat_dim",)
    small = {
        "in_channels": 3, "dim": 48, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 3, "n_kv_heads": 3,
        "cap_feat_dim": 10, "axes_dims": [4, 6, 6], "axes_lens": [128, 32, 32],
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {
        "x": lambda config, size, draw: [draw.normal(3, size.grid[0], 2 * size.grid[1], 2 * size.grid[2])],
        "t": lambda config, size, draw: draw.time(),
        "cap_feats": lambda config, size, draw: [draw.normal(5 * size.text_tokens, 10)],
    }

    @staticmethod
    def expected(model: Any, sample: Any) -> Tensor:
        return model(**sample).sample[0]

    def check(self, model: Any) -> None:
        if len(model.all_patch_size) > 1:
            raise StateError(f"transformer: got a model with patch sizes {model.all_patch_size}, expected one size")

    def embed(self, model: Any, samples: Samples) -> Home:
        patch, (embedder,) = self._patch(model), model.all_x_embedder.values()
        images, texts, sizes = [], [], []
        for i in range(len(samples)):
            sides = ("frames", "height", "width")
            image = _checked(samples, i, "x", (model.in_channels, *sides), (1, patch[1], patch[0], patch[0]))
            text = _checked(samples, i, "cap_feats", ("tokens", model.config.cap_feat_dim))
            xs, caps, of_size, *of = model.patchify_and_embed([image], [text], *patch)
            sizes += of_size
            # Tokens, their places, and which of them are padding.
            images.append((xs[0], of[0][0], of[2][0]))
            texts.append((caps[0], of[1][0][: len(caps[0])], of[3][0]))
        image, of_image, image_lens = _embedded(model, images, embedder, embedder.in_features, model.x_pad_token)
        width = model.config.cap_feat_dim
        text, of_text, text_lens = _embedded(model, texts, model.cap_embedder, width, model.cap_pad_token)
        cond = model.t_embedder(samples.one_each("t") * model.t_scale).to(image.dtype)
        alone = Chunks.alone(text_lens, text, rotation_of(of_text, text.dtype))
        text = alone.through(model.context_refiner, call, text, None)
        home = self.home(text, text_lens, image, image_lens, (of_text, of_image), cond, grids=sizes)
        home.sequence_features.append(torch.tensor([text_lens, image_lens], dtype=torch.int64).t())
        return home

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, (cond, lens) = self.chunks(moved), moved.of_chunk
        x = part_of(chunks, 1, lens).through(model.noise_refiner, run, moved.x, cond)
        return chunks.through(model.layers, run, x, cond)

    def last(self, model: Any, image: Tensor, cond: Tensor, packed: Packed) -> Tensor:
        (layer,) = model.all_final_layer.values()
        return layer(image, cond, packed)

    def predictions(self, model: Any, out: Tensor, lens: Sequence[int], home: Home) -> list[Tensor]:
        """As the model gives them: (channels, frames, height, width)."""
        return model.unpatchify(list(out.split(list(lens))), home.grids, *self._patch(model))

    @staticmethod
    def _patch(model: Any) -> tuple[int, int]:
        """Its side, and its frames."""
        return model.all_patch_size[0], model.all_f_patch_size[0]


def _checked(samples: Samples, i: int, name: str, *shape: tuple[Any, ...]) -> Tensor:
    """The tensor that this argument, a list, holds."""
    values = samples.values(name)[i]
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], Tensor):
        raise ArgumentError(f"samples[{i}][{name!r}]: got {type(values).__name__}, expected a list of one tensor")
    check_shape(f"samples[{i}][{name!r}]", values[0], *shape)
    return values[0]


def _embedded(
    model: Any, parts: Sequence[tuple[Tensor, ...]], embedder: Any, width: int, pad: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens with padding, the rows of their rotation, and how many each sample has."""
    none = (pad.new_zeros(0, width), torch.zeros(0, len(model.axes_dims), dtype=torch.int32), torch.zeros(0).bool())
    tokens, ids, is_pad = (torch.cat(of) for of in zip(*(parts or [none]), strict=True))
    x = torch.where(is_pad.to(pad.device).unsqueeze(1), pad, embedder(tokens))
    rotation = torch.view_as_real(model.rope_embedder(ids.to(pad.device)))
    return x, rotation, [len(part[0]) for part in parts]
