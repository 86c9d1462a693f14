"""Rows of packed sequences: segments, two streams, modulation, sums and rotations, against formulas in index form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from knapformer.attention.packed_rows import (
    Rotation,
    Segments,
    TwoStreams,
    gated_add,
    modulate,
    positions,
    rotate,
    rotations,
    segment_index,
    text_flags,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@given(st.lists(st.integers(0, 4), max_size=12))
def test_indices_of_segments(lens: list[int]) -> None:
    assert segment_index(lens).tolist() == [i for i, n in enumerate(lens) for _ in range(n)]
    assert positions(lens).tolist() == [j for n in lens for j in range(n)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6))
def test_two_streams_join_and_split(lens: list[tuple[int, int]]) -> None:
    text_lens, image_lens = [n for n, _ in lens], [n for _, n in lens]
    streams = TwoStreams.of_flags(text_flags(text_lens, image_lens))
    text = torch.arange(sum(text_lens), dtype=torch.float64)[:, None] + 1
    image = -torch.arange(sum(image_lens), dtype=torch.float64)[:, None] - 1
    packed = streams.join(text.requires_grad_(), image.requires_grad_())
    expected: list[float] = []
    t, i = iter(text[:, 0].tolist()), iter(image[:, 0].tolist())
    for num_text, num_image in lens:
        expected += [next(t) for _ in range(num_text)] + [next(i) for _ in range(num_image)]
    assert packed[:, 0].tolist() == expected
    again = TwoStreams.of_flags(packed[:, 0] > 0).split(packed)
    assert torch.equal(again[0], text) and torch.equal(again[1], image)
    if packed.numel():
        assert torch.autograd.gradcheck(streams.join, (text, image))
        assert torch.autograd.gradcheck(streams.split, (packed.detach().requires_grad_(),))


def test_a_stream_left_unused_gets_zero_gradient() -> None:
    packed = torch.randn(5, 2, requires_grad=True)
    _, image = TwoStreams.of_flags(torch.tensor([1, 0, 0, 1, 1])).split(packed)
    image.sum().backward()
    assert packed.grad is not None and packed.grad[:, 0].tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("lens", [[2, 0, 3], [1], [0, 0]])
def test_modulation_by_sequence(lens: list[int]) -> None:
    torch.manual_seed(0)
    index, tokens = segment_index(lens), sum(lens)
    x, y = (torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    a, b = (torch.randn(len(lens), 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    segments = Segments.of_lengths(lens)
    torch.testing.assert_close(modulate(x, a, b, segments), x * (1 + b[index]) + a[index])
    torch.testing.assert_close(modulate(x, None, b, segments), x * (1 + b[index]))
    torch.testing.assert_close(gated_add(x, y, a, segments), x + a[index] * y)
    assert torch.autograd.gradcheck(lambda *t: modulate(*t, segments), (x, a, b))
    assert torch.autograd.gradcheck(lambda *t: modulate(t[0], None, t[1], segments), (x, b))
    assert torch.autograd.gradcheck(lambda *t: gated_add(*t, segments), (x, y, a))


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_modulation_keeps_no_tokens_and_adds_up_nothing(compiled: bool) -> None:
    """As under LoRA, where only layers around it train."""
    x, y = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    shift, scale = torch.randn(2, 2, 3)
    segments, kept = Segments.of_lengths([2, 3]), []

    def block(x: Tensor, y: Tensor) -> Tensor:
        return gated_add(x, modulate(y, shift, scale, segments), scale, segments)

    block = torch.compile(block, backend="eager") if compiled else block  # type: ignore[assignment]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = block(x, y)
    assert all(len(t) != len(x) for t in kept if t.is_floating_point())
    rows = segments.index
    grads = torch.autograd.grad(out.sum(), (x, y))
    torch.testing.assert_close(grads, (torch.ones(5, 3), (scale * (1 + scale))[rows]))


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200)), max_size=8))
def test_sums_by_sequence_are_those_of_numpy_style_slices(lens: list[int]) -> None:
    rows = torch.arange(2 * sum(lens), dtype=torch.float64).view(-1, 2)
    expected = [part.sum(0).tolist() for part in rows.split(lens)] if lens else []
    assert Segments.of_lengths(lens).sum(rows).tolist() == expected


def test_sums_by_sequence_use_no_operation_without_a_fixed_order() -> None:
    """On accelerators index_add_ and its like add atomically, in any order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x, y = (torch.randn(300, 4, requires_grad=True) for _ in range(2))
    a, b = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
    segments = Segments.of_lengths([100, 200])
    with Names():
        gated_add(modulate(x, a, b, segments), y, a, segments).sum().backward()
    unordered = ("index_add", "index_put", "scatter", "bincount", "histc", "put_", "embedding_dense_backward")
    assert "aten::_embedding_bag_forward_only" in seen
    assert not [name for name in seen if any(word in name for word in unordered)]


def test_gradients_of_rows_add_up_in_float32() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    x = torch.ones(1000, 1, dtype=torch.bfloat16)
    shift = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    modulate(x, shift, torch.zeros_like(shift), Segments.of_lengths([1000])).sum().backward()
    assert shift.grad is not None and shift.grad.item() == 1000


def test_the_graph_of_a_rotation_keeps_no_heads() -> None:
    x = torch.randn(5, 3, 8, requires_grad=True)
    rotation = rotations(torch.arange(5), 8, 100.0, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        rotate(x, rotation)
    assert [t.data_ptr() for t in kept] == [rotation.turns.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_rotation_takes_heads_of_any_strides_and_rounds_once(dtype: torch.dtype) -> None:
    """Here at odd places of wider rows. float64 is rotated in float64."""
    x = torch.randn(5, 25).to(dtype)[:, 1:].unflatten(1, (3, 8))
    rotation = rotations(torch.arange(1000, 1005), 8, 100.0, dtype)
    assert rotation.turns.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    a, b = x.double().unflatten(-1, (4, 2)).unbind(-1)
    cos, sin = rotation.turns.double().unbind(-1)
    expected = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    out = rotate(x, rotation)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_angles_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="rotation: got angles of 1 tokens, expected 5, as x has"):
        rotate(torch.zeros(5, 3, 8), Rotation(torch.zeros(1, 1, 4, 2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_compiled_rotation_is_real_and_the_same(dtype: torch.dtype) -> None:
    """Inductor fuses nothing with complex numbers: a rotation of them would read and write ten times the bytes."""
    seen: list[torch.dtype] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        seen.extend(n.meta["example_value"].dtype for n in graph.graph.nodes if "example_value" in n.meta
                    if isinstance(n.meta["example_value"], torch.Tensor))  # fmt: skip
        return graph.forward

    x = torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
    rotation = rotations(torch.arange(5), 8, 100.0, dtype)
    out = torch.compile(rotate, backend=backend)(x, rotation)
    expected = rotate(x, rotation)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (out, expected)))
    assert seen and not any(t.is_complex for t in seen)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate(x * self.weight, rotation)


def rotated_under_mixed_precision(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """By FSDP in bfloat16, and by hand in float32 of the same heads."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = fully_shard(Rotated(), mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
    x, rotation = torch.randn(5, 3, 8).bfloat16(), rotations(torch.arange(1000, 1005), 8, 100.0, torch.float32)
    return module(x, rotation).detach(), rotate(x.float(), rotation)


def test_mixed_precision_leaves_angles_in_float32() -> None:
    ((out, expected),) = run_ranks(rotated_under_mixed_precision, 1)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.bfloat16())
