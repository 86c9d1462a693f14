"""Pictures that a trained model makes, of several resolutions and aspect ratios at once, as one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from knapformer.models.patches import grid_positions
from knapformer.models.sampling import SampleRequest, sample
from PIL import Image

from picture_training.pictures import (
    PATCH,
    TOKEN_CHANNELS,
    PictureData,
    grid_of_size,
    pooled_words,
    to_pixels,
    words_of,
)
from picture_training.training import TrainingRun

_SHAPES = ((1.0, 1.0), (1.0, 4 / 3), (0.75, 16 / 9), (1.0, 3 / 4), (0.5, 1.0))  # (share of the resolution, aspect)
_GUIDANCE_SCALE = 3.0


def save_samples(run: TrainingRun, data: PictureData, path: Path, num: int = 10) -> None:
    """Collective: the ranks share the requests. Rank 0 writes the sheet, captions in turn, shapes in turn."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    grids = [grid_of_size(round(share * max(data.resolutions)), aspect) for share, aspect in _SHAPES]
    requests = [_request(run, data, grids[i % len(grids)], i) for i in range(rank, num, num_ranks)]
    made = sample(run.ema, requests, run.balancer, num_steps=30)
    mine = [
        ((to_pixels(tokens.cpu(), grids[i % len(grids)]).clamp(-1, 1) + 1) * 127.5).byte()
        for i, tokens in zip(range(rank, num, num_ranks), made, strict=True)
    ]
    everyones: list[list[torch.Tensor]] | None = [[]] * num_ranks if rank == 0 else None
    dist.gather_object(mine, everyones)
    if everyones is not None:
        _sheet([everyones[i % num_ranks][i // num_ranks] for i in range(num)]).save(path)


def _request(run: TrainingRun, data: PictureData, grid: tuple[int, int], number: int) -> SampleRequest:
    generator = torch.Generator().manual_seed(data.seed * 1_000_003 + number)
    caption = data.pictures[number % len(data.pictures)].caption
    words = words_of(caption).to(run.device, run.options.dtype)
    noise = torch.randn(grid[0] * grid[1], TOKEN_CHANNELS, generator=generator)
    return SampleRequest(
        noise=noise.to(run.device, run.options.dtype),
        image_ids=grid_positions((1, *grid)).to(run.device),
        text=words,
        pooled=pooled_words(words),
        guidance_scale=_GUIDANCE_SCALE,
        shift=data.time_shift,
    )


def _sheet(pictures: Sequence[torch.Tensor], columns: int = 5, margin: int = PATCH) -> Image.Image:
    """(3, height, width) uint8 each, in rows, each in the middle of a cell."""
    cell = max(max(picture.shape[1:]) for picture in pictures) + margin
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * cell + margin, rows * cell + margin), "white")
    for i, picture in enumerate(pictures):
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        left, top = (i % columns) * cell + margin, (i // columns) * cell + margin
        sheet.paste(image, (left + (cell - margin - image.width) // 2, top + (cell - margin - image.height) // 2))
    return sheet
