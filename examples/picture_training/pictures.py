"""Pictures with captions, as training samples of mixed resolutions and aspect ratios.

A sample is a function of (seed, sample number) alone: its picture, crop, size, noise and time. It does not depend on
the rank that draws it, on the number of ranks, or on the rank on which the balancer has it computed. So a run resumes
from a step number, and two runs of one seed see the same data.
"""

from __future__ import annotations

import importlib.util
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

PATCH = 4  # pixels along a side; a token is PATCH x PATCH pixels of 3 colours
TOKEN_CHANNELS = 3 * PATCH * PATCH
WORD_CHANNELS = 256  # a word's hash is its channel, so that no vocabulary is kept beside the weights
ASPECTS = (1.0, 4 / 3, 3 / 4, 16 / 9, 9 / 16)  # width over height
CAPTION_DROPOUT = 0.1  # share of samples without caption, for classifier-free guidance

# Pictures that scikit-image and scikit-learn carry inside their wheels, so that nothing is downloaded.
_INSIDE_PACKAGES = {
    "skimage/data": {
        "astronaut.png": "portrait of an astronaut",
        "brick.png": "wall of grey brick",
        "chelsea.png": "face of a cat",
        "coffee.png": "cup of coffee",
        "grass.png": "grey grass",
        "hubble_deep_field.jpg": "galaxies in space",
        "ihc.png": "cells under a microscope",
        "motorcycle_left.png": "motorcycle in a garage",
        "retina.jpg": "retina of an eye",
        "rocket.jpg": "rocket at night",
    },
    "sklearn/datasets/images": {"china.jpg": "temple in china", "flower.jpg": "red flower"},
}


@dataclass(frozen=True)
class Picture:
    image: Image.Image  # RGB
    caption: str


def load_pictures(folder: str | None) -> list[Picture]:
    """The pictures of a folder and its subfolders; where it is None, those inside packages.

    The caption of `cat.jpg` is the text of `cat.txt` beside it, or else the words of its name.
    """
    if folder is None:
        found = [
            (_package_folder(where) / name, caption)
            for where, names in _INSIDE_PACKAGES.items()
            for name, caption in names.items()
        ]
    else:
        readable = Image.registered_extensions()
        paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in readable)
        found = [(path, _caption_of(path)) for path in paths]
        if not found:
            raise SystemExit(f"--data: got {folder!r}, expected a folder with pictures")
    return [Picture(Image.open(path).convert("RGB"), caption) for path, caption in found]


def _package_folder(where: str) -> Path:
    package, _, rest = where.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"--data: left out, which takes scikit-image and scikit-learn; {package} is not installed")
    return Path(spec.origin).parent / rest


def _caption_of(path: Path) -> str:
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8") if text.exists() else path.stem


def words_of(caption: str) -> Tensor:
    """(words, WORD_CHANNELS), one-hot."""
    codes = [zlib.crc32(word.encode()) % WORD_CHANNELS for word in re.findall(r"[^\W\d_]+", caption.lower())]
    return torch.nn.functional.one_hot(torch.tensor(codes, dtype=torch.int64), WORD_CHANNELS).float()


def grid_of_size(resolution: int, aspect: float) -> tuple[int, int]:
    """Rows and columns of tokens whose area is about that of a square of `resolution` pixels."""
    side = resolution / PATCH
    return max(1, round(side / math.sqrt(aspect))), max(1, round(side * math.sqrt(aspect)))


def to_tokens(pixels: Tensor) -> Tensor:
    """(3, height, width) -> (tokens, TOKEN_CHANNELS), row by row."""
    rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
    cut = pixels.reshape(3, rows, PATCH, columns, PATCH)
    return cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, TOKEN_CHANNELS)


