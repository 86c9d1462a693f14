"""FLUX.3: diffusers' Flux3Transformer2DModel. First image, references and text attend each to itself, in blocks of its
own (those of the text where the sample is), then all to each other."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.adapters.chunks import Chunks, Home, Moved, RunBlock, call
from knapformer.adapters.joint import JointAdapter, final_norm, rotations_of_ids
from knapformer.adapters.parts import part_of
from knapformer.adapters.samples import Samples, one_after_another
from knapformer.attention.packed_rows import TwoStreams, gated_add, modulate, rotation_of, rows_of_runs

_TEXT, _IMAGE, _REFERENCE = range(3)  # kinds of tokens, in the order in which they lie in a sequence
_NAMES = ("txt", "image", "image_cond")


def block(block: Any, x: Tensor, rows: Tensor, chunks: Chunks) -> Tensor:
    """As Flux3ModeTransformerBlock.forward and Flux3SingleTransformerBlock.forward; rows (runs, 3 width)."""
    attn, of_token = block.attn, chunks.of_token
    shift, scale, gate = rows.chunk(3, -1)
    normed = modulate(block.norm(x), shift, scale, of_token)
    q, k, v = (to(normed).unflatten(-1, (-1, attn.head_dim)) for to in (attn.to_q, attn.to_k, attn.to_v))
    q, k = (t.to(v.dtype) for t in chunks.rotated(attn.norm_q(q.float()), attn.norm_k(k.float())))
    attended = attn.to_out[1](attn.to_out[0](chunks.attention(attn, q, k, v)))
    return gated_add(x, attended + block.ff(normed), gate, of_token)


class Flux3(JointAdapter):
    optional = ("image_cond_hidden_states", "image_cond_ids", "target_timestep")
    input_layer = "context_embedder"
    blocks = ("mode_blocks.image", "mode_blocks.image_cond", "single_transformer_blocks")
    refiners = ("txt_mode_blocks",)
    packed = {
        "Flux3ModeTransformerBlock": block, "Flux3SingleTransformerBlock": block, "Flux3AdaLayerNorm": final_norm,
    }  # fmt: skip
    processors = ("Flux3AttnProcessor",)
    small = {
        "in_channels": 6, "cond_in_channels": 5, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 12,
        "num_attention_heads": 3, "joint_attention_dim": 10, "timestep_channels": 16, "axes_dims_rope": (2, 4, 4, 2),
    }  # fmt: skip
    min_text_tokens = 1
    conditions = {  # (every other sample has references)
        "image_cond_hidden_states": lambda config, size, draw: draw.normal(1, 9, 5) if size.grid[2] == 3 else None,
        "image_cond_ids": lambda config, size, draw: 2 * torch.ones(9, 4).cumsum(0) if size.grid[2] == 3 else None,
        "target_timestep": lambda config, size, draw: draw.time() if config.flow_map else None,
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        image, image_lens = samples.rows("hidden_states", config.in_channels)
        reference, reference_lens = samples.rows("image_cond_hidden_states", config.cond_in_channels)
        text, text_lens = samples.rows("encoder_hidden_states", config.joint_attention_dim)
        of_text, of_image, of_reference = rotations_of_ids(
            model, samples, txt_ids=text_lens, img_ids=image_lens, image_cond_ids=reference_lens
        )
        cond = self._conditions(model, samples, image.dtype)

        text = model.context_embedder(text)
        alone = Chunks.alone(text_lens, text, rotation_of(of_text, text.dtype))
        rows = model.early_stream_modulations["txt"](F.silu(cond[:, 1]))
        text = alone.through(model.txt_mode_blocks, call, text, rows)

        pairs = list(zip(image_lens, reference_lens, strict=True))
        kinds = torch.tensor([_IMAGE, _REFERENCE]).repeat(len(pairs))
        kinds = kinds.repeat_interleave(torch.tensor([*itertools.chain(*pairs)], dtype=torch.int64))
        embedded = model.x_embedders["image"](image), model.x_embedders["image_cond"](reference)
        content, lens = one_after_another((embedded[0], image_lens), (embedded[1], reference_lens))
        of_content, _ = one_after_another((of_image, image_lens), (of_reference, reference_lens))
        home = self.home(text, text_lens, content, lens, (of_text, of_content), cond, kinds)
        home.sequence_features.append(torch.tensor([text_lens, image_lens, reference_lens], dtype=torch.int64).t())
        home.rest = (TwoStreams.of_flags(home.features[0] != _IMAGE, text.device), image_lens, cond[:, 0])
        return home

    @staticmethod
    def _conditions(model: Any, samples: Samples, dtype: torch.dtype) -> Tensor:
        """(samples, 2, width): of the image, and of what is known."""

        def embedded(embedder: Any, time: Tensor) -> Tensor:
            return embedder(model.time_proj(time.to(dtype) * 1000).to(dtype))

        time = samples.one_each("timestep")
        cond = torch.stack([embedded(model.timestep_embedder, t) for t in (time, torch.zeros_like(time))], 1)
        if samples.expect("target_timestep", model.config.flow_map):
            cond = cond + embedded(model.target_timestep_embedder, samples.one_each("target_timestep")).unsqueeze(1)
        return cond

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        chunks, x, (cond, lens) = self.chunks(moved), moved.x, moved.of_chunk
        of_image, of_known = F.silu(cond).unbind(1)
        for kind, active in ((_IMAGE, of_image), (_REFERENCE, of_known)):
            rows = model.early_stream_modulations[_NAMES[kind]](active)
            x = part_of(chunks, kind, lens).through(model.mode_blocks[_NAMES[kind]], run, x, rows)

        of_kinds = zip(_NAMES, (of_known, of_image, of_known), strict=True)
        table = torch.stack([model.single_stream_modulations[name](active) for name, active in of_kinds], 1)
        rows, of_token = rows_of_runs(table, chunks.step.chunk_lens, chunks.kinds)
        chunks = dataclasses.replace(chunks, of_token=of_token)
        return chunks.through(model.single_transformer_blocks, run, x, rows)
