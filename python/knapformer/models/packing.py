"""Rows of packed sequences: lengths, and the row movements that the models need.

Packed means without padding: the tokens of all sequences one after another, (tokens, ...), and a list of lengths.
Every index here is computed once a step; a layer only uses it. Each operation's gradient is its mirror image, written
out because the generic one of an index is slower, adds up in the dtype of the gradient, and keeps expanded copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor


def lengths_list(lens: Lengths) -> list[int]:
    """Lengths as plain integers. A tensor should live on the CPU: elsewhere this waits for its device."""
    return cast("list[int]", lens.tolist()) if isinstance(lens, Tensor) else list(lens)


def check_num_lengths(name: str, lens: Sequence[int], expected: int, like: str) -> None:
    """Raises ValueError where a batch's second list of lengths is not as long as its first, `like`."""
    if len(lens) != expected:
        raise ValueError(f"{name}: got {len(lens)} lengths, expected {expected}, as in {like}")


def check_num_rows(**rows: tuple[Tensor | None, int]) -> None:
    """Of a batch's tensors with the rows that its lengths ask for: raises ValueError where one has other rows."""
    for name, (tensor, expected) in rows.items():
        if tensor is not None and tensor.shape[0] != expected:
            raise ValueError(f"{name}: got {tensor.shape[0]} rows, expected {expected}, as the lengths say")


def segment_index(lens: Lengths, device: torch.device | None = None) -> Tensor:
    """(tokens,) int64: the sequence that each token belongs to. Computed on the host, one copy to `device`."""
    index = torch.repeat_interleave(torch.as_tensor(lengths_list(lens), dtype=torch.int64))
    return index.to(device, non_blocking=True) if device is not None else index


def positions(lens: Lengths, device: torch.device | None = None) -> Tensor:
    """(tokens,) int64: each token's place in its own sequence."""
    counts = torch.as_tensor(lengths_list(lens), dtype=torch.int64)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    index = torch.arange(starts.numel()) - starts
    return index.to(device, non_blocking=True) if device is not None else index


@dataclass(frozen=True)
class TwoStreams:
    """Where the rows of two streams, text and image, lie in one packed tensor.

    packed   T T I I I T I I          text_rows   0 1 5
                                      image_rows  2 3 4 6 7
    """

    text_rows: Tensor  # int64, ascending
    image_rows: Tensor  # int64, ascending

    @staticmethod
    def of_lengths(text_lens: Sequence[int], image_lens: Sequence[int], device: torch.device) -> TwoStreams:
        """Of samples laid out [text; image], one after another."""
        counts = torch.tensor([text_lens, image_lens], dtype=torch.int64).t().reshape(-1)
        kinds = torch.tensor([True, False]).repeat(len(text_lens))
        return TwoStreams.of_flags(torch.repeat_interleave(kinds, counts), device)

    @staticmethod
    def of_flags(is_text: Tensor, device: torch.device | None = None) -> TwoStreams:
        """Of one flag per packed row. Counting the flags makes the host wait for their device: once a step."""
        flags = is_text.bool()
        return TwoStreams(*(rows.nonzero().squeeze(1).to(device or flags.device) for rows in (flags, ~flags)))

    @property
    def num_rows(self) -> int:
        return self.text_rows.numel() + self.image_rows.numel()

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """(text rows, ...), (image rows, ...) -> (rows, ...)."""
        return cast(Tensor, _Join.apply(text, image, self))  # type: ignore[no-untyped-call]

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, ...) -> (text rows, ...), (image rows, ...)."""
        return cast("tuple[Tensor, Tensor]", _Split.apply(packed, self))  # type: ignore[no-untyped-call]


def _joined(text: Tensor, image: Tensor, streams: TwoStreams) -> Tensor:
    packed = image.new_empty((streams.num_rows, *image.shape[1:]))
    packed.index_copy_(0, streams.text_rows, text)
    packed.index_copy_(0, streams.image_rows, image)
    return packed


def _splitted(packed: Tensor, streams: TwoStreams) -> tuple[Tensor, Tensor]:
    return packed.index_select(0, streams.text_rows), packed.index_select(0, streams.image_rows)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: Tensor, image: Tensor, streams: TwoStreams) -> Tensor:
        ctx.streams = streams
        return _joined(text, image, streams)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*_splitted(grad, ctx.streams), None)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, streams: TwoStreams) -> tuple[Tensor, Tensor]:
        ctx.streams = streams
        return _splitted(packed, streams)

    @staticmethod
    def backward(ctx: Any, grad_text: Tensor, grad_image: Tensor) -> tuple[Tensor, None]:
        return _joined(grad_text, grad_image, ctx.streams), None


def _sum_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Rows added up by index, (tokens, d) -> (num_rows, d), in float32 or better."""
    total = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros((num_rows, *rows.shape[1:]), dtype=total, device=rows.device)
    return out.index_add_(0, index, rows.to(total)).to(rows.dtype)


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, index)
        return torch.addcmul(shift.index_select(0, index), x, (1 + scale).index_select(0, index))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale, index = ctx.saved_tensors
        grad_x = grad * (1 + scale).index_select(0, index)
        return grad_x, _sum_rows(grad, index, len(scale)), _sum_rows(grad * x, index, len(scale)), None


class _GatedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(update, gate, index)
        return torch.addcmul(x, update, gate.index_select(0, index))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        update, gate, index = ctx.saved_tensors
        return grad, grad * gate.index_select(0, index), _sum_rows(grad * update, index, len(gate)), None


def modulate(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    """x * (1 + scale) + shift, with a row of shift and scale per sequence.

    x (tokens, d); shift, scale (sequences, d); index (tokens,) is segment_index.
    """
    return cast(Tensor, _Modulate.apply(x, shift, scale, index))  # type: ignore[no-untyped-call]


def gated_add(x: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """x + gate * update, with a row of gate per sequence. Shapes as in modulate."""
    return cast(Tensor, _GatedAdd.apply(x, update, gate, index))  # type: ignore[no-untyped-call]
