"""Sizes of samples, without the samples: from the folders in which musubi-tuner and diffusion-pipe cache latents."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from knapformer import ArgumentError

# Pixels of a latent's side, by the beginning of a model's name in musubi-tuner (dataset/architectures.py); else 8.
_STRIDES = {"flux_2": 16, "hunyuan_video_1_5": 16, "hidream_o1": 32}


def cached_samples(folder: Path) -> Iterator[dict[str, Any] | ValueError]:
    """An object for each sample, or what is wrong with it. Raises ArgumentError."""
    if files := sorted(path for path in folder.glob("*.safetensors") if not path.stem.endswith("_te")):  # of text
        return map(_latents, files)
    if files := sorted(folder.rglob("cache_*/latents/metadata.db")):
        return itertools.chain.from_iterable(map(_bucket, files))
    raise ArgumentError(
        f"LENGTHS: {folder}: got a folder without rank-*-of-*.jsonl (knapformer.record), "
        "aspect_ratio_bucket_metadata*.json (SimpleTuner), *.safetensors (musubi-tuner) and "
        "cache_*/latents/metadata.db (diffusion-pipe), expected one of these"
    )


def _latents(file: Path) -> dict[str, Any] | ValueError:
    """Of musubi-tuner, from the name of the latents in the header, latents_[FRAMESx]HEIGHTxWIDTH_DTYPE
    (dataset/cache_io.py): the file's own name has the size before it was cropped to a bucket."""
    try:
        with file.open("rb") as content:
            header = json.loads(content.read(min(int.from_bytes(content.read(8), "little"), 1 << 20)))
        found = next(filter(None, (re.fullmatch(r"latents_(?:(\d+)x)?(\d+)x(\d+)_[a-z0-9]+", name) for name in header)))
        model = header["__metadata__"]["architecture"]
    except (ValueError, KeyError, TypeError, StopIteration):
        return ValueError(f"{file.name}: got no header of musubi-tuner's latents")
    stride = next((of for name, of in _STRIDES.items() if model.startswith(name)), 8)
    frames, height, width = (int(size or 1) for size in found.groups())
    return {"target_size": [width * stride, height * stride], "frames": 4 * (frames - 1) + 1}


def _bucket(file: Path) -> Iterator[dict[str, Any]]:
    """Of diffusion-pipe: the folder has the name of its bucket, cache_[RATIOx]WIDTHxHEIGHTxFRAMES (utils/dataset.py);
    the database in it has a row of `items` for each sample (utils/cache.py)."""
    name = file.parent.parent.name
    bucket = re.fullmatch(r"cache_(?:\d+\.\d+x)?(\d+)x(\d+)x(\d+)", name)
    if bucket is None:
        raise ArgumentError(f"LENGTHS: {file}: got a folder {name}, expected cache_WIDTHxHEIGHTxFRAMES")
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            (count,) = database.execute("SELECT COUNT(*) FROM items").fetchone()
    except sqlite3.Error as error:
        raise ArgumentError(f"LENGTHS: {file}: {error}, expected diffusion-pipe's database") from None
    width, height, frames = map(int, bucket.groups())
    return itertools.repeat({"target_size": [width, height], "frames": frames}, count)
