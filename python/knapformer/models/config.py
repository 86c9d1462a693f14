"""What the configurations of all models share: dataclasses whose fields are checked, with words for what tools ask."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from knapformer import ArgumentError, Sample

MASKS = ("full", "causal")  # that the models' attention computes, as knapformer.attention_pairs reads them


class BaseConfig:
    """Base of frozen dataclasses. Fields are checked by type and range when constructed; heads are of one width."""

    kind: ClassVar[str]  # names the model in JSON files
    #: The field that counts the blocks of each kind.
    block_counts: ClassVar[dict[str, str]] = {"block": "num_blocks"}
    #: Whether a sample's text is a stream beside the sequence that is planned, or the front of that sequence.
    text_beside: ClassVar[bool] = False

    d_model: int
    num_heads: int
    mask: str = "full"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            self._check_field(field.name, field.default)
        self._expect(self.d_model % self.num_heads == 0, "num_heads", f"a divisor of d_model {self.d_model}")
        self._expect(self.depth > 0, list(self.block_counts.values())[-1], "at least one block")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def depth(self) -> int:
        """Blocks of 24 l d^2 + 4 l^2 d FLOPs, or about as many."""
        return sum(getattr(self, field) for field in self.block_counts.values())

    @property
    def text_limit(self) -> int | None:
        """Text tokens that a sample may have at most; None: any number."""
        return None

    def planned_tokens(self, sample: Sample) -> int:
        """Length of the sequence that a balancer plans for a sample."""
        return sample.visual_tokens if self.text_beside else sample.num_tokens

    def _check_field(self, name: str, default: object) -> None:
        """Checks one field against the type of its default; integers are counts, floats are finite and positive."""
        value: Any = getattr(self, name)
        if isinstance(default, bool):
            expected, good = "true or false", isinstance(value, bool)
        elif isinstance(default, str):
            expected, good = f"one of {', '.join(MASKS)}", value in MASKS
        elif isinstance(default, tuple):
            expected = "a list of integers >= 1"
            good = isinstance(value, (list, tuple)) and all(type(item) is int and item >= 1 for item in value)
            if good:
                object.__setattr__(self, name, tuple(value))
        elif isinstance(default, float):
            expected = "a finite number > 0"
            good = type(value) in (int, float) and math.isfinite(value) and value > 0
        else:
            low = 0 if name.startswith("num_") and name.endswith("_blocks") else 1
            expected, good = f"an integer from {low} to 2^24", type(value) is int and low <= value <= 1 << 24
        self._expect(good, name, expected)

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")
