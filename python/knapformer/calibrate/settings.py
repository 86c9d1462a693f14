"""What a calibration is asked to measure. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from knapformer import ArgumentError
from knapformer.models.config import ModelConfig, config_from_dict, config_to_dict

_NUM_LENGTHS = 7
# Of attention's FLOPs to those of the matrix products, l / 6 d, at the shortest and the longest length.
_ATTENTION_SHARES = (1 / 72, 8 / 9)


@dataclass(frozen=True)
class CalibrationSettings:
    model: ModelConfig
    model_name: str
    lengths: tuple[int, ...]
    num_ranks: int
    num_rounds: int
    num_warmup_rounds: int
    dtype: str | None
    device: str
    checkpointing: bool
    threads: int
    json_path: str | None
    picture_path: str | None

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < 2:
            raise ArgumentError(f"--lengths: got {len(set(self.lengths))} lengths, expected at least 2 distinct ones")

    def to_json(self) -> str:
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**shallow, "model": config_to_dict(self.model)})

    @staticmethod
    def from_json(text: str) -> CalibrationSettings:
        """Of what to_json wrote, in a rank that was started with it."""
        fields = json.loads(text)
        fields |= {"model": config_from_dict(fields["model"]), "lengths": tuple(fields["lengths"])}
        return CalibrationSettings(**fields)


def default_lengths(d_model: int) -> list[int]:
    """In equal ratios, from where attention is a seventieth of the matrix products to where it is nearly as much."""
    low, high = (6 * d_model * share for share in _ATTENTION_SHARES)
    return [max(1, round(low * (high / low) ** (i / (_NUM_LENGTHS - 1)))) for i in range(_NUM_LENGTHS)]
