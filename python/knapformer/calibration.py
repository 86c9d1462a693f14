"""Calibration: what was measured of a device, as a value and as a JSON file. Needs no torch."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knapformer._core import ArgumentError, Cluster, TrainedModel, WorkloadModel
from knapformer.json_file import read_json
from knapformer.planning import attention_pairs

_FORMAT = "knapformer.calibration"
_VERSION = 2
# A calibration is not trusted for widths, or longest sequences, further from the measured ones than by these ratios.
_MAX_WIDTH_RATIO = 1.5
_MAX_LENGTH_RATIO = 2.0


@dataclass(frozen=True)
class ExchangeCost:
    """An all-to-all takes latency_s + bytes sent by a rank / bytes_per_s. In a step it takes wait_s more: it waits for
    ranks that come later, and other traffic, such as FSDP's gathers, slows it down."""

    num_ranks: int
    latency_s: float
    bytes_per_s: float
    relative_rms_error: float = 0.0
    wait_s: float = 0.0  # measured on whole steps


@dataclass(frozen=True)
class FixedCost:
    """The time that a micro-batch takes beside its blocks, whatever its load: embeddings, loss, the host, and the
    communication that FSDP does not hide."""

    num_ranks: int  # ranks that sharded the model
    seconds: float
    relative_rms_error: float = 0.0  # of whole steps predicted with this cost


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
    # With "lora": the cost of a backward pass over the per-token layers, in forward passes. The cost model takes it as
    # 1; k is fitted with the cost model's passes, so it contains the difference.
    token_backward: float | None = None

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

    def cluster_fields(self) -> dict[str, float]:
        """The fields of a Cluster that were measured."""
        fields = {"flops_per_s": self.flops_per_s}
        for name, cost in (("node", self.node), ("network", self.network)):
            if cost is not None:
                fields |= {f"{name}_latency_s": cost.latency_s + cost.wait_s, f"{name}_bytes_per_s": cost.bytes_per_s}
        if self.fixed is not None:
            fields["fixed_s"] = self.fixed.seconds
        return fields

    def cluster(self, of: Cluster | None = None) -> Cluster:
        """`of` (default: Cluster()), with the fields that were measured here in place of its own."""
        return (of or Cluster()).replace(**self.cluster_fields())

    def far_from(self, d_model: int, longest: int | None = None, device: str | None = None) -> list[str]:
        """Why it should not be trusted for blocks of this width, sequences of up to `longest` tokens, this device: one
        sentence each. A value that is None, in the arguments or in the calibration, is not compared."""
        found = []
        if max(d_model, self.d_model) > _MAX_WIDTH_RATIO * min(d_model, self.d_model):
            found.append(f"measured at width {self.d_model}, used at {d_model}")
        if longest is not None and self.longest is not None and longest > _MAX_LENGTH_RATIO * self.longest:
            found.append(f"measured up to {self.longest:,} tokens, used for {longest:,}")
        if device is not None and self.device is not None and device != self.device:
            found.append(f"measured on {self.device}, used on {device}")
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
        known = {field.name for field in dataclasses.fields(Calibration)}
        given: dict[str, Any] = {"warnings": []} | {name: value for name, value in fields.items() if name in known}
        _check_number("seconds_per_flop", given.get("seconds_per_flop"))
        mask, d_model, recomputes, warnings = map(given.get, ("mask", "d_model", "recomputes", "warnings"))
        _expect(isinstance(mask, str), "mask", mask, "a mask's text")
        attention_pairs(given["mask"], 1)  # checks it
        for name in ("gamma", "relative_rms_error", "relative_rms_error_without_gamma", "noise"):
            _check_number(name, given.get(name), low=0.0)
        _expect(type(d_model) is int and d_model >= 1, "d_model", d_model, "an integer >= 1")
        _expect(type(recomputes) is bool, "recomputes", recomputes, "true or false")
        are_texts = isinstance(warnings, (list, tuple)) and all(isinstance(text, str) for text in warnings)
        _expect(are_texts, "warnings", warnings, "a list of texts")
        device, longest = given.get("device"), given.get("longest")
        mode, backward = given.get("mode", "training"), given.get("token_backward")
        _expect(mode in ("training", "lora"), "mode", mode, "'training' or 'lora'")
        if backward is not None:
            _check_number("token_backward", backward)
        _expect(device is None or isinstance(device, str), "device", device, "a text or null")
        _expect(
            longest is None or (type(longest) is int and longest >= 1), "longest", longest, "an integer >= 1 or null"
        )
        given["warnings"] = tuple(given["warnings"])
        for name in ("node", "network"):
            given[name] = _cost_of(ExchangeCost, name, given.get(name))
        given["fixed"] = _cost_of(FixedCost, "fixed", given.get("fixed"))
        return Calibration(**given)

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """From a file of `knapformer calibrate --json`. Raises ArgumentError, OSError."""
        fields = read_json(path, "calibration")
        try:
            return Calibration.from_dict(fields)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None


def _check_number(name: str, value: Any, low: float | None = None) -> None:
    """The value must be above 0, or at least `low` where that is given."""
    finite = type(value) in (int, float) and abs(value) <= sys.float_info.max  # an integer may be beyond any float
    good = finite and (value > 0 if low is None else value >= low)
    _expect(good, name, value, f"a finite number {'> 0' if low is None else f'>= {low:g}'}")


def _expect(good: bool, name: str, value: Any, expected: str) -> None:
    if not good:
        raise ArgumentError(f"calibration: {name}: got {value!r}, expected {expected}")


def _cost_of(cost: type[Any], name: str, fields: Any) -> Any:
    """Reads a cost. Its numbers must be at least 0, its rate above 0, and its ranks an integer of at least 1."""
    if fields is None:
        return None
    expected = {field.name for field in dataclasses.fields(cost)}
    if not isinstance(fields, dict) or set(fields) != expected:
        raise ArgumentError(f"calibration: {name}: expected an object with {', '.join(sorted(expected))}")
    for field, value in fields.items():
        if field == "num_ranks":
            _expect(type(value) is int and value >= 1, f"{name}: {field}", value, "an integer >= 1")
        else:
            _check_number(f"{name}: {field}", value, None if field == "bytes_per_s" else 0)
    return cost(**fields)
