"""Rows of packed sequences: lengths, the row movements that the models need, and rotary positions.

Packed means without padding: the tokens of all sequences one after another, (tokens, ...), and a list of lengths.
Every index here is computed once a step; a layer only uses it. Each operation's gradient is its mirror image. It is
written out because torch's gradient of an index is slower, adds up in the gradient's dtype, and keeps expanded copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from knapformer import ArgumentError

Lengths = Sequence[int] | Tensor


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copies a CPU tensor to `device` (None: the CPU). The host does not wait: an accelerator reads pinned memory, and
    torch keeps this memory until then. A "non-blocking" copy from any other memory blocks."""
    if device is None or device.type in ("cpu", "meta"):
        return tensor if device is None else tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def lengths_list(lens: Lengths) -> list[int]:
    """Lengths as plain integers. A tensor should live on the CPU: elsewhere this waits for its device. ArgumentError
    where it is not dense, or on meta."""
    if not isinstance(lens, Tensor):
        return list(lens)
    if lens.layout != torch.strided or lens.is_meta:
        got = f"a tensor of layout {lens.layout} on {lens.device.type}"
        raise ArgumentError(f"seq_lens: got {got}, expected a dense tensor that has its values")
    return cast("list[int]", lens.tolist())


def segment_index(lens: Lengths) -> Tensor:
    """(tokens,) int64 on the CPU: the sequence that each token belongs to."""
    return torch.repeat_interleave(torch.as_tensor(lengths_list(lens), dtype=torch.int64))


def positions(lens: Lengths, device: torch.device | None = None) -> Tensor:
    """(tokens,) int64: each token's place in its own sequence."""
    counts = torch.as_tensor(lengths_list(lens), dtype=torch.int64)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return to_device(torch.arange(starts.numel()) - starts, device)


@dataclass(frozen=True)
class Segments:
    """Which sequence each packed row belongs to, and how rows are added up by sequence.

    A sum has a fixed order, so that it is the same number each time, on every device: first over pieces of at most
    `_PIECE_ROWS` neighbouring rows, then over the pieces of each sequence. (Atomic additions, as index_add_ makes them
    on accelerators, come in any order, and rows of one long sequence wait for each other.)

    rows      0 0 0 0 0 1 1 3 3 3     index
    pieces   |- - - -|-|- -|-|- -|    cut every so many rows (here 4), and where sequences begin
    """

    index: Tensor  # (rows,) int64, ascending: the sequence of each
    _places: Tensor  # int64: 0, 1, 2, ..., as many as rows or pieces, whichever are more
    _first_rows: Tensor  # (pieces,) int64: where pieces begin
    _first_pieces: Tensor  # (sequences,) int64: where the pieces of sequences begin

    @staticmethod
    def of_lengths(lens: Lengths, device: torch.device | None = None) -> Segments:
        """Computed on the host, one copy to `device`."""
        lengths = torch.as_tensor(lengths_list(lens), dtype=torch.int64)
        index = segment_index(lens)
        starts = lengths.cumsum(0) - lengths
        first_rows = torch.cat([torch.arange(0, index.numel(), _PIECE_ROWS), starts]).sort().values
        places = torch.arange(max(index.numel(), len(first_rows)))
        parts = (index, places, first_rows, torch.searchsorted(first_rows, starts))
        return Segments(*to_device(torch.cat(parts), device).split([len(part) for part in parts]))

    def sum(self, rows: Tensor) -> Tensor:
        """(rows, d) -> (sequences, d), added up in float32 or better."""
        if 0 in (len(rows), len(self._first_pieces)):
            return rows.new_zeros((len(self._first_pieces), *rows.shape[1:]))
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return self._sums(self._sums(wide, self._first_rows), self._first_pieces).to(rows.dtype)

    def _sums(self, rows: Tensor, firsts: Tensor) -> Tensor:
        """Sums of the rows from each of `firsts` up to the next, in order. torch calls such rows a bag."""
        return torch.embedding_bag(rows, self._places[: len(rows)], firsts)[0]


_PIECE_ROWS = 64


def runs_of(values: Tensor, device: torch.device) -> tuple[Tensor, Segments]:
    """Where neighbouring tokens have the same row of modulation: what each such run of tokens has in common, and the
    run of each token; on the device. values (tokens,) on the CPU."""
    of_runs, counts = torch.unique_consecutive(values, return_counts=True)
    return to_device(of_runs, device), Segments.of_lengths(counts, device)


def rows_of_runs(
    table: Tensor, lens: Lengths, row_of_token: Tensor, only: Tensor | slice = slice(None)
) -> tuple[Tensor, Segments]:
    """As runs_of, where tokens of a sample have one of several rows. table (samples or chunks, their rows, ...); lens:
    tokens of each; row_of_token (tokens,) on the CPU: which of the rows. only: flags of tokens that are meant."""
    rows = table.shape[1] * segment_index(lens) + row_of_token
    of_runs, of_token = runs_of(rows[only], table.device)
    return table.flatten(0, 1).index_select(0, of_runs), of_token


def text_flags(text_lens: Sequence[int], image_lens: Sequence[int]) -> Tensor:
    """(tokens,) bool on the CPU: which are text, of samples laid out [text; image], one after another."""
    counts = torch.tensor([text_lens, image_lens], dtype=torch.int64).t().reshape(-1)
    return torch.repeat_interleave(torch.tensor([True, False]).repeat(len(text_lens)), counts)


