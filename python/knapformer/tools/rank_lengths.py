"""Lengths of samples, in tokens, as ranks hold them in a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from knapformer import attention_pairs

Lengths = list[list[int]]  # for each rank the lengths of its sequences, in tokens


class MaskedLength(int):
    """Tokens of a sample that has a mask of its own. It differs from equal lengths with other masks."""

    mask: str

    def __new__(cls, tokens: int, mask: str) -> MaskedLength:
        """Raises ArgumentError for a text that is no mask of so many tokens."""
        attention_pairs(mask, tokens)
        length = super().__new__(cls, tokens)
        length.mask = mask
        return length

    def __eq__(self, other: object) -> bool:
        return int(self) == other and self.mask == getattr(other, "mask", None)

    def __hash__(self) -> int:
        return hash((int(self), self.mask))


def has_masks(lengths: Iterable[Iterable[int]]) -> bool:
    """Whether samples have masks of their own."""
    return any(isinstance(length, MaskedLength) for lens in lengths for length in lens)


def lengths_of_step(batches: Iterable[Lengths]) -> Lengths:
    """For each rank the lengths of all micro-batches, one batch after another."""
    return [[length for lens in of_rank for length in lens] for of_rank in zip(*batches, strict=True)]


def micro_batches_of_step(lengths: Lengths, count: int) -> list[Lengths]:
    """[micro-batch][rank]: each rank's sequences of a step, cut into consecutive parts of nearly equal numbers, the
    larger parts first: the given order with which a whole-step plan compares."""

    def cut(lens: Sequence[int], part: int) -> int:
        size, num_larger = divmod(len(lens), count)
        return part * size + min(part, num_larger)

    return [[list(lens[cut(lens, k) : cut(lens, k + 1)]) for lens in lengths] for k in range(count)]
