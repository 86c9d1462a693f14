"""Attention from the packed sequences of one stream to those of another, e.g. from video tokens to their text.

A token's query needs only the keys of its own sequence, so nothing crosses ranks here: with a balancer the text is
taken to where the chunks are, and each chunk attends to the whole text of its sequence with all heads.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.models.attention import _kernel_runs
from knapformer.models.packing import Lengths, lengths_list


class PackedCrossAttention:
    """Of one pairing of sequences, made once a step for its many layers.

    query_lens, key_lens: tokens of each sequence in either stream, as many of the one as of the other, zeros allowed.
    The output of a sequence without keys is zero.
    """

    def __init__(self, query_lens: Lengths, key_lens: Lengths) -> None:
        self._query_lens, self._key_lens = lengths_list(query_lens), lengths_list(key_lens)
        if len(self._query_lens) != len(self._key_lens):
            raise ValueError(f"key_lens: got {len(self._key_lens)} lengths, expected {len(self._query_lens)}")
        pairs = zip(self._query_lens, self._key_lens, strict=True)
        # (sequences, query length, key length): neighbours of equal lengths are computed together.
        self._runs = [(len(list(run)), *pair) for pair, run in itertools.groupby(pairs)]
        self._num_queries, self._num_keys = sum(self._query_lens), sum(self._key_lens)
        self._offsets: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (query tokens, heads, head_dim); k, v (key tokens, heads, head_dim). Returns the shape of q."""
        if q.shape[0] != self._num_queries or k.shape[0] != self._num_keys:
            got = f"{q.shape[0]} queries and {k.shape[0]} keys"
            raise ValueError(f"q, k: got {got}, expected {self._num_queries} and {self._num_keys}, as the lengths say")
        if all(query_len * key_len == 0 for _, query_len, key_len in self._runs):
            # Keeps q, k and v in the graph: every parameter gets a gradient on every rank.
            return q * 0 + (k.sum() + v.sum()) * 0
        if q.is_cuda and _kernel_runs(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], False):
            return self._one_kernel(q, k, v)
        return self._by_sequence(q, k, v)

    def _by_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        query_parts = q.split([count * length for count, length, _ in self._runs])
        key_sizes = [count * length for count, _, length in self._runs]
        parts = zip(self._runs, query_parts, k.split(key_sizes), v.split(key_sizes), strict=True)
        for (count, query_len, key_len), q_run, k_run, v_run in parts:
            if query_len == 0:
                continue
            if key_len == 0:
                outs.append(q_run * 0)
                continue
            out = F.scaled_dot_product_attention(
                q_run.unflatten(0, (count, query_len)).transpose(1, 2),
                k_run.unflatten(0, (count, key_len)).transpose(1, 2),
                v_run.unflatten(0, (count, key_len)).transpose(1, 2),
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _one_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device not in self._offsets:
            query_ends, key_ends = (
                torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device, non_blocking=True)
                for lens in (self._query_lens, self._key_lens)
            )
            self._offsets[q.device] = query_ends, key_ends
        query_ends, key_ends = self._offsets[q.device]
        from torch.nn.attention.varlen import varlen_attn  # not in every torch, but where the kernel runs

        out = varlen_attn(q, k, v, query_ends, key_ends, max(self._query_lens), max(self._key_lens))
        return cast(Tensor, out)
