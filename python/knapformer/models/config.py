"""What a configuration tells of a model: whatever builds, feeds, measures or plans models knows none by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from knapformer import ArgumentError, Sample
from knapformer.models.model import Draw, PackedModel


class BaseConfig:
    """Of a model whose heads are of one width. A configuration is a value: constant, comparable."""

    mask: str = "full"

    @property
    def d_model(self) -> int:
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        raise NotImplementedError

    @property
    def text_beside(self) -> bool:
        """Whether a sample's text is a stream beside the sequence that is planned, or the front of that sequence."""
        return False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def block_counts(self) -> dict[str, int]:
        """How many blocks of each kind the model has, of the kinds that it has."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Blocks of 24 l d^2 + 4 l^2 d FLOPs, or about as many."""
        return sum(self.block_counts.values())

    @property
    def text_limit(self) -> int | None:
        """Text tokens that a sample may have at most; None: any number."""
        return None

    def build(self) -> PackedModel:
        """With weights as torch draws them."""
        raise NotImplementedError

    def random_batch(self, samples: Sequence[Sample], draw: Draw) -> tuple[Any, Tensor]:
        """A batch of samples of these sizes, and a target in the shape of what the model returns for it."""
        raise NotImplementedError

    def alone(self, kind: str) -> BaseConfig:
        """Of a model whose first block is one of that kind, with as few others as it takes."""
        raise NotImplementedError

    def possible(self, sample: Sample) -> Sample:
        """The sample, or one of about its size where the model takes no sample of as many tokens."""
        return sample

    def planned_tokens(self, sample: Sample) -> int:
        """Length of the sequence that a balancer plans for a sample."""
        return sample.visual_tokens if self.text_beside else sample.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; what `load_config` reads."""
        raise NotImplementedError


def checked_field(name: str, value: Any, default: object, low: int = 1) -> Any:
    """The value of a field, by the type of its default: integers are counts from `low` on, floats finite and positive.

    Lists of integers come back as tuples. Where the default is None or a text, any value is taken. Raises
    ArgumentError.
    """
    if isinstance(default, bool):
        expected, good = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple):
        expected = "a list of integers >= 0"
        good = isinstance(value, (list, tuple)) and all(type(item) is int and item >= 0 for item in value)
        value = tuple(value) if good else value
    elif isinstance(default, float):
        expected = "a finite number > 0"
        good = type(value) in (int, float) and math.isfinite(value) and value > 0
    elif isinstance(default, int):
        expected, good = f"an integer from {low} to 2^24", type(value) is int and low <= value <= 1 << 24
    else:
        return value
    expect(good, name, value, expected)
    return value


def expect(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ArgumentError(f"{name}: got {value!r}, expected {expected}")
