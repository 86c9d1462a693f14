"""The samples of a packed call, read and checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.attention.packed_rows import lengths_list, positions, segment_index, to_device

Sample = Mapping[str, Any]


class Samples:
    """This rank's samples. Each is the keyword arguments of diffusers' forward, with a batch of one.

    required, optional: names of the arguments that the adapter reads. Other arguments in a sample must be None, empty
    or False, except `return_dict`, which is ignored. Tensors of one name have one dtype. like: a weight of the model's
    input layer. Where there are no samples, tensors of 0 rows get its device and dtype.

    Raises ArgumentError that names the sample and the argument.
    """

    def __init__(self, samples: Sequence[Sample], required: Sequence[str], optional: Sequence[str], like: Tensor):
        if not isinstance(samples, Sequence):
            got = type(samples).__name__
            raise ArgumentError(f"samples: got {got}, expected a list of dicts of forward's arguments")
        self._samples = samples
        self._optional = optional
        self.like = torch.empty(0, dtype=like.dtype, device=like.device)  # not of a DTensor
        dtypes: dict[str, torch.dtype] = {}
        for i, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                raise ArgumentError(
                    f"samples[{i}]: got {type(sample).__name__}, expected a dict of forward's arguments"
                )
            for name in required:
                if sample.get(name) is None:
                    raise ArgumentError(f"samples[{i}]: got no {name!r}, expected {', '.join(required)}")
            for name, value in sample.items():
                if name not in (*required, *optional, "return_dict") and (isinstance(value, Tensor) or value):
                    allowed = ", ".join((*required, *optional))
                    raise ArgumentError(
                        f"samples[{i}]: got {name!r}, expected some of {allowed} in a packed call; calls with others "
                        "are balanced by a BalancedBatchSampler alone"
                    )
                if isinstance(value, Tensor) and value.dtype != (expected := dtypes.setdefault(name, value.dtype)):
                    raise ArgumentError(f"samples[{i}][{name!r}]: got {value.dtype}, expected {expected}, as before it")

    def __len__(self) -> int:
        return len(self._samples)

    def rows(self, name: str, *width: int) -> tuple[Tensor, list[int]]:
        """Packs tensors (1, tokens, *width), or (tokens, *width), of floating-point numbers: returns (all tokens,
        *width), and the tokens of each. An optional argument that a sample has not, has no tokens."""
        parts = [self._checked(i, name, *width) for i in range(len(self))]
        for i, part in enumerate(parts):
            if not part.is_floating_point():
                raise ArgumentError(f"samples[{i}][{name!r}]: got {part.dtype}, expected floating-point numbers")
        return torch.cat(parts) if parts else self.like.new_zeros((0, *width)), [len(part) for part in parts]

    def grids(self, name: str, channels: int, patch: Sequence[int]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        """Images or videos (1, channels, *sizes), as they came, and the sizes of each in patches. Without samples a
        batch of 0, so that the weights that read it get gradients."""
        grids = []
        for i in range(len(self)):
            value = self.tensor(i, name)
            check_shape(f"samples[{i}][{name!r}]", value, (1, channels, *["size"] * len(patch)), (1, 1, *patch))
            grids.append(tuple(size // p for size, p in zip(value.shape[2:], patch, strict=True)))
        return self.values(name) or [self.like.new_zeros((0, channels, *patch))], grids

    def rows_like(self, name: str, width: int, lens: Sequence[int]) -> Tensor:
        """Packs rows of any dtype, as float32. Checks that each sample has as many rows as `lens` says."""
        parts = [self._checked(i, name, width) for i in range(len(self))]
        for i, (part, expected) in enumerate(zip(parts, lens, strict=True)):
            if len(part) != expected:
                raise ArgumentError(f"samples[{i}][{name!r}]: got {len(part)} rows, expected {expected}, one a token")
        return torch.cat(parts).float() if parts else self.like.new_zeros((0, width), dtype=torch.float32)

    def unmasked(
        self,
        name: str,
        lens: list[int],
        *rows: Tensor,
        beside: Sequence[int] | None = None,
        boolean: bool = False,
        leading: bool = False,
    ) -> tuple[Any, ...]:
        """The tokens of each sample that its mask (1, tokens), or (tokens,), keeps, and the rows of these tokens. A
        sample without a mask keeps all. Masks are counted on the CPU: those that come on a device cost a wait.

        beside: the tokens behind these that the mask covers, too, and has to keep. boolean: takes bools alone, as the
        model adds numbers to its scores, which hides nothing. leading: the model takes the first tokens, whichever are
        kept.
        """
        masks = self.values(name)
        if all(mask is None for mask in masks):
            return lens, *rows
        covered = [sum(pair) for pair in zip(lens, beside, strict=True)] if beside else lens
        for i, length in enumerate(covered):
            if boolean and masks[i] is not None and self.tensor(i, name).dtype != torch.bool:
                raise ArgumentError(f"samples[{i}][{name!r}]: got {masks[i].dtype}, expected torch.bool")
            masks[i] = torch.ones(length) if masks[i] is None else self.tensor(i, name).float()
            if (shape := tuple(masks[i].shape)) not in ((1, length), (length,)):
                raise ArgumentError(f"samples[{i}][{name!r}]: got shape {shape}, expected (1, {length})")
        for i, mask in enumerate(masks := on_host(masks)):
            masks[i], others = mask.flatten().split([lens[i], covered[i] - lens[i]])
            if leading and (masks[i].diff() > 0).any():
                raise ArgumentError(f"samples[{i}][{name!r}]: got 1 after 0, expected the padding behind the text")
            if not others.all():
                raise ArgumentError(f"samples[{i}][{name!r}]: got 0 for a token of an image, expected 1")
            if len(other := mask[(mask != 0) & (mask != 1)]):  # as of one that is added to the scores
                raise ArgumentError(f"samples[{i}][{name!r}]: got {other[0]}, expected 1 for a token that counts, or 0")
        kept = torch.cat(masks).nonzero().squeeze(1)
        moved = to_device(kept, self.like.device)
        return [int(mask.sum()) for mask in masks], *(of.index_select(0, moved) for of in rows)

    def row_each(self, name: str, width: int) -> Tensor:
        """One row of each sample, given as (1, width): (samples, width)."""
        packed, counts = self.rows(name, width)
        for i, count in enumerate(counts):
            if count != 1:
                raise ArgumentError(f"samples[{i}][{name!r}]: got {count} rows, expected one")
        return packed

    def one_each(self, name: str) -> Tensor:
        """One number of each sample, given as a number or a tensor with one element: (samples,)."""
        numbers = [value if isinstance(value, Tensor) else torch.tensor(float(value)) for value in self.values(name)]
        for i, number in enumerate(numbers):
            if (count := number.numel()) != 1:
                raise ArgumentError(f"samples[{i}][{name!r}]: got {count} numbers, expected one")
        device = self.like.device
        moved = [to_device(number, device) if number.is_cpu else number.to(device) for number in numbers]
        return torch.cat([number.reshape(1) for number in moved]) if moved else self.like.new_zeros(0)

    def time_each_token(self, name: str, lens: list[int], otherwise: str | None = None) -> list[Tensor]:
        """For each sample a time step for each token, float32 on the CPU, where runs of equal ones are counted; given
        as one for all, or one for each. Those that come on a device cost a wait. otherwise: the argument that is taken
        where a sample has not this one; without both 0."""
        values = self.values(name)
        if otherwise is not None:
            values = [of if value is None else value for value, of in zip(values, self.values(otherwise), strict=True)]
        given = on_host([torch.as_tensor(0.0 if value is None else value).flatten().float() for value in values])
        for i, (time, length) in enumerate(zip(given, lens, strict=True)):
            if time.numel() not in (1, length):
                raise ArgumentError(f"samples[{i}][{name!r}]: got {time.numel()} numbers, expected 1 or {length}")
        return [time.expand(length) for time, length in zip(given, lens, strict=True)]

    def values(self, name: str) -> list[Any]:
        """The arguments of this name as they came; None where a sample has none."""
        return [sample.get(name) for sample in self._samples]

    def expect(self, name: str, needed: bool) -> bool:
        """`needed`. Checks that all samples have the argument where it is, and that none has it where it is not."""
        for i, value in enumerate(self.values(name)):
            if (value is not None) != needed:
                got, expected = ("one", "none") if value is not None else ("none", "one")
                raise ArgumentError(
                    f"samples[{i}][{name!r}]: got {got}, expected {expected}, as the model's config says"
                )
        return needed

    def tensor(self, i: int, name: str) -> Tensor:
        value = self._samples[i].get(name)
        if not isinstance(value, Tensor):
            raise ArgumentError(f"samples[{i}][{name!r}]: got {type(value).__name__}, expected a tensor")
        return value

    def _checked(self, i: int, name: str, *width: int) -> Tensor:
        if name in self._optional and self._samples[i].get(name) is None:
            return self.like.new_zeros((0, *width))
        value = self.tensor(i, name)
        shape = tuple(value.shape)
        if value.ndim == 2 + len(width) and shape[0] == 1:
            value = value[0]
        if value.shape[1:] != width:
            expected = ", ".join(map(str, width))
            raise ArgumentError(f"samples[{i}][{name!r}]: got shape {shape}, expected (1, tokens, {expected})")
        return value


def check_shape(where: str, value: Tensor, shape: tuple[int | str, ...], multiples: tuple[int, ...] = ()) -> None:
    """shape: a text stands for any size. Raises ArgumentError."""
    got = tuple(value.shape)
    fits = len(got) == len(shape) and all(isinstance(n, str) or n == size for n, size in zip(shape, got, strict=True))
    if not fits or any(size < n or size % n for size, n in zip(got, multiples, strict=False)):
        expected = str(shape).replace("'", "") + (f" in multiples of {multiples}" if multiples else "")
        raise ArgumentError(f"{where}: got shape {got}, expected {expected}")


def one_after_another(*streams: tuple[Tensor, Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Packed streams, with the rows of each sample in them -> for each sample its rows of all streams; and how many."""
    parts = zip(*(rows.split(list(lens)) for rows, lens in streams), strict=True)
    lens = [sum(of) for of in zip(*(lens for _, lens in streams), strict=True)]
    return torch.cat([*(rows[:0] for rows, _ in streams), *itertools.chain(*parts)]), lens


