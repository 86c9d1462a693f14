"""Attention by the mask of each packed sequence.

On CPUs by calls of torch's attention (C++), on accelerators by FlexAttention with a block mask that is made
from the same ranges of keys: once a step for all layers, on the thread that plans it. Another mask compiles nothing
anew; one whose queries see another number of ranges of keys does, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from knapformer._torch import MaskTables, masked_attention
from knapformer.attention.inputs import as_autocast, no_attention


class MaskedAttention:
    """Each packed sequence attends to itself, by its own mask. Made once a batch, for its many layers.

    seq_lens: tokens of each sequence, zeros allowed. masks: the text of each sequence's mask, as in
    `knapformer.attention_pairs`. Raises ArgumentError for a mask of another length, and for a density.
    """

    def __init__(self, seq_lens: Sequence[int] | Tensor, masks: Sequence[str]) -> None:
        self._tables = MaskTables(masks, seq_lens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a kernel that takes lengths
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (tokens, heads, head_dim); k, v (tokens, kv_heads, ...), kv_heads a divisor of heads. Returns (tokens,
        heads, ...), 0 for a query that sees no key. Scaled by head_dim ** -0.5."""
        if q.shape[0] != self._tables.num_queries or k.shape[0] != self._tables.num_keys:
            got = f"{q.shape[0]} queries and {k.shape[0]} keys"
            raise ValueError(f"q, k: got {got}, expected {self._tables.num_queries} of both, as seq_lens say")
        return attend(q, k, v, layout_on(self._tables, q.device))


def layout_on(tables: MaskTables, device: torch.device) -> MaskTables | BlockMask:
    """What `attend` takes for tensors on this device."""
    return tables if device.type == "cpu" else block_mask(tables, device)


def block_mask(tables: MaskTables, device: torch.device) -> BlockMask:
    bounds, lists = tables.blocks_on(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = torch.zeros_like(query, dtype=torch.bool)
        for first, end in bounds:
            seen = seen | ((first[query] <= key) & (key < end[query]))
        return seen

    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
             "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip
    of_blocks: dict[str, Any] = dict(zip(names, lists, strict=True))
    lengths = (tables.num_queries, tables.num_keys)
    return BlockMask(lengths, BLOCK_SIZE=(tables.block_size, tables.block_size), mask_mod=sees, **of_blocks)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: MaskTables | BlockMask) -> Tensor:
    """As MaskedAttention, for a `layout` of layout_on."""
    heads, kv_heads = q.shape[1], k.shape[1]
    fits = kv_heads == heads or (kv_heads > 0 and heads % kv_heads == 0)
    fits = fits and q.ndim == k.ndim == 3 and k.device == q.device == v.device  # at which nobody else looks
    if not fits or k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        got, expected = [tuple(t.shape) for t in (q, k, v)], "(keys, kv_heads, head_dim), (keys, kv_heads, ...)"
        raise ValueError(f"q, k, v: got {got}, expected (queries, heads, head_dim), {expected}, kv_heads a divisor")
    q, k, v = as_autocast(q, k, v)
    if isinstance(layout, MaskTables):
        return masked_attention(q, k, v, layout)
    if q.numel() == 0 or k.numel() == 0:
        return no_attention(q, k, v)
    by_head = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    o: Tensor = _compiled()(*by_head, block_mask=layout, enable_gqa=kv_heads != heads)
    return o.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
