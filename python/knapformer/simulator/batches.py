"""Random batches in the shape that a data mix draws: what the models eat, and the target of their loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from knapformer import Sample
from knapformer.models.config import FluxConfig, ModelConfig
from knapformer.models.flux import FluxBatch
from knapformer.models.packing import positions, segment_index
from knapformer.models.transformer import TransformerBatch

Batch = FluxBatch | TransformerBatch


def grid_ids(num_tokens: Sequence[int]) -> Tensor:
    """(tokens, 3) int64: each image's tokens laid out row by row in a grid as near to a square as its number allows."""
    widths = torch.tensor([max(1, math.isqrt(n)) for n in num_tokens], dtype=torch.int64)
    width = widths[segment_index(num_tokens)]
    place = positions(num_tokens)
    return torch.stack([torch.zeros_like(place), place // width, place % width], 1)


def random_batch(
    samples: Sequence[Sample], config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> tuple[Batch, Tensor]:
    """This rank's samples of a step and their target, (tokens that the model returns, out_channels).

    The same arguments give the same numbers. Drawn on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float32).to(device, dtype)

    text_lens = [sample.text_tokens for sample in samples]
    image_lens = [sample.visual_tokens for sample in samples]
    if not isinstance(config, FluxConfig):
        seq_lens = [sample.num_tokens for sample in samples]
        batch: Batch = TransformerBatch(normal(sum(seq_lens), config.in_channels), seq_lens)
        return batch, normal(sum(seq_lens), config.out_channels)
    # Times stay in float32: 1000 t in bfloat16 has steps of 4.
    times = torch.rand(2, len(samples), generator=generator, dtype=torch.float32).to(device)
    batch = FluxBatch(
        image=normal(sum(image_lens), config.in_channels),
        image_ids=grid_ids(image_lens).to(device, torch.int32),
        image_lens=image_lens,
        text=normal(sum(text_lens), config.text_channels),
        text_lens=text_lens,
        pooled=normal(len(samples), config.pooled_channels),
        timestep=times[0],
        guidance=times[1] if config.guidance else None,
    )
    return batch, normal(sum(image_lens), config.out_channels)
