"""Attention over packed sequences, against formulas written out in index form."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from knapformer.attention import kernels
from knapformer.attention.kernels import PackedAttention, pairing_of, varlen_attention
from knapformer.models.packed_step import PackedStep
from masks import dense_attention, packed_mask
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def packed_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: list[int], mask: str) -> Tensor:
    return dense_attention(q, k, v, packed_mask(seq_lens, [mask] * len(seq_lens)))


@pytest.mark.parametrize("lens", [[3, 5], torch.tensor([3, 5])], ids=["list", "tensor"])
def test_lengths_that_were_written_into_are_read_again(lens: Any) -> None:
    attend = PackedAttention()
    q, k, v = torch.randn(3, 8, 2, 4)
    for own in ([3, 5], [5, 3]):
        lens[:] = own if isinstance(lens, list) else torch.tensor(own)
        assert torch.equal(attend(q, k, v, lens), varlen_attention(q, k, v, own))
    with torch.inference_mode():
        made_there = torch.tensor([2, 6])
        assert torch.equal(attend(q, k, v, made_there), varlen_attention(q, k, v, [2, 6]))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("seq_lens", [[5], [3, 3, 3], [1, 7, 0, 2, 2, 9], [0, 0, 4]])
def test_varlen_attention_is_masked_attention(seq_lens: list[int], num_kv_heads: int, mask: str) -> None:
    torch.manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    inputs = [torch.randn(sum(seq_lens), n, 8, dtype=torch.float64, requires_grad=True) for n in heads]
    out, expected = varlen_attention(*inputs, seq_lens, mask), packed_attention(*inputs, seq_lens, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(out)
    for grad, wanted in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_parts_of_queries_attend_as_all_of_them_do(num_kv_heads: int, mask: str) -> None:
    """Of sequences of 700, 5 and 40 tokens the queries from 30, 5 and 0 on: more than a block, none, all."""
    torch.manual_seed(0)
    lens, firsts = [700, 5, 40], [30, 5, 0]
    heads = (4, num_kv_heads, num_kv_heads)
    inputs = [torch.randn(sum(lens), n, 8, dtype=torch.float64, requires_grad=True) for n in heads]
    kept = torch.cat([torch.arange(n) >= first for n, first in zip(lens, firsts, strict=True)])
    queries = [n - first for n, first in zip(lens, firsts, strict=True)]
    out = PackedAttention(mask)(inputs[0][kept], *inputs[1:], queries, lens, firsts)
    expected = packed_attention(*inputs, lens, mask)[kept]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(out)
    got, wanted = (torch.autograd.grad((o * weight).sum(), inputs) for o in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    if mask == "causal":
        with pytest.raises(ValueError, match="query_starts: got \\[0, 5, 0\\], expected \\[30, 5, 0\\]"):
            PackedAttention(mask)(inputs[0][kept], *inputs[1:], queries, lens, [0, 5, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_keys_that_come_in_stages_are_attended_to_as_all_at_once(num_kv_heads: int, dtype: torch.dtype) -> None:
    """Some sequences without queries, one without keys in the first stage."""
    torch.manual_seed(0)
    queries, keys = [5, 0, 7, 1], [9, 4, 7, 2]
    q = torch.randn(sum(queries), 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(keys), num_kv_heads, 8, dtype=dtype, requires_grad=True) for _ in range(2))

    def stages() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for stage in range(3):
            slices = [slice(n * stage // 3, n * (stage + 1) // 3) for n in keys]
            of_k, of_v = ([t[s] for t, s in zip(of.split(keys), slices, strict=True)] for of in (k, v))
            yield torch.cat(of_k), torch.cat(of_v), torch.tensor([len(t) for t in of_k])

    come, attend = stages(), PackedAttention()
    out = attend.in_stages(q, queries, lambda: next(come, None))
    expected = attend(q, k, v, queries, keys, [0] * 4)
    weight = torch.randn_like(out)
    got, wanted = ([o, *torch.autograd.grad((o * weight).sum(), (q, k, v))] for o in (out, expected))
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_attention_without_tokens_keeps_every_input_in_the_graph() -> None:
    q, k, v = (torch.empty(0, n, width, requires_grad=True) for n, width in ((4, 4), (2, 4), (2, 6)))
    out = varlen_attention(q, k, v, [])
    assert out.shape == (0, 4, 6)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("lens", [[2, 3], [0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_in_the_dtype_of_autocast(lens: list[int], dtype: torch.dtype) -> None:
    """As torch's own, which leaves float64 alone; also where nothing is attended to. Norms under autocast give queries
    and keys in float32."""
    q, k, v = (torch.randn(sum(lens), 2, 4, dtype=dtype) for _ in range(3))
    expected = torch.float64 if dtype == torch.float64 else torch.bfloat16
    seen: list[torch.dtype] = []

    def record(q: Tensor, k: Tensor, v: Tensor, seq_lens: Any) -> Tensor:
        seen.extend(tensor.dtype for tensor in (q, k, v))
        return q

    with torch.autocast("cpu", torch.bfloat16):
        whole = varlen_attention(q, k, v, lens)
        assert whole.dtype == pairing_of(lens, lens).attend(q, k, v).dtype == expected
        PackedStep(lens, 8).attention(q, k, v, record)  # before the exchange, which then moves no wider numbers
    assert seen == [expected] * 3
    torch.testing.assert_close(whole, varlen_attention(*(t.to(expected) for t in (q, k, v)), lens))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_sequence_an_accelerator_gets_as_many_keys_as_queries(device: str) -> None:
    """For grouped heads in float32 CUDA has no kernel but the one that keeps all scores."""

    class Heads(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                seen.append((args[1].shape[1], args[2].shape[1], kwargs["enable_gqa"]))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[int, int, bool]] = []
    q, k, v = (torch.ones(5, num_heads, 4, device=device) for num_heads in (6, 2, 2))
    with Heads():
        assert varlen_attention(q, k, v, [2, 3]).shape == q.shape
    assert seen == 2 * [(2, 2, True) if device == "cpu" else (6, 6, False)]


def test_attention_names_wrong_lengths() -> None:
    x = torch.randn(5, 2, 4)
    with pytest.raises(ValueError, match=r"got shapes \(5, 2, 4\) and \(5, 2, 4\), expected .*, 4 and 4 rows"):
        varlen_attention(x, x, x, [1, 3])
    for mask in ("full", "causal", "window:2:0"):
        with pytest.raises(ValueError, match=r"got .*5, 8.*, expected .*"):  # heads that were not split
            varlen_attention(*(x.flatten(1),) * 3, [2, 3], mask)


def test_queries_without_keys_get_zeros_as_wide_as_values() -> None:
    q, k, v = (torch.randn(rows, 2, width) for rows, width in ((5, 4), (3, 4), (3, 6)))
    out = pairing_of([2, 3], [0, 3]).attend(q, k, v)
    assert torch.equal(out[:2], torch.zeros(2, 2, 6)) and out[2:].abs().min() > 0


class VarlenKernel:
    """Stands for torch's variable-length attention, on the CPU: one softmax over all pairs of a sequence."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.offsets: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *lens: int) -> Tensor:
        self.num_calls += 1
        self.offsets.append(ends_q.data_ptr())
        sequences, tokens = torch.arange(len(ends_q) - 1), (len(q), len(k))
        of_q, of_k = (
            sequences.repeat_interleave(ends.diff(), output_size=n)
            for ends, n in zip((ends_q, ends_k), tokens, strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q, k).float() / math.sqrt(q.shape[2])
        weights = scores.masked_fill(of_q[:, None] != of_k[None], -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[VarlenKernel]:
    """As on a device that has the kernel and has not been asked yet."""
    kernel = VarlenKernel()
    monkeypatch.setattr(kernels, "varlen_attn", kernel)
    monkeypatch.setattr(kernels, "_WITHOUT_KERNEL", [])
    monkeypatch.setattr(kernels, "_TAKES_GROUPED_HEADS", False)
    for cached in (kernels._kernel_runs, kernels._pairing):
        cached.cache_clear()
    yield kernel
    for cached in (kernels._kernel_runs, kernels._pairing):
        cached.cache_clear()


def _keep_products():  # type: ignore[no-untyped-def]
    """A user's policy that keeps what the kernel is made of."""
    keep = (torch.ops.aten.bmm.default, torch.ops.aten._softmax.default)
    return create_selective_checkpoint_contexts(
        lambda context, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


@pytest.mark.parametrize("how", ["checkpoint", "selective", "reentrant"])
@pytest.mark.parametrize("cross", [False, True])
def test_the_kernel_is_tried_outside_of_what_a_checkpoint_saves(kernel: VarlenKernel, how: str, cross: bool) -> None:
    """The first block of a training run, as a GPU would see it: not yet known whether there is a kernel."""
    torch.manual_seed(0)
    lens, options = [3, 4], {}
    if how == "selective":
        options = {"context_fn": _keep_products}
    attend = pairing_of(lens, lens).attend if cross else (lambda q, k, v: varlen_attention(q, k, v, lens))

    def block(x: Tensor) -> Tensor:
        q = x.unflatten(1, (2, 4))
        return attend(q.sin(), q.cos(), q.exp()).flatten(1)

    x = torch.randn(7, 8, dtype=torch.bfloat16, requires_grad=True)
    checkpoint(block, x, use_reentrant=how == "reentrant", **options).sum().backward()
    got, x.grad = x.grad, None
    block(x).sum().backward()
    assert kernel.num_calls == 4  # tried; forward, recomputed; once more without a checkpoint
    assert torch.equal(got, x.grad)


def test_the_kernel_is_found_in_inference_and_used_in_training_after_it(kernel: VarlenKernel) -> None:
    x = torch.randn(5, 2, 4, dtype=torch.bfloat16)
    with torch.inference_mode():
        varlen_attention(x, x, x, [2, 3])
    varlen_attention(x.requires_grad_(), x, x, [2, 3]).sum().backward()
    assert kernel.num_calls == 3


def test_running_out_of_memory_is_not_taken_for_a_missing_kernel(
    kernel: VarlenKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 2 MiB")

    x = torch.randn(5, 2, 4, dtype=torch.bfloat16)
    with monkeypatch.context() as full:
        full.setattr(kernels, "varlen_attn", too_large)
        with pytest.raises(torch.OutOfMemoryError):
            varlen_attention(x, x, x, [2, 3])
    varlen_attention(x, x, x, [2, 3])
    assert kernel.num_calls == 2  # tried, and used


def test_a_kernel_that_does_not_run_is_named_once(kernel: VarlenKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no kernel image is available\nfor long reasons")

    monkeypatch.setattr(kernels, "varlen_attn", refuse)
    x = torch.randn(5, 2, 4, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="bfloat16 .* on cpu: no kernel image is available; .* one by one"):
        out = varlen_attention(x, x, x, [2, 3])
    torch.testing.assert_close(out.float(), packed_attention(*3 * [x.float()], [2, 3], "full"), rtol=0.02, atol=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlen_attention(x, x, x, [2, 3])


def test_offsets_are_made_once_for_equal_lengths(kernel: VarlenKernel) -> None:
    x = torch.randn(5, 2, 4, dtype=torch.bfloat16)
    for _ in range(3):
        varlen_attention(x, x, x, [2, 3])
        varlen_attention(x, x, x, torch.tensor([2, 3]))
    assert len(kernel.offsets) == 7 and len(set(kernel.offsets[1:])) == 1
    # A list that has changed is not taken for what it was.
    lens = [2, 3]
    varlen_attention(x, x, x, lens)
    lens[:] = [1, 4]
    expected = packed_attention(*3 * [x.float()], lens, "full")
    torch.testing.assert_close(varlen_attention(x, x, x, lens).float(), expected, rtol=0.02, atol=0.02)


def test_without_heads_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.11 for the CPU divides by their number, and ends the process."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    q, k, v = (torch.zeros(5, 0, width, requires_grad=True) for width in (4, 4, 6))
    out = varlen_attention(q, k, v, [3, 2])
    out.sum().backward()
    assert out.shape == (5, 0, 6) and all(t.grad is not None for t in (q, k, v))
