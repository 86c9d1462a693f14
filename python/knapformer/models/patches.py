"""Videos as packed rows of patches, and back. A picture is a video of one frame.

The order of the numbers within a row is that of the published video models: (channel, frame, row, column) in an input
row, as the kernel of a convolution over patches holds them, and (frame, row, column, channel) in an output row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from knapformer.models.packing import positions, segment_index

Grid = tuple[int, int, int]  # (frames, rows, columns), in patches


def grid_of(video: Tensor, patch_size: Sequence[int]) -> Grid:
    """(channels, frames, height, width) -> its patches along each axis. What does not fill a patch is an error."""
    sizes = video.shape[1:]
    if len(sizes) != 3 or any(size % patch for size, patch in zip(sizes, patch_size, strict=True)):
        expected = f"(channels, frames, height, width) in multiples of {tuple(patch_size)}"
        raise ValueError(f"video: got shape {tuple(video.shape)}, expected {expected}")
    frames, rows, columns = (size // patch for size, patch in zip(sizes, patch_size, strict=True))
    return frames, rows, columns


def patchify(video: Tensor, patch_size: Sequence[int]) -> Tensor:
    """(channels, frames, height, width) -> (patches, channels * numbers of a patch), columns fastest."""
    (frames, rows, columns), (a, b, c) = grid_of(video, patch_size), patch_size
    cut = video.reshape(video.shape[0], frames, a, rows, b, columns, c)
    return cut.permute(1, 3, 5, 0, 2, 4, 6).reshape(frames * rows * columns, -1)


def unpatchify(patches: Tensor, grid: Grid, patch_size: Sequence[int]) -> Tensor:
    """The output of one sample: (patches, numbers of a patch * channels) -> (channels, frames, height, width).

    Not the inverse of patchify: within an output row the channels are fastest, within an input row slowest.
    """
    (frames, rows, columns), (a, b, c) = grid, patch_size
    cut = patches.reshape(frames, rows, columns, a, b, c, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return cut.reshape(-1, frames * a, rows * b, columns * c)


def grid_positions(grid: Grid, device: torch.device | None = None) -> Tensor:
    """(patches, 3) int64: frame, row and column of each patch."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid)).reshape(-1, 3)


def square_positions(num_tokens: Sequence[int]) -> Tensor:
    """(tokens, 3) int64: of pictures of which only the number of patches is known, each as near to a square as that
    number allows."""
    widths = torch.tensor([max(1, math.isqrt(n)) for n in num_tokens], dtype=torch.int64)
    width = widths[segment_index(num_tokens)]
    place = positions(num_tokens)
    return torch.stack([torch.zeros_like(place), place // width, place % width], 1)