def rows_of_context(name: str, tokens: Tensor, lens: list[int], room: int, limit: str) -> list[Tensor]:
    """What tokens cross-attend to travels beside their sequence as one row: (tokens, width) -> (samples, room * width),
    with zeros behind each context; and the contexts' lengths. limit: the room, for the error."""
    for i, length in enumerate(lens):
        if length > room:
            raise ArgumentError(f"samples[{i}][{name!r}]: got {length} tokens, expected at most {limit}")
    rows = tokens.new_zeros((len(lens) * room, tokens.shape[1]))
    rows = rows.index_copy(0, _places_in_rooms(lens, room, tokens.device), tokens)
    # The lengths stay on the CPU, where the host reads them.
    return [rows.reshape(len(lens), room * tokens.shape[1]), torch.tensor(lens, dtype=torch.int64)]


def context_of_rows(rows: Tensor, lens: Tensor, width: int) -> Tensor:
    """The inverse of rows_of_context, for this rank's chunks."""
    room = rows.shape[1] // width
    places = _places_in_rooms(lengths_list(lens), room, rows.device)
    return rows.reshape(len(lens) * room, width).index_select(0, places)


def _places_in_rooms(lens: list[int], room: int, device: torch.device) -> Tensor:
    """(tokens,) int64: where packed tokens lie among rows of `room` tokens a sequence."""
    return to_device(segment_index(lens) * room + positions(lens), device)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype, on the CPU. Those that lie on a device cost one wait together."""
    on_device = [tensor for tensor in tensors if not tensor.is_cpu]
    if not on_device:
        return list(tensors)
    packed = torch.cat([tensor.flatten() for tensor in on_device]).cpu()
    parts = iter(packed.split([tensor.numel() for tensor in on_device]))
    return [tensor if tensor.is_cpu else next(parts).view(tensor.shape) for tensor in tensors]
