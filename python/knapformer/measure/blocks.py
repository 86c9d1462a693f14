"""One block of each kind of a model, run alone: over whole sequences, or its per-token layers without attention.

Blocks of one kind are alike, so one stands for all of them, and a model that would fill many devices fits one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knapformer.measure.timing import Work
from knapformer.models.config import FluxConfig, ModelConfig
from knapformer.models.flux import FluxTransformer
from knapformer.models.layers import rotations
from knapformer.models.packing import positions
from knapformer.models.parallel import Model, build_model, init_weights, set_checkpointing
from knapformer.models.step import PackedStep


@dataclass(frozen=True)
class BlockKind:
    name: str
    count: int  # how many of them the model has
    model: Model  # with one block, of this kind

    def work(self, step: PackedStep, text_lens: Sequence[int]) -> Work:
        """A forward (and recompute) and backward pass of the block over the chunks of `step`, ready to run.

        text_lens: how many tokens, the first ones, of each chunk are text, for blocks that tell them apart.
        """
        config, weight = self.model.config, next(self.model.parameters())
        device, dtype = weight.device, weight.dtype
        lens = step.chunk_lens

        def rows(count: int) -> Tensor:
            return torch.randn(count, config.d_model, device=device, dtype=dtype, requires_grad=True)

        place = positions(lens, device).unsqueeze(1)
        x = rows(sum(lens))
        (block,) = (block for blocks in self.model.block_lists() for block in blocks)
        rest: tuple[Any, ...]
        if isinstance(self.model, FluxTransformer):
            is_text = place.squeeze(1) < torch.as_tensor(text_lens).repeat_interleave(torch.as_tensor(lens)).to(device)
            layout = self.model._layout(step, place.expand(-1, len(self.model.config.rope_axes)), is_text, x)
            streams = layout.streams
            double = self.model.config.num_double_blocks > 0
            inputs = (rows(streams.text_rows.numel()), rows(streams.image_rows.numel())) if double else (x,)
            rest = (rows(len(lens)), layout)
        else:
            rotation = rotations(place, (self.model.config.head_dim,), self.model.config.rope_theta, dtype)
            inputs, rest = (x,), (step, rotation)
        gradients = [torch.ones_like(rows) for rows in inputs]
        self.model.zero_grad(set_to_none=True)

        def run() -> None:
            outputs = block(*inputs, *rest)
            torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), gradients)

        return run


def kinds_of(config: ModelConfig) -> list[tuple[str, int, ModelConfig]]:
    """Name and number of a model's blocks of each kind, and the configuration with one of them alone."""
    kinds: list[tuple[str, int, ModelConfig]]
    if isinstance(config, FluxConfig):
        kinds = [
            ("double", config.num_double_blocks, dataclasses.replace(config, num_double_blocks=1, num_single_blocks=0)),
            ("single", config.num_single_blocks, dataclasses.replace(config, num_double_blocks=0, num_single_blocks=1)),
        ]
    else:
        kinds = [("block", config.num_blocks, dataclasses.replace(config, num_blocks=1))]
    return [kind for kind in kinds if kind[1] > 0]


def build_kinds(config: ModelConfig, dtype: torch.dtype, device: torch.device, checkpointing: bool) -> list[BlockKind]:
    kinds = []
    for name, count, alone in kinds_of(config):
        model = build_model(alone, dtype, device)
        init_weights(model)
        set_checkpointing(model, checkpointing)
        kinds.append(BlockKind(name, count, model))
    return kinds
