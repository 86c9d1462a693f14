"""The configuration of a model of diffusers that has an adapter: the arguments of its class, in diffusers' words."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError, Sample
from knapformer.adapters.adapter import MAX_TEXT_TOKENS, Adapter, grid_of
from knapformer.adapters.model import DiffusersModel, SampleBatch
from knapformer.adapters.registry import adapter_named
from knapformer.models.config import BaseConfig, checked_field, expect
from knapformer.models.model import Draw


class DiffusersConfig(BaseConfig):
    """The configuration of a class of diffusers, given by name. Every field is an attribute, too: config.num_layers.

    fields: those that differ from the defaults of the class. Raises ArgumentError where diffusers is missing, the class
    has no adapter, or a field is wrong.
    """

    def __init__(self, class_name: str, **fields: Any) -> None:
        defaults = _defaults_of(class_name)
        for name in fields:
            if name not in defaults:
                raise ArgumentError(f"got unknown field {name!r}, expected some of {', '.join(sorted(defaults))}")
        self.class_name = class_name
        self.adapter: type[Adapter] = adapter_named(class_name)
        counts = self.adapter.block_counts.values()
        self.fields = {
            name: checked_field(name, fields.get(name, default), default, low=0 if name in counts else 1)
            for name, default in defaults.items()
        }
        expect(self.depth > 0, next(reversed(counts)), 0, "at least one block")
        axes = self.fields.get("axes_dims_rope")
        even = f"even numbers that add up to attention_head_dim, {self.head_dim}"
        fit = axes is None or (sum(axes) == self.head_dim and all(axis % 2 == 0 for axis in axes))
        expect(fit, "axes_dims_rope", axes, even)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DiffusersConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def replace(self, **fields: Any) -> DiffusersConfig:
        return DiffusersConfig(self.class_name, **{**self.fields, **fields})

    @property
    def d_model(self) -> int:
        return int(self.num_heads * self.attention_head_dim)

    @property
    def num_heads(self) -> int:
        return int(self.num_attention_heads)

    @property
    def block_counts(self) -> dict[str, int]:
        counts = {kind: self.fields[field] for kind, field in self.adapter.block_counts.items()}
        return {kind: count for kind, count in counts.items() if count > 0}

    @property
    def text_beside(self) -> bool:
        return self.adapter.text_beside

    @property
    def text_limit(self) -> int | None:
        return MAX_TEXT_TOKENS if self.text_beside else None

    @property
    def rows_of_token(self) -> int:
        """Rows of a prediction for each token: as many as a patch has latent pixels, or 1 without grids."""
        return math.prod(self.patch) if self.adapter.of_grids else 1

    @property
    def out_width(self) -> int:
        """Numbers in a row of a prediction."""
        channels = self.out_channels or self.in_channels
        return int(channels if self.adapter.of_grids else channels * math.prod(self.patch))

    @property
    def patch(self) -> tuple[int, ...]:
        """Numbers of a latent in each direction that make a token."""
        size = self.patch_size
        return size if isinstance(size, tuple) else (size, size)

    def alone(self, kind: str) -> DiffusersConfig:
        counts = dict.fromkeys(self.adapter.block_counts.values(), 0)
        return self.replace(**counts | {self.adapter.block_counts[kind]: self.adapter.min_blocks})

    def possible(self, sample: Sample, *, at_least: bool = False) -> Sample:
        """at_least: the result has no fewer tokens."""
        if not self.adapter.of_grids:
            return sample
        return Sample(sample.text_tokens, math.prod(grid_of(sample.visual_tokens, at_least=at_least)))

    def build(self) -> DiffusersModel:
        return DiffusersModel(self, _class_of(self.class_name)(**self.fields))

    def random_sample(self, size: Sample, draw: Draw) -> dict[str, Any]:
        """The arguments of diffusers' forward for a sample of this size, which is a `possible` one."""
        drawn = _DRAWN | self.adapter.drawn
        names = [name for name in (*self.adapter.required, *self.adapter.optional) if name in drawn]
        return {name: drawn[name](self, size, draw) for name in names}

    def random_batch(
        self, samples: Sequence[Sample], draw: Draw, seeds: Sequence[int] | None = None
    ) -> tuple[SampleBatch, Tensor]:
        pairs = list(zip(samples, draw.each(len(samples), seeds), strict=True))
        drawn = [self.random_sample(size, of) for size, of in pairs]
        targets = [of.normal(size.visual_tokens * self.rows_of_token, self.out_width) for size, of in pairs]
        batch = SampleBatch(drawn, [self.planned_tokens(size) for size in samples])
        return batch, torch.cat([draw.normal(0, self.out_width), *targets])

    def to_dict(self) -> dict[str, Any]:
        """As diffusers writes it to config.json."""
        return {"_class_name": self.class_name, **self.fields}


def _class_of(class_name: str) -> Any:
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError:
        raise ArgumentError(
            f"{class_name} is a model of diffusers, which is not installed: pip install 'knapformer[models]', or take "
            "transformer-demo, which needs none"
        ) from None
    if not hasattr(diffusers, class_name):
        raise ArgumentError(
            f"diffusers: got version {diffusers.__version__}, which has no {class_name}: take a newer one"
        )
    return getattr(diffusers, class_name)


@functools.cache
def _defaults_of(class_name: str) -> dict[str, Any]:
    arguments = inspect.signature(_class_of(class_name).__init__).parameters
    return {name: argument.default for name, argument in arguments.items() if name != "self"}


def _tokens(config: Any, size: Sample, draw: Draw) -> Tensor:
    if not config.adapter.of_grids:
        return draw.normal(1, size.visual_tokens, config.in_channels)
    *frames, of_rows, of_columns = config.patch
    rows, columns = grid_of(size.visual_tokens)
    return draw.normal(1, config.in_channels, *frames, rows * of_rows, columns * of_columns)


def _text(config: Any, size: Sample, draw: Draw) -> Tensor:
    width = config.text_dim if "text_dim" in config.fields else config.joint_attention_dim
    return draw.normal(1, size.text_tokens, width)


def _places(config: Any, size: Sample, draw: Draw) -> Tensor:
    """(tokens, axes): frame, row and column in a picture near a square, for any number of tokens."""
    place = torch.arange(size.visual_tokens, device=draw.device)
    width = max(1, math.isqrt(size.visual_tokens))
    ids = torch.stack([torch.zeros_like(place), place // width, place % width], 1).float()
    return torch.nn.functional.pad(ids, (0, len(config.axes_dims_rope) - 3))


def _shapes(config: Any, size: Sample, draw: Draw) -> list[Any]:
    """A picture of whole rows; the rest of the tokens is a second picture, one row high."""
    width = max(1, math.isqrt(size.visual_tokens))
    rows, rest = divmod(size.visual_tokens, width)
    return [[(1, rows, width), *([(1, 1, rest)] if rest else [])]]


#: Random arguments of diffusers' forward, by name.
_DRAWN: dict[str, Callable[[Any, Sample, Draw], Any]] = {
    "hidden_states": _tokens,
    "encoder_hidden_states": _text,
    "pooled_projections": lambda config, size, draw: draw.normal(1, config.pooled_projection_dim),
    "timestep": lambda config, size, draw: draw.time(),
    "guidance": lambda config, size, draw: draw.time() if config.fields.get("guidance_embeds", True) else None,
    "img_ids": _places,
    "txt_ids": lambda config, size, draw: torch.zeros(size.text_tokens, len(config.axes_dims_rope), device=draw.device),
    "img_shapes": _shapes,
}
