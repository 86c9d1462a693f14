"""The configuration of a model that has an adapter: the arguments of its class, in the words of that class."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError, Sample
from knapformer.adapters.adapter import MAX_TEXT_TOKENS, Adapter, expect, grid_of, patch_of
from knapformer.adapters.model import Draw, PackedModel
from knapformer.adapters.registry import adapter_named
from knapformer.models.transformer import Transformer

PLAIN = "knapformer.models.transformer.Transformer"


class Fields:
    """The arguments of a class that has an adapter. Every field is an attribute, too: config.num_layers."""

    def __init__(self, adapter: type[Adapter], fields: dict[str, Any]) -> None:
        self.adapter = adapter
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    @property
    def patch(self) -> tuple[int, ...]:
        return patch_of(self.fields.get("patch_size", 1))

    def random_sample(self, size: Any, draw: Draw, conditions: bool = False) -> dict[str, Any]:
        """The arguments of diffusers' forward for a sample of this size, which is a `possible` one. conditions: with
        those of Adapter.conditions, of which some samples have more than others."""
        drawn = _DRAWN | self.adapter.drawn | (self.adapter.conditions if conditions else {})
        names = [name for name in (*self.adapter.required, *self.adapter.optional) if name in drawn]
        sample = {}
        for name in names:
            try:
                sample[name] = drawn[name](self, size, draw)
            except AttributeError as error:
                of = f"Adapter.conditions[{name!r}]"
                raise ArgumentError(f"{name}: got no field {error}, by which it is drawn, expected {of}") from error
        return sample


class ModelConfig(Fields):
    """The configuration of a class of diffusers, given by name, or of the plain transformer. It is a value:
    constant, comparable.

    fields: those that differ from the defaults of the class. Raises ArgumentError where diffusers is missing, the class
    has no adapter, or a field is wrong.
    """

    def __init__(self, class_name: str, **fields: Any) -> None:
        self.class_name = class_name
        adapter = adapter_named(class_name)
        if not adapter.named_configs:
            raise ArgumentError(f"got a model of class {class_name}, which is balanced, and not simulated")
        defaults = _defaults_of(class_name)
        for name in fields:
            if name not in defaults:
                raise ArgumentError(f"got unknown field {name!r}, expected some of {', '.join(sorted(defaults))}")
        counts = adapter.block_counts.values()
        super().__init__(
            adapter,
            {
                name: checked_field(name, fields.get(name, default), default, low=0 if name in counts else 1)
                for name, default in defaults.items()
            },
        )
        expect(self.depth > 0, next(reversed(counts)), 0, "at least one block")
        self.adapter.check_config(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def replace(self, **fields: Any) -> ModelConfig:
        return ModelConfig(self.class_name, **{**self.fields, **fields})

    @property
    def d_model(self) -> int:
        return int(self.fields.get("d_model") or self.num_heads * self.attention_head_dim)

    @property
    def num_heads(self) -> int:
        return int(self.fields.get("num_heads") or self.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(self.fields.get("num_kv_heads") or self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def mask(self) -> str:
        return self.fields.get("mask", "full")

    @property
    def depth(self) -> int:
        """The number of blocks. Each computes 24 l d^2 + 4 l^2 d FLOPs, or about that."""
        return sum(self.block_counts.values())

    @property
    def block_counts(self) -> dict[str, int]:
        """The number of blocks of each kind; a kind without blocks is left out."""
        counts = {kind: self.fields[field] for kind, field in self.adapter.block_counts.items()}
        return {kind: count for kind, count in counts.items() if count > 0}

    @property
    def text_beside(self) -> bool:
        """True: a sample's text is a stream beside the planned sequence. False: it is the front of that sequence."""
        return self.adapter.text_beside

    @property
    def text_limit(self) -> int | None:
        """Text tokens that a sample may have at most; None: any number."""
        return MAX_TEXT_TOKENS if self.text_beside else None

    def num_rows(self, sample: Sample) -> int:
        """Of a sample's prediction: as many for each token as a patch has latent pixels, or 1 without grids. Text that
        is an argument of its own has none."""
        has_text = "encoder_hidden_states" in self.adapter.required
        num_tokens = sample.visual_tokens if has_text else sample.num_tokens
        return num_tokens * (math.prod(self.patch) if self.adapter.of_grids else 1)

    @property
    def out_width(self) -> int:
        """Numbers in a row of a prediction."""
        channels = self.out_channels or self.in_channels
        return int(channels if self.adapter.of_grids else channels * math.prod(self.patch))

    def alone(self, kind: str) -> ModelConfig:
        counts = dict.fromkeys(self.adapter.block_counts.values(), 0)
        return self.replace(**counts | {self.adapter.block_counts[kind]: self.adapter.min_blocks})

    def possible(self, sample: Sample, *, at_least: bool = False) -> Sample:
        """at_least: the result has no fewer tokens."""
        if not self.adapter.of_grids:
            return sample
        return Sample(sample.text_tokens, math.prod(grid_of(sample.visual_tokens, at_least=at_least)))

    def text_tokens(self, seq_len: int, share: float = 0.1) -> int:
        """The text tokens taken for a sequence of which only the length is known: this share of it. Both halves of a
        double-stream block run then, and neither decides the time."""
        return int(share * seq_len) if self.text_limit is None else min(int(share * seq_len), self.text_limit)

    def sample_of(self, seq_len: int, text_tokens: int) -> Sample:
        """One whose planned sequence has this length, with so many text tokens in it or beside it."""
        return Sample(text_tokens, seq_len if self.text_beside else seq_len - text_tokens)

    def planned_tokens(self, sample: Sample) -> int:
        """Length of the sequence that a balancer plans for a sample."""
        return sample.visual_tokens if self.text_beside else sample.num_tokens

    def build(self) -> PackedModel:
        return PackedModel(self, _class_of(self.class_name)(**self.fields))

    def to_dict(self) -> dict[str, Any]:
        """As diffusers writes it to config.json; of the plain transformer {"kind": "transformer", ...}."""
        name = {"kind": "transformer"} if self.class_name == PLAIN else {"_class_name": self.class_name}
        return {**name, **self.fields}


