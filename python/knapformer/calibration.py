"""Calibration: what was measured of a device, as a value and as a JSON file. Needs no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from knapformer._core import ArgumentError, Cluster, TrainedModel, WorkloadModel, check_mask
from knapformer.json_file import read_json

T = TypeVar("T")
_FORMAT = "knapformer.calibration"
_VERSION = 2
# A calibration is not trusted for widths, or longest sequences, further from the measured ones than by these ratios.
_MAX_WIDTH_RATIO = 1.5
_MAX_LENGTH_RATIO = 2.0


@dataclass(frozen=True)
class ExchangeCost:
    """An all-to-all takes latency_s + bytes sent by a rank / bytes_per_s."""

    num_ranks: int
    latency_s: float
    bytes_per_s: float
    relative_rms_error: float = 0.0


@dataclass(frozen=True)
class FixedCost:
    """The time that a micro-batch takes beyond its blocks, its exchanges and FSDP, whatever its load: embeddings, loss,
    the host."""

    num_ranks: int  # ranks that sharded the model
    seconds: float
    relative_rms_error: float = 0.0  # of whole steps predicted with this cost


def _kernel_of(mask: str) -> str:
    return mask if mask in ("full", "causal") else "by ranges of keys"


@dataclass(frozen=True)
class Calibration:
    """Of one device: t = k (24 l d^2 + r gamma 4 a d) for all passes of a block; a: the pairs that the mask leaves.

    r: passes over attention, divided by passes over the per-token layers. It is 1 except for a frozen base ("lora").

    May be given as `gamma` wherever one is expected: float(calibration) is its gamma.
    """

    gamma: float
    seconds_per_flop: float  # k
    d_model: int
    recomputes: bool  # whether k holds a recomputation of the forward pass
    relative_rms_error: float
    relative_rms_error_without_gamma: float
    noise: float  # relative spread between repeats: the median over lengths
    mask: str = "full"  # the mask that attention had
    node: ExchangeCost | None = None  # between ranks of one node
    network: ExchangeCost | None = None  # between nodes
    fixed: FixedCost | None = None  # measured on whole steps
    warnings: tuple[str, ...] = ()
    device: str | None = None  # the device that was measured
    longest: int | None = None  # tokens of the longest length that was measured
    mode: str = "training"  # or "lora": what was measured trains adapters on a frozen base
    overlaps_attention: bool = True  # whether exchanges run beside attention: on a CPU, its cores carry both

    def __float__(self) -> float:
        return self.gamma

    @property
    def flops_per_s(self) -> float:
        """Sustained over whole blocks: the passes of a step, divided by k."""
        return self._trained.token_passes / self.seconds_per_flop

    @property
    def _trained(self) -> TrainedModel:
        return TrainedModel(recomputes=self.recomputes, mode=self.mode)

    def block_s(self, seq_len: int) -> float:
        """Seconds of all passes of a block over a sequence."""
        gamma = self.gamma * self._trained.attention_passes / self._trained.token_passes
        return self.seconds_per_flop * WorkloadModel(gamma).work(seq_len, self.d_model, self.mask)

    def cluster(self, of: Cluster | None = None) -> Cluster:
        """`of` (default: Cluster()), with the fields that were measured here in place of its own, and without overlap
        if there is none on this device."""
        base = (of or Cluster()).replace(flops_per_s=self.flops_per_s)
        fields: dict[str, Any] = {"overlaps_attention": base.overlaps_attention and self.overlaps_attention}
        for name, cost in (("node", self.node), ("network", self.network)):
            if cost is not None:
                fields |= {f"{name}_latency_s": cost.latency_s, f"{name}_bytes_per_s": cost.bytes_per_s}
        if self.fixed is not None:
            fields["fixed_s"] = self.fixed.seconds
        return base.replace(**fields)

    def far_from(
        self, d_model: int, longest: int | None = None, device: str | None = None, masks: Iterable[str] = ()
    ) -> list[str]:
        """Why it should not be trusted for blocks of this width, sequences of up to `longest` tokens, this device,
        these masks: one sentence each. A value that is None, in the arguments or in the calibration, is not compared.
        Masks are compared by the kernel that computes them: one for 'full', one for 'causal', one for all others."""
        found = []
        if max(d_model, self.d_model) > _MAX_WIDTH_RATIO * min(d_model, self.d_model):
            found.append(f"measured at width {self.d_model}, used at {d_model}")
        if longest is not None and self.longest is not None and longest > _MAX_LENGTH_RATIO * self.longest:
            found.append(f"measured up to {self.longest:,} tokens, used for {longest:,}")
        if device is not None and self.device is not None and device != self.device:
            found.append(f"measured on {self.device}, used on {device}")
        if other := next((mask for mask in sorted(masks) if _kernel_of(mask) != _kernel_of(self.mask)), None):
            found.append(f"measured with the mask {self.mask}, used with {other[:40]}")
        return [f"far from where it was measured: {why}; calibrate there" for why in found]

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads; other keys may stand beside them."""
        return {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(fields: Any) -> Calibration:
        """Raises ArgumentError, naming the field; unknown keys are ignored."""
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ArgumentError("calibration: expected what knapformer calibrate --json wrote")
        if fields.get("version") != _VERSION:
            raise ArgumentError(f"calibration: version: got {fields.get('version')!r}, expected {_VERSION}")
        return _read(Calibration, fields, "calibration")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """From a file of `knapformer calibrate --json`. Raises ArgumentError, OSError."""
        fields = read_json(path, "calibration")
        try:
            return Calibration.from_dict(fields)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # an integer may be beyond any float


_Check = tuple[Callable[[Any], bool], str]  # what fits, and what is expected
_AT_LEAST_0: _Check = (lambda value: _is_number(value) and value >= 0, "a finite number >= 0")
_ABOVE_0: _Check = (lambda value: _is_number(value) and value > 0, "a finite number > 0")
_COUNT: _Check = (lambda value: type(value) is int and 1 <= value < 1 << 63, "an integer from 1 to 2^63 - 1")
_FLAG: _Check = (lambda value: type(value) is bool, "true or false")
_TEXTS: _Check = (
    lambda value: isinstance(value, list | tuple) and all(isinstance(text, str) for text in value), "a list of texts"
)  # fmt: skip
_MASK: _Check = (lambda value: isinstance(value, str) and bool(check_mask(value)), "a mask's text")  # raises, too
_CHECKS: dict[str, _Check] = {
    "gamma": _AT_LEAST_0, "seconds_per_flop": _ABOVE_0, "d_model": _COUNT,
    "recomputes": _FLAG, "overlaps_attention": _FLAG, "relative_rms_error": _AT_LEAST_0,
    "relative_rms_error_without_gamma": _AT_LEAST_0, "noise": _AT_LEAST_0, "mask": _MASK,
    "warnings": _TEXTS, "device": (lambda value: isinstance(value, str), "a text or null"), "longest": _COUNT,
    "mode": (lambda value: value in ("training", "lora"), "'training' or 'lora'"), "num_ranks": _COUNT,
    "latency_s": _AT_LEAST_0, "bytes_per_s": _ABOVE_0, "seconds": _AT_LEAST_0,
}  # fmt: skip
_PARTS: dict[str, type[Any]] = {"node": ExchangeCost, "network": ExchangeCost, "fixed": FixedCost}


def _read(of: type[T], fields: Any, name: str) -> T:
    """A dataclass from its fields in a file; those with a default may be missing, and other ones are ignored."""
    if not isinstance(fields, dict):
        raise ArgumentError(f"{name}: got {fields!r}, expected an object")
    given: dict[str, Any] = {}
    for field in dataclasses.fields(of):  # type: ignore[arg-type]
        value = fields.get(field.name, None if field.default is dataclasses.MISSING else field.default)
        if field.name in _PARTS:
            value = None if value is None else _read(_PARTS[field.name], value, f"{name}: {field.name}")
        elif not (value is None and field.default is None):
            fits, expected = _CHECKS[field.name]
            if not fits(value):
                raise ArgumentError(f"{name}: {field.name}: got {value!r}, expected {expected}")
        given[field.name] = tuple(value) if isinstance(value, list) else value
    return of(**given)
