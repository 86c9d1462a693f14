"""What is known of every sample: lengths, shapes, work, masks, as tensors that may be memory maps. Needs torch."""

from __future__ import annotations

import hashlib
import operator
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from knapformer._core import MAX_MAGNITUDE, ArgumentError, attention_pairs

_BLOCK = 1 << 20  # values of a memory map that are converted at a time
_MAX_REPEATS = 2**31 - 1  # their sum over all samples is an int64
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch indexes and converts these, and computes little of them


def checked_numbers(name: str, values: Any, num_samples: int, low: float) -> Tensor:
    # Without a dtype, lists of floats would get torch's default one, which rounds them.
    numbers = _as_tensor(name, values, torch.float64 if isinstance(values, list | tuple) else None)
    if numbers.shape != (num_samples,) or numbers.dtype == torch.bool or numbers.is_complex():
        raise ArgumentError(
            f"{name}: got {numbers.dtype} of shape {tuple(numbers.shape)}, expected a number for each of {num_samples} "
            "samples"
        )
    if num_samples > 0:
        lowest, highest = extremes(numbers)  # NaN where any of them is NaN
        if not (lowest >= low and 0 < highest <= MAX_MAGNITUDE):
            sign = "positive" if low > 0 else "some positive, no negative,"
            raise ArgumentError(
                f"{name}: got {lowest} to {highest}, expected {sign} finite numbers, from {low:g} to {MAX_MAGNITUDE:g}"
            )
    return numbers


def _as_tensor(name: str, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    with warnings.catch_warnings():  # torch warns of read-only memory maps: nothing here writes
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.as_tensor(values, dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"{name}: got what makes no tensor ({error}), expected numbers") from None


def checked_integers(
    name: str, values: Any, num_samples: int | None = None, low: int | None = None, high: int = 0
) -> Tensor:
    # Of an empty list torch makes floats.
    checked = _as_tensor(name, values, torch.int64 if isinstance(values, Sequence) and len(values) == 0 else None)
    if checked.ndim != 1 or checked.dtype == torch.bool or checked.is_floating_point() or checked.is_complex():
        raise ArgumentError(
            f"{name}: got {checked.dtype} of shape {tuple(checked.shape)}, expected integers, (samples,)"
        )
    if num_samples is not None and len(checked) != num_samples:
        raise ArgumentError(f"{name}: got {len(checked)}, expected one for each of {num_samples} samples")
    if low is not None and len(checked) > 0:
        for extreme in extremes(checked):
            integer(name, extreme, low, high)
    return checked


def checked_repeats(values: Any, num_samples: int) -> Tensor:
    """How often each sample stands in an epoch, of a number for all of them or one for each."""
    if isinstance(values, Integral):
        return torch.tensor(integer("repeats", values, 1, _MAX_REPEATS)).expand(num_samples)
    return checked_integers("repeats", values, num_samples, 0, _MAX_REPEATS).long()


@dataclass(frozen=True)
class SampleMasks:
    """texts: those that differ. numbers: of each sample, that of its text."""

    texts: list[str]
    numbers: Tensor

    @staticmethod
    def of(masks: Any, lengths: Tensor) -> SampleMasks:
        """Raises ArgumentError, naming the sample, also for a written mask of another length."""
        if isinstance(masks, str) or not hasattr(masks, "__len__"):
            raise ArgumentError(
                f"masks: got {masks!r}, expected a list of texts; mask={masks!r} is that of all samples"
            )
        if len(masks) != len(lengths):
            raise ArgumentError(f"masks: got {len(masks)}, expected one for each of {len(lengths)} samples")
        number_of, numbers, checked = dict[str, int](), array("q"), set[tuple[str, int]]()
        for sample, (mask, length) in enumerate(zip(masks, _integers_of(lengths), strict=True)):
            if not isinstance(mask, str) or (mask, length) not in checked:
                try:
                    attention_pairs(mask, length)
                except ArgumentError as error:
                    raise ArgumentError(f"masks[{sample}]: {error}") from None
                checked.add((mask, length))
            numbers.append(number_of.setdefault(str(mask), len(number_of)))
        return SampleMasks(list(number_of), torch.tensor(numbers, dtype=torch.int64))


def _integers_of(values: Tensor) -> Iterator[int]:
    for block in values.split(_BLOCK):
        yield from block.tolist()


def extremes(values: Tensor) -> tuple[Any, Any]:
    """The lowest and the highest of values that are not empty. They may be a memory map: none is converted."""
    if values.dtype in _UNSIGNED:
        array = values.numpy()
        return int(array.min()), int(array.max())
    lowest, highest = values.aminmax()
    return lowest.item(), highest.item()


def described(value: Any) -> str:
    """A text that is equal for equal values. Values of samples are hashed a block at a time, whatever type holds them;
    of integers the sum tells those that are in another order."""
    if isinstance(value, SampleMasks):
        texts = hashlib.blake2b(repr(value.texts).encode(), digest_size=8).hexdigest()
        return f"{len(value.texts)} texts, hash {texts}, of {described(value.numbers)}"
    if not isinstance(value, Tensor):
        return repr(value)
    of_floats, total, hashed = value.is_floating_point(), 0, hashlib.blake2b(digest_size=8)
    for block in value.split(_BLOCK):
        same = block.to("cpu", torch.float64 if of_floats else torch.int64).contiguous()
        total += 0 if of_floats else int(same.sum())
        hashed.update(same.numpy())
    what = "numbers" if of_floats else f"integers of sum {total}"
    return f"{len(value)} {what}, hash {hashed.hexdigest()}"


def chosen(values: Tensor, samples: Tensor) -> Tensor:
    """Integers of these samples, in a type that torch computes with."""
    return values[samples].long()


def integer(name: str, value: Any, low: int, high: int | None = None, of: str = "") -> int:
    """Also of numpy's integers. of: what of the argument the value is, for the error."""
    expected = f"at least {low}" if high is None else f"{low} to {high}"
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: got {of}{value!r}, expected an integer, {expected}") from None
    if number < low or (high is not None and number > high):
        raise ArgumentError(f"{name}: got {of}{number}, expected {expected}")
    return number
