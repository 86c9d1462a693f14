"""What a configuration tells of a model. Code that builds, feeds, measures or plans models knows no model by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from knapformer import ArgumentError, Sample
from knapformer.models.model import Draw, PackedModel


class BaseConfig:
    """The configuration of a model whose heads are all of one width. It is a value: constant, comparable."""

    mask: str = "full"

    @property
    def d_model(self) -> int:
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        raise NotImplementedError

    @property
    def text_beside(self) -> bool:
        """True: a sample's text is a stream beside the planned sequence. False: it is the front of that sequence."""
        return False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def block_counts(self) -> dict[str, int]:
        """The number of blocks of each kind; a kind without blocks is left out."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """The number of blocks. Each computes 24 l d^2 + 4 l^2 d FLOPs, or about that."""
        return sum(self.block_counts.values())

    @property
    def text_limit(self) -> int | None:
        """Text tokens that a sample may have at most; None: any number."""
        return None

    def build(self) -> PackedModel:
        """The model, with weights as torch draws them."""
        raise NotImplementedError

    def random_batch(
        self, samples: Sequence[Sample], draw: Draw, seeds: Sequence[int] | None = None
    ) -> tuple[Any, Tensor]:
        """A batch of samples of these sizes, and a target in the shape of what the model returns for it. seeds: of each
        sample, which then is the same in every batch."""
        raise NotImplementedError

    def alone(self, kind: str) -> BaseConfig:
        """The configuration of a model whose first block is of that kind, with as few other blocks as it can have."""
        raise NotImplementedError

    def possible(self, sample: Sample) -> Sample:
        """The sample, or one of about its size where the model takes no sample of exactly that size."""
        return sample

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

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, which `load_config` reads."""
        raise NotImplementedError


def checked_field(name: str, value: Any, default: object, low: int = 1) -> Any:
    """Checks a field's value by the type of its default: integers are counts from `low` on, floats finite and positive.

    Returns the value, lists of integers as tuples. Where the default is None or a text, any value is taken. Raises
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