def checked_field(name: str, value: Any, default: object, low: int = 1) -> Any:
    """Checks a field's value by the type of its default: integers are counts from `low` on, floats finite and positive.

    Returns the value, lists of integers as tuples. Where the default is None or a text, any value is taken. Raises
    ArgumentError.
    """
    kind = type(value)
    if isinstance(default, bool):
        expect(kind is bool, name, value, "true or false")
    elif isinstance(default, tuple):
        good = kind in (list, tuple) and all(type(item) is int and item >= 0 for item in value)
        expect(good, name, value, "a list of integers >= 0")
        return tuple(value)
    elif isinstance(default, float):
        expect(kind in (int, float) and 0 < value < math.inf, name, value, "a finite number > 0")
    elif isinstance(default, int):
        expect(kind is int and low <= value <= 1 << 24, name, value, f"an integer from {low} to 2^24")
    return value


def _class_of(class_name: str) -> Any:
    if class_name == PLAIN:
        return Transformer
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
    return defaults_of(_class_of(class_name))


def defaults_of(model_class: Any) -> dict[str, Any]:
    """The arguments of a class with their defaults."""
    arguments = inspect.signature(model_class.__init__).parameters
    return {name: argument.default for name, argument in arguments.items() if name != "self"}


def _tokens(config: Any, size: Sample, draw: Draw) -> Tensor:
    if not config.adapter.of_grids:
        return draw.normal(1, size.visual_tokens, config.in_channels)
    grid = getattr(size, "grid", (1, *grid_of(size.visual_tokens)))[-len(config.patch) :]
    return draw.normal(1, config.in_channels, *(count * side for count, side in zip(grid, config.patch, strict=True)))


def _text(config: Any, size: Sample, draw: Draw) -> Tensor:
    width = config.text_dim if "text_dim" in config.fields else config.joint_attention_dim
    return draw.normal(1, size.text_tokens, width)


def _places(config: Any, size: Sample, draw: Draw) -> Tensor:
    """(tokens, axes): frame, row and column in a picture near a square, for any number of tokens. The last third of
    larger pictures are tokens of a reference, as FLUX.1 Kontext has them."""
    place = torch.arange(size.visual_tokens, device=draw.device)
    width = max(1, math.isqrt(size.visual_tokens))
    ids = torch.stack([(3 * place >= 2 * size.visual_tokens).long(), place // width, place % width], 1).float()
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
    "guidance": lambda config, size, draw: 4 * draw.time() if config.fields.get("guidance_embeds", True) else None,
    "img_ids": _places,
    "txt_ids": lambda config, size, draw: draw.normal(size.text_tokens, len(config.axes_dims_rope)).float(),
    "img_shapes": _shapes,
}
