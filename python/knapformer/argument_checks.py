"""What is known of every sample (lengths, work, masks), and checks of numbers that users give. Needs torch."""

from __future__ import annotations

import hashlib
import operator
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer._core import MAX_MAGNITUDE, ArgumentError, attention_pairs

_LONGEST_TEXT = 1000  # that is told as it is


def checked_numbers(name: str, values: Any, num_samples: int, low: float) -> Tensor:
    """float64 on the CPU, one for each sample."""
    # Without a dtype, lists of floats would get torch's default one, which rounds them.
    numbers = _as_tensor(name, values, torch.float64 if isinstance(values, list | tuple) else None)
    if numbers.shape != (num_samples,) or numbers.dtype == torch.bool or numbers.is_complex():
        raise ArgumentError(
            f"{name}: got {numbers.dtype} of shape {tuple(numbers.shape)}, expected a number for each of {num_samples} "
            "samples"
        )
    numbers = numbers.to("cpu", torch.float64)
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
    """int64 on the CPU, one for each sample."""
    # Of an empty list torch makes floats.
    checked = _as_tensor(name, values, torch.int64 if isinstance(values, Sequence) and len(values) == 0 else None)
    if checked.ndim != 1 or checked.dtype == torch.bool or checked.is_floating_point() or checked.is_complex():
        raise ArgumentError(
            f"{name}: got {checked.dtype} of shape {tuple(checked.shape)}, expected integers, (samples,)"
        )
    if num_samples is not None and len(checked) != num_samples:
        raise ArgumentError(f"{name}: got {len(checked)}, expected one for each of {num_samples} samples")
    checked = checked.to("cpu", torch.int64)
    if low is not None and len(checked) > 0:
        for extreme in extremes(checked):
            integer(name, extreme, low, high)
    return checked


def checked_masks(masks: Any, lengths: Tensor) -> list[str]:
    """The text of each sample's mask. Raises ArgumentError, naming the sample, also for one of another length."""
    if isinstance(masks, str) or not hasattr(masks, "__len__"):
        raise ArgumentError(f"masks: got {masks!r}, expected a list of texts; mask={masks!r} is that of all samples")
    if len(masks) != len(lengths):
        raise ArgumentError(f"masks: got {len(masks)}, expected one for each of {len(lengths)} samples")
    texts, known = [], set[tuple[str, int]]()
    for sample, (mask, length) in enumerate(zip(masks, lengths.tolist(), strict=True)):
        if not isinstance(mask, str) or (mask, length) not in known:
            try:
                attention_pairs(mask, length)
            except ArgumentError as error:
                raise ArgumentError(f"masks[{sample}]: {error}") from None
            known.add((mask, length))
        texts.append(sys.intern(str(mask)))
    return texts


def extremes(values: Tensor) -> tuple[Any, Any]:
    """The lowest and the highest of values that are not empty."""
    lowest, highest = values.aminmax()
    return lowest.item(), highest.item()


def described(value: Any) -> str:
    """A text that is equal for equal values. Of integers the sum tells those that are in another order."""
    if isinstance(value, Tensor):
        what = "numbers" if value.is_floating_point() else f"integers of sum {int(value.sum())}"
        return f"{len(value)} {what}, hash {_hash(value.contiguous().numpy())}"
    text = str(value)  # numpy's integers as Python's
    return text if len(text) <= _LONGEST_TEXT else f"{text[:60]}..., hash {_hash(text.encode())}"


def _hash(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


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
