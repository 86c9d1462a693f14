"""Attention over packed sequences, through what the installed torch ships.

On CUDA torch's own variable-length attention takes all sequences in one kernel where it exists and supports the
dtype; elsewhere scaled_dot_product_attention runs over sequences, neighbours of one length together. Which one is
chosen by trying: a release that lacks the kernel, a GPU that it does not support, a dtype that it refuses all end in
the second way. No package beside torch is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.models.packing import Lengths, equal_runs, lengths_list

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # before torch 2.10
    _varlen_attn = None  # type: ignore[assignment]


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths, causal: bool = False) -> Tensor:
    """Each packed sequence attends to itself.

    q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads a divisor of heads; seq_lens adds up to
    tokens, zeros allowed. Returns (tokens, heads, head_dim). Scaled by head_dim ** -0.5.
    """
    return PackedAttention(causal)(q, k, v, seq_lens)


class PackedAttention:
    """varlen_attention as an object that keeps what it derives from the lengths, for the many layers of one step.

    It may be handed to SequenceBalancer.attention, which calls it with whole sequences and this rank's heads.
    """

    def __init__(self, causal: bool = False) -> None:
        self._causal = causal
        self._layouts: dict[int, tuple[Lengths, _Layout]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths) -> Tensor:
        layout = self._layout(seq_lens)
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"seq_lens: got {layout.num_tokens} tokens in all, expected {q.shape[0]}, as q has")
        if layout.num_tokens == 0:
            # Keeps q, k and v in the graph: their collectives run on every rank, with rows or without.
            return q + (k.sum() + v.sum())
        if q.is_cuda and _kernel_runs(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], self._causal):
            return _one_kernel(q, k, v, layout, self._causal)
        return _by_sequence(q, k, v, layout, self._causal)

    def _layout(self, seq_lens: Lengths) -> _Layout:
        # By identity: a layer costs a look-up, however many sequences there are. The lengths are kept alive with it,
        # so that an id cannot be another object's.
        known = self._layouts.get(id(seq_lens))
        if known is None:
            known = self._layouts[id(seq_lens)] = (seq_lens, _Layout(lengths_list(seq_lens)))
        return known[1]


class _Layout:
    def __init__(self, seq_lens: list[int]) -> None:
        self.runs = equal_runs(seq_lens)
        self.num_tokens = sum(seq_lens)
        self.max_len = max(seq_lens, default=0)
        self._seq_lens = seq_lens
        self._offsets: dict[torch.device, Tensor] = {}

    def offsets(self, device: torch.device) -> Tensor:
        """(sequences + 1,) int32."""
        known = self._offsets.get(device)
        if known is None:
            ends = torch.tensor([0, *self._seq_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            known = self._offsets[device] = ends.to(device, non_blocking=True)
        return known


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, causal: bool) -> Tensor:
    # split, and not slices: its gradient is one concatenation, that of a slice a tensor of full size.
    sizes = [count * length for count, length in layout.runs]
    grouped = k.shape[1] != q.shape[1]
    outs = []
    for (count, length), *parts in zip(layout.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_run, k_run, v_run = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q_run, k_run, v_run, is_causal=causal, enable_gqa=grouped)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


@functools.cache
def _kernel_options() -> frozenset[str]:
    return frozenset(inspect.signature(_varlen_attn).parameters)


def _one_kernel(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, causal: bool) -> Tensor:
    options: dict[str, object] = {}
    if causal:
        options = {"is_causal": True} if "is_causal" in _kernel_options() else {"window_size": (-1, 0)}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in _kernel_options():
            options["enable_gqa"] = True
        else:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    offsets = layout.offsets(q.device)
    run: Callable[..., Tensor] = _varlen_attn  # type: ignore[assignment]
    return run(q, k, v, offsets, offsets, layout.max_len, layout.max_len, **options)


@functools.cache
def _kernel_runs(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool
) -> bool:
    """Whether torch's variable-length attention takes this, forward and backward: tried once, on two short ones."""
    if _varlen_attn is None or dtype not in (torch.float16, torch.bfloat16):
        return False
    heads = (num_heads, num_kv_heads, num_kv_heads)
    try:
        with torch.enable_grad():
            q, k, v = (torch.ones(3, n, head_dim, device=device, dtype=dtype, requires_grad=True) for n in heads)
            _one_kernel(q, k, v, _Layout([1, 2]), causal).sum().backward()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True