def to_pixels(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of to_tokens."""
    cut = tokens.reshape(*grid, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return cut.reshape(3, grid[0] * PATCH, grid[1] * PATCH)


@dataclass(frozen=True)
class TrainingSample:
    tokens: Tensor  # (tokens, TOKEN_CHANNELS), colours in [-1, 1]
    noise: Tensor  # of the same shape
    time: Tensor  # (), in (0, 1): 0 is the picture, 1 the noise
    grid: tuple[int, int]
    words: Tensor  # (words, WORD_CHANNELS)


@dataclass(frozen=True)
class PictureData:
    """What samples are drawn from. resolutions: one that is named twice is drawn twice as often. time_shift: above 1 it
    draws more times near the noise; in pixels much noise is needed to hide what a picture shows."""

    pictures: Sequence[Picture]
    resolutions: Sequence[int]
    seed: int = 0
    time_shift: float = 1.0


@dataclass(frozen=True)
class _Shape:
    """The part of a sample that is drawn first: its length follows from it."""

    picture: Picture
    rows: int
    columns: int
    zoom: float
    across: float
    down: float
    caption: str


def _draw_shape(data: PictureData, generator: torch.Generator) -> _Shape:
    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    picture = data.pictures[draw(len(data.pictures))]
    rows, columns = grid_of_size(data.resolutions[draw(len(data.resolutions))], ASPECTS[draw(len(ASPECTS))])
    crop = torch.rand(3, generator=generator).tolist()
    kept = float(torch.rand((), generator=generator)) >= CAPTION_DROPOUT
    return _Shape(picture, rows, columns, *crop, picture.caption if kept else "")


def _generator(data: PictureData, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(data.seed * 1_000_003 + number)


def length_of_sample(data: PictureData, number: int) -> int:
    """The tokens (words and patches) that draw_sample's sample has; no picture is read."""
    shape = _draw_shape(data, _generator(data, number))
    return shape.rows * shape.columns + len(words_of(shape.caption))


def draw_sample(data: PictureData, number: int) -> TrainingSample:
    generator = _generator(data, number)
    shape = _draw_shape(data, generator)
    picture, rows, columns = shape.picture, shape.rows, shape.columns
    # A crop of this shape at a random place: as large as the picture allows, or down to two thirds of that a side.
    width, height = picture.image.size
    scale = min(width / columns, height / rows) * (1 - shape.zoom / 3)
    left, top = shape.across * (width - scale * columns), shape.down * (height - scale * rows)
    box = (left, top, left + scale * columns, top + scale * rows)
    small = picture.image.resize((columns * PATCH, rows * PATCH), Image.Resampling.BICUBIC, box)
    tokens = to_tokens(torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 127.5 - 1)
    noise = torch.randn(tokens.shape, generator=generator)
    time = torch.sigmoid(torch.randn((), generator=generator))
    return TrainingSample(
        tokens=tokens,
        noise=noise,
        time=data.time_shift * time / (1 + (data.time_shift - 1) * time),
        grid=(rows, columns),
        words=words_of(shape.caption),
    )


def arguments(tokens: Tensor, time: Tensor, grid: tuple[int, int], words: Tensor) -> dict[str, Tensor]:
    """Those of FluxTransformer2DModel.forward for one sample, on one device. tokens: mixed with the noise of `time`."""
    rows, columns = (torch.arange(size, device=tokens.device, dtype=torch.float32) for size in grid)
    return {
        "hidden_states": tokens.unsqueeze(0),
        "encoder_hidden_states": words.unsqueeze(0),
        "pooled_projections": words.sum(0, keepdim=True),  # the sum of all words; zeros if there are none
        "timestep": time.reshape(1),
        "img_ids": torch.cartesian_prod(rows.new_zeros(1), rows, columns),  # frame, row, column
        "txt_ids": rows.new_zeros(len(words), 3),
    }


@dataclass(frozen=True)
class PictureBatch:
    """The samples of one rank in one micro-batch, and the model's targets. May hold no sample."""

    samples: list[dict[str, Tensor]]  # the arguments of each
    lens: list[int]  # image tokens of each
    target: Tensor  # (image tokens of all, TOKEN_CHANNELS): the velocity from the picture to the noise

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sample, words and patches: what the balancer plans."""
        return [n + sample["encoder_hidden_states"].shape[1] for n, sample in zip(self.lens, self.samples, strict=True)]


def pack(samples: Sequence[TrainingSample], dtype: torch.dtype = torch.float32) -> PictureBatch:
    inputs = [
        arguments(
            torch.lerp(s.tokens, s.noise, s.time).to(dtype), s.time.to(dtype), s.grid, s.words.to(dtype)
        )
        for s in samples
    ]  # fmt: skip
    target = torch.cat([torch.empty(0, TOKEN_CHANNELS), *(s.noise - s.tokens for s in samples)])
    return PictureBatch(inputs, [len(s.tokens) for s in samples], target.to(dtype))


class PictureSamples(Dataset[TrainingSample]):
    """Samples by number, for any batch sampler, with lengths that are known before one is drawn."""

    def __init__(self, data: PictureData, num_samples: int) -> None:
        self._data, self._num_samples = data, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> TrainingSample:
        return draw_sample(self._data, number)

    def lengths(self) -> list[int]:
        """The length of each sample, in tokens."""
        return [length_of_sample(self._data, number) for number in range(self._num_samples)]
