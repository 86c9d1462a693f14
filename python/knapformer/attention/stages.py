"""Attention to keys that come in stages: each is attended to while the next one travels, and results are merged by
their log-sum-exps (Milakov and Gimelshein, 2018). In the backward pass each stage computes the gradients of its own
keys from the merged output, as if that had been computed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from knapformer.attention.inputs import as_autocast


def attend_in_stages(q: Tensor, stages: Iterable[tuple[Any, Tensor, Tensor]]) -> Tensor:
    """Full attention to the keys of all stages, each (lens, k, v). lens: of queries and keys; as in `Pairing.lens` on a
    CPU, as `Pairing.offsets_on` gives them on CUDA."""
    (q,) = as_autocast(q)
    merged, o, log_sum_exp = _Merged(), None, None
    for lens, k, v in stages:
        o, log_sum_exp = _Stage.apply(merged, lens, q, *as_autocast(k, v), o, log_sum_exp)  # type: ignore[no-untyped-call]
    out: Tensor = _End.apply(merged, o, log_sum_exp, q.dtype)  # type: ignore[no-untyped-call]
    return out


class _Merged:
    """The whole output and its log-sum-exp, while a backward pass goes through the stages."""

    o: Tensor
    log_sum_exp: Tensor


class _Stage(torch.autograd.Function):
    """One stage, merged with those before. In the backward pass the gradient of the whole output comes to it."""

    @staticmethod
    def forward(
        ctx: Any, merged: _Merged, lens: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.merged, ctx.lens, ctx.is_first = merged, lens, o is None
        own, own_lse, *of_kernel = (_on_cuda if q.is_cuda else _on_cpu)(lens, q, k, v)
        ctx.save_for_backward(q, k, v, *of_kernel)
        own = own.to(own_lse.dtype)
        if o is not None and lse is not None:
            both = torch.logaddexp(lse, own_lse)
            # Of a query that has seen no key yet, both are -inf.
            parts = [torch.exp(of - both).nan_to_num().unsqueeze(-1) for of in (lse, own_lse)]
            own, own_lse = o * parts[0] + own * parts[1], both
        ctx.mark_non_differentiable(own_lse)
        return own, own_lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, *of_kernel = ctx.saved_tensors
        gradients_of = _gradients_on_cuda if q.is_cuda else _gradients_on_cpu
        gradients = gradients_of(ctx.lens, grad.to(q.dtype), q, k, v, ctx.merged.o, ctx.merged.log_sum_exp, *of_kernel)
        return None, None, *gradients, None if ctx.is_first else grad, None


class _End(torch.autograd.Function):
    """Keeps the whole output, for the backward pass of all stages."""

    @staticmethod
    def forward(ctx: Any, merged: _Merged, o: Tensor, log_sum_exp: Tensor, dtype: torch.dtype) -> Tensor:
        out = o.to(dtype, copy=True)
        ctx.merged = merged
        ctx.save_for_backward(out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.merged.o, ctx.merged.log_sum_exp = ctx.saved_tensors
        return None, grad, None, None


def _on_cuda(lens: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The output, the log-sum-exp of each query and head, and what the kernel's backward wants."""
    o, log_sum_exp, seed, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *lens, 0.0, False, False)
    # The kernel writes +inf for queries without keys.
    return o, log_sum_exp.masked_fill(log_sum_exp.isposinf(), -torch.inf).transpose(0, 1), seed, unused


def _gradients_on_cuda(
    lens: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum_exp: Tensor, *of_kernel: Tensor
) -> tuple[Tensor, ...]:
    of_heads = log_sum_exp.transpose(0, 1).contiguous()
    kernel: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_backward
    return kernel(grad, q, k, v, o, of_heads, *lens, 0.0, False, *of_kernel)


def _on_cpu(lens: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kernel: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    wide, outs = torch.promote_types(q.dtype, torch.float32), []
    for own in _heads_of_sequences(lens, q.shape[1], (q, 0), (k, 1), (v, 1)):
        none = own[0].new_full(own[0].shape[:3], -torch.inf, dtype=wide)
        outs.append(kernel(*own) if own[0].numel() * own[1].numel() > 0 else (torch.zeros_like(own[0]), none))
    o, log_sum_exp = (_packed(list(of)) for of in zip(*outs, strict=True))
    return o, log_sum_exp


def _gradients_on_cpu(
    lens: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, ...]:
    kernel: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors, outs = ((grad, 0), (q, 0), (k, 1), (v, 1), (o, 0), (log_sum_exp, 0)), []
    for own in _heads_of_sequences(lens, q.shape[1], *tensors):
        attends = own[1].numel() * own[2].numel() > 0
        outs.append(kernel(*own, 0.0, False) if attends else [torch.zeros_like(of) for of in own[1:4]])
    of_heads = (_packed(list(of)) for of in zip(*outs, strict=True))
    # Grouped heads of keys and values were repeated.
    return tuple(
        of if of.shape == like.shape else of.unflatten(1, (like.shape[1], -1)).sum(2)
        for of, like in zip(of_heads, (q, k, v), strict=True)
    )


def _heads_of_sequences(lens: Any, num_heads: int, *tensors: tuple[Tensor, int]) -> Iterator[tuple[Tensor, ...]]:
    """Of each sequence, (1, num_heads, rows, ...) of the tensors, which have rows of queries (0) or of keys (1)."""
    parts = []
    for tensor, of in tensors:
        repeats = num_heads // tensor.shape[1]
        by_head = tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)
        parts.append(by_head.transpose(0, 1).unsqueeze(0).split(lens[of], 2))
    return zip(*parts, strict=True)


def _packed(parts: list[Tensor]) -> Tensor:
    whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return whole.squeeze(0).transpose(0, 1)
