"""Pictures that a trained model makes, of several resolutions and aspect ratios at once, as one sheet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from picture_training.pictures import PATCH, TOKEN_CHANNELS, PictureData, arguments, grid_of_size, to_pixels, words_of
from picture_training.training import TrainingRun

_SHAPES = ((1.0, 1.0), (1.0, 4 / 3), (0.75, 16 / 9), (1.0, 3 / 4), (0.5, 1.0))  # (share of the resolution, aspect)
_GUIDANCE_SCALE = 3.0
_NUM_STEPS = 30


def save_samples(run: TrainingRun, data: PictureData, path: Path, num: int = 10) -> None:
    """Collective: each rank takes some of the requests. Rank 0 writes the sheet. Captions and shapes take turns."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    grids = [grid_of_size(round(share * max(data.resolutions)), aspect) for share, aspect in _SHAPES]
    requests = [_request(run, data, grids[i % len(grids)], i) for i in range(rank, num, num_ranks)]
    even = torch.linspace(1, 0, _NUM_STEPS + 1)
    made = _follow(run.ema, requests, data.time_shift * even / (1 + (data.time_shift - 1) * even))
    mine = [
        ((to_pixels(tokens.cpu(), grids[i % len(grids)]).clamp(-1, 1) + 1) * 127.5).byte()
        for i, tokens in zip(range(rank, num, num_ranks), made, strict=True)
    ]
    everyones: list[list[torch.Tensor]] | None = [[]] * num_ranks if rank == 0 else None
    dist.gather_object(mine, everyones)
    if everyones is not None:
        _sheet([everyones[i % num_ranks][i // num_ranks] for i in range(num)]).save(path)


@dataclass(frozen=True)
class _Request:
    noise: Tensor  # (tokens, TOKEN_CHANNELS)
    grid: tuple[int, int]
    words: Tensor  # (words, WORD_CHANNELS)


def _request(run: TrainingRun, data: PictureData, grid: tuple[int, int], number: int) -> _Request:
    generator = torch.Generator().manual_seed(data.seed * 1_000_003 + number)
    noise = torch.randn(grid[0] * grid[1], TOKEN_CHANNELS, generator=generator)
    words = words_of(data.pictures[number % len(data.pictures)].caption)
    return _Request(noise.to(run.device, run.options.dtype), grid, words.to(run.device, run.options.dtype))


@torch.no_grad()
def _follow(model: nn.Module, requests: Sequence[_Request], times: Tensor) -> list[Tensor]:
    """Euler's steps along the flow, from noise at 1 to pictures at 0; classifier-free guidance. Collective.

    A request is two samples of one packed call, with its words and without: a balancer has them computed wherever
    there is room, and both velocities return to this rank.
    """
    pictures = [request.noise for request in requests]
    for now, after in itertools.pairwise(times):
        calls = [
            arguments(x, now.to(x), request.grid, words)
            for x, request in zip(pictures, requests, strict=True)
            for words in (request.words, request.words[:0])
        ]
        velocities = [velocity[0] for velocity in model(calls)]
        with_words, without = velocities[::2], velocities[1::2]
        pictures = [
            x + (after - now).to(x) * (b + _GUIDANCE_SCALE * (a - b))
            for x, a, b in zip(pictures, with_words, without, strict=True)
        ]
    return pictures


def _sheet(pictures: Sequence[torch.Tensor], columns: int = 5, margin: int = PATCH) -> Image.Image:
    """Places pictures, each (3, height, width) uint8, in rows, each in the middle of a cell."""
    cell = max(max(picture.shape[1:]) for picture in pictures) + margin
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * cell + margin, rows * cell + margin), "white")
    for i, picture in enumerate(pictures):
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        left, top = (i % columns) * cell + margin, (i // columns) * cell + margin
        sheet.paste(image, (left + (cell - margin - image.width) // 2, top + (cell - margin - image.height) // 2))
    return sheet