@dataclass(frozen=True)
class TwoStreams:
    """Where the rows of two streams, text and image, lie in one packed tensor.

    packed   T T I I I T I I          text_rows   0 1 5
                                      image_rows  2 3 4 6 7
    """

    text_rows: Tensor  # int64, ascending
    image_rows: Tensor  # int64, ascending

    @staticmethod
    def of_flags(is_text: Tensor, device: torch.device | None = None) -> TwoStreams:
        """From one flag per packed row. The flags should live on the CPU: elsewhere the host waits for their device."""
        flags = is_text.bool()
        text_rows, image_rows = (rows.nonzero().squeeze(1) for rows in (flags, ~flags))
        if device is None or device == flags.device:
            return TwoStreams(text_rows, image_rows)
        moved = to_device(torch.cat([text_rows, image_rows]), device)
        return TwoStreams(*moved.split([len(text_rows), len(image_rows)]))

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """(text rows, ...), (image rows, ...) -> (rows, ...)."""
        return cast(Tensor, _Join.apply(text, image, self))  # type: ignore[no-untyped-call]

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, ...) -> (text rows, ...), (image rows, ...)."""
        return cast("tuple[Tensor, Tensor]", _Split.apply(packed, self))  # type: ignore[no-untyped-call]


def _joined(text: Tensor, image: Tensor, streams: TwoStreams) -> Tensor:
    num_rows = streams.text_rows.numel() + streams.image_rows.numel()
    packed = image.new_empty((num_rows, *image.shape[1:]))
    # Not index_copy_: the compiler of torch 2.11 drops the gradient of what an in-place method returns.
    packed[streams.text_rows] = text
    packed[streams.image_rows] = image
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


class _AddScaled(torch.autograd.Function):
    """base + x * factor, with a row of factor per sequence, and of base a row per sequence or per token. None: 0."""

    @staticmethod
    def forward(
        ctx: Any, base: Tensor | None, x: Tensor, factor: Tensor, segments: Segments, base_is_of_token: bool
    ) -> Tensor:
        # x is kept for the factor's gradient alone: a frozen one, as under LoRA, has none.
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, factor)
        ctx.segments, ctx.base_is_of_token = segments, base_is_of_token
        factors = factor.index_select(0, segments.index)
        if base is None:
            return x * factors
        return torch.addcmul(base if base_is_of_token else base.index_select(0, segments.index), x, factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, factor), segments = ctx.saved_tensors, ctx.segments
        of_base, of_x, of_factor, *_ = ctx.needs_input_grad
        return (
            (grad if ctx.base_is_of_token else segments.sum(grad)) if of_base else None,
            grad * factor.index_select(0, segments.index) if of_x else None,
            segments.sum(grad * x) if of_factor else None,
            None,
            None,
        )


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor, segments: Segments) -> Tensor:
    """x * (1 + scale) + shift, with a row of shift and scale per sequence.

    x (tokens, d); shift, scale (sequences, d); shift None: 0.
    """
    return cast(Tensor, _AddScaled.apply(shift, x, 1 + scale, segments, False))  # type: ignore[no-untyped-call]


def gated_add(x: Tensor, update: Tensor, gate: Tensor, segments: Segments) -> Tensor:
    """x + gate * update, with a row of gate per sequence. Shapes as in modulate."""
    return cast(Tensor, _AddScaled.apply(x, update, gate, segments, True))  # type: ignore[no-untyped-call]


class Rotation:
    """Rotary position embedding (RoPE): the angles by which the heads of packed tokens are rotated.

    turns (tokens, 1, head_dim / 2, 2), float32 or float64: cosine and sine of the angle of each pair of features.

    It is no tensor and no dataclass: FSDP's mixed precision casts those down where they are arguments of a module.
    """

    def __init__(self, turns: Tensor) -> None:
        self.turns = turns


def rotations(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """To be computed once a step. Features (0, 1), (2, 3), ... are the pairs.

    positions (tokens,) integers; head_dim: features of a head, even; float32, or float64 where `dtype` is that.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = (positions[:, None].to(torch.float64) * theta**-exponents).unsqueeze(1)
    return Rotation(torch.stack([angle.cos(), angle.sin()], -1).to(torch.promote_types(dtype, torch.float32)))


def rotation_of(rows: Tensor, dtype: torch.dtype) -> Rotation:
    """The Rotation of these rows, for heads of `dtype`: what is rotated in float64 is not rounded to float32."""
    dtype = torch.promote_types(torch.promote_types(rows.dtype, dtype), torch.float32)
    return Rotation(rows.to(dtype).contiguous().unsqueeze(1))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """(tokens, heads, head_dim) rotated in the dtype of `rotation`, returned in the dtype of x."""
    turns, pairs = rotation.turns, x.to(rotation.turns.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # Inductor fuses real arithmetic with the operations beside it
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    elif len(turns) != len(x):  # one would be taken for all
        raise ValueError(f"rotation: got angles of {len(turns)} tokens, expected {len(x)}, as x has")
    else:
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(turns))
    return out.flatten(-2).to(x.dtype)
