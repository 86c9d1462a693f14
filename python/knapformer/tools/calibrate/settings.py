"""What a calibration is asked to measure. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knapformer import ArgumentError
from knapformer.tools.launch import RunSettings
from knapformer.tools.measure.figures import equal_ratios

_NUM_LENGTHS = 7
_NUM_STEP_LENGTHS = 5
# Attention's FLOPs over those of the matrix products, l / 6 d, at the shortest and the longest length.
_ATTENTION_SHARES = (1 / 72, 8 / 9)


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(RunSettings):
    lengths: tuple[int, ...]
    num_rounds: int
    num_warmup_rounds: int
    block: str | None = None  # module:function of the user's own block, measured in the model's place
    block_d_model: int | None = None  # that block's width

    measures_steps: bool = True  # where there are several ranks, and the model fits

    @property
    def step_lengths(self) -> list[int]:
        """The lengths of whole steps: at most _NUM_STEP_LENGTHS of `lengths`, evenly picked from the shortest on."""
        every = sorted(set(self.lengths))
        return every[:: max(1, -(-len(every) // _NUM_STEP_LENGTHS))]

    @property
    def d_model(self) -> int:
        return self.block_d_model or self.model.d_model

    @property
    def mask(self) -> str:
        return self.model.mask if self.block is None else "full"

    def __post_init__(self) -> None:
        if (self.block is None) != (self.block_d_model is None):
            raise ArgumentError("--d-model: expected it with --block, whose width it is, and only there")
        if len(set(self.lengths)) < 2:
            raise ArgumentError(f"--lengths: got {len(set(self.lengths))} lengths, expected at least 2 distinct ones")


def default_lengths(d_model: int) -> list[int]:
    """In equal ratios, from where attention is a seventieth of the matrix products to where it is nearly as much."""
    low, high = (6 * d_model * share for share in _ATTENTION_SHARES)
    return equal_ratios(low, high, _NUM_LENGTHS)


def lengths_over(samples: Sequence[int]) -> list[int]:
    """In equal ratios, from the shortest sample to the longest."""
    return sorted(set(equal_ratios(min(samples), max(samples), _NUM_LENGTHS)))
