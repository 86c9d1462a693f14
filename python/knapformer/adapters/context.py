"""What tokens cross-attend to travels beside their sequence: one row a sample, with room for so many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.device_copies import to_device
from knapformer.models.packing import lengths_list, positions, segment_index


def rows_of_context(name: str, tokens: Tensor, lens: list[int], room: int, limit: str) -> list[Tensor]:
    """(tokens, width) -> (samples, room * width) with zeros behind each context; and the contexts' lengths. limit: the
    room, for the error."""
    for i, length in enumerate(lens):
        if length > room:
            raise ArgumentError(f"samples[{i}][{name!r}]: got {length} tokens, expected at most {limit}")
    rows = tokens.new_zeros((len(lens) * room, tokens.shape[1]))
    rows = rows.index_copy(0, _places(lens, room, tokens.device), tokens)
    # The lengths stay on the CPU, where the host reads them.
    return [rows.reshape(len(lens), room * tokens.shape[1]), torch.tensor(lens, dtype=torch.int64)]


def context_of_rows(rows: Tensor, lens: Tensor, width: int) -> Tensor:
    """The inverse of rows_of_context, for this rank's chunks."""
    room = rows.shape[1] // width
    places = _places(lengths_list(lens), room, rows.device)
    return rows.reshape(len(lens) * room, width).index_select(0, places)


def _places(lens: list[int], room: int, device: torch.device) -> Tensor:
    """(tokens,) int64: where packed tokens lie among rows of `room` tokens a sequence."""
    return to_device(segment_index(lens) * room + positions(lens), device)
