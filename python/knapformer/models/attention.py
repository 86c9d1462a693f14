"""Attention over packed sequences, through what the installed torch ships.

On CUDA torch's own variable-length attention takes all sequences in one kernel where it supports the GPU and the
dtype; elsewhere scaled_dot_product_attention runs over sequences, neighbours of one length together. Which one is
chosen by trying: a GPU that it does not support, a dtype that it refuses end in
the second way. No package beside torch is needed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from knapformer import ArgumentError
from knapformer.models.config import MASKS
from knapformer.models.packing import Lengths, lengths_list


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths, mask: str = "full") -> Tensor:
    """Each packed sequence attends to itself.

    q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads a divisor of heads; seq_lens adds up to
    tokens, zeros allowed; mask: "full" or "causal". Returns (tokens, heads, head_dim). Scaled by head_dim ** -0.5.
    """
    return PackedAttention(mask)(q, k, v, seq_lens)


class PackedAttention:
    """varlen_attention as an object that keeps what it derives from the lengths, for the many layers of one step.

    It may be handed to SequenceBalancer.attention, which calls it with whole sequences and this rank's heads.
    """

    def __init__(self, mask: str = "full") -> None:
        if mask not in MASKS:
            raise ArgumentError(f"mask: got {mask!r}, expected one of {', '.join(MASKS)}")
        self._causal = mask == "causal"
        self._pairings: dict[int, tuple[Lengths, _Pairing]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths) -> Tensor:
        # By identity: a layer costs a look-up, however many sequences there are. The lengths are kept alive with it,
        # so that an id cannot be another object's.
        known = self._pairings.get(id(seq_lens))
        if known is None:
            lens = lengths_list(seq_lens)
            known = self._pairings[id(seq_lens)] = (seq_lens, _Pairing(lens, lens))
        pairing = known[1]
        if q.shape[0] != pairing.num_queries:
            raise ValueError(f"seq_lens: got {pairing.num_queries} tokens in all, expected {q.shape[0]}, as q has")
        return pairing.attend(q, k, v, self._causal)


class PackedCrossAttention:
    """From the sequences of one stream to those of another, e.g. from video tokens to their text, with all heads.

    A token's query needs only the keys of its own sequence, so nothing is exchanged here: with a balancer the text is
    taken to where the chunks are. Made once a step for its many layers.

    query_lens, key_lens: tokens of each sequence in either stream, as many of the one as of the other, zeros allowed.
    The output of a sequence without keys is zero.
    """

    def __init__(self, query_lens: Lengths, key_lens: Lengths) -> None:
        self._pairing = _Pairing(lengths_list(query_lens), lengths_list(key_lens))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (query tokens, heads, head_dim); k, v (key tokens, heads, head_dim). Returns the shape of q."""
        expected = self._pairing.num_queries, self._pairing.num_keys
        if (q.shape[0], k.shape[0]) != expected:
            got = f"{q.shape[0]} queries and {k.shape[0]} keys"
            raise ValueError(f"q, k: got {got}, expected {expected[0]} and {expected[1]}, as the lengths say")
        return self._pairing.attend(q, k, v, causal=False)


class _Pairing:
    """Which packed queries attend to which packed keys: those of one sequence."""

    def __init__(self, query_lens: list[int], key_lens: list[int]) -> None:
        if len(query_lens) != len(key_lens):
            raise ValueError(f"key_lens: got {len(key_lens)} lengths, expected {len(query_lens)}")
        self.num_queries, self.num_keys = sum(query_lens), sum(key_lens)
        self._lens = (query_lens, key_lens)
        # (sequences, query length, key length): neighbours of equal lengths are computed together.
        pairs = itertools.groupby(zip(query_lens, key_lens, strict=True))
        self._runs = [(len(list(run)), *pair) for pair, run in pairs if pair != (0, 0)]
        self._offsets: dict[torch.device, list[Tensor]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if all(query_len * key_len == 0 for _, query_len, key_len in self._runs):
            # Keeps q, k and v in the graph: their collectives run, and their parameters get gradients, on every rank.
            return q * 0 + (k.sum() + v.sum()) * 0
        if q.is_cuda and _kernel_runs(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], causal):
            return self.one_kernel(q, k, v, causal)
        return self._by_sequence(q, k, v, causal)

    def _by_sequence(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        # split, and not slices: its gradient is one concatenation, that of a slice a tensor of full size.
        query_parts = q.split([count * length for count, length, _ in self._runs])
        key_sizes = [count * length for count, _, length in self._runs]
        grouped = k.shape[1] != q.shape[1]
        outs = []
        parts = zip(self._runs, query_parts, k.split(key_sizes), v.split(key_sizes), strict=True)
        for (count, query_len, key_len), q_run, k_run, v_run in parts:
            if query_len * key_len == 0:
                outs.append(q_run * 0)
                continue
            q_run = q_run.unflatten(0, (count, query_len)).transpose(1, 2)
            k_run, v_run = (part.unflatten(0, (count, key_len)).transpose(1, 2) for part in (k_run, v_run))
            out = F.scaled_dot_product_attention(q_run, k_run, v_run, is_causal=causal, enable_gqa=grouped)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def one_kernel(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        options: dict[str, object] = {}
        if causal:
            options = {"is_causal": True} if "is_causal" in _kernel_options() else {"window_size": (-1, 0)}
        if k.shape[1] != q.shape[1]:
            if "enable_gqa" in _kernel_options():
                options["enable_gqa"] = True
            else:
                repeats = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        if q.device not in self._offsets:
            ends = (torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in self._lens)
            self._offsets[q.device] = [of.to(q.device, non_blocking=True) for of in ends]
        run: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]
        return run(q, k, v, *self._offsets[q.device], max(self._lens[0]), max(self._lens[1]), **options)


@functools.cache
def _kernel_options() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def _kernel_runs(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool
) -> bool:
    """Whether torch's variable-length attention takes this, forward and backward: tried once, on two short ones."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    heads = (num_heads, num_kv_heads, num_kv_heads)
    try:
        with torch.enable_grad():
            q, k, v = (torch.ones(3, n, head_dim, device=device, dtype=dtype, requires_grad=True) for n in heads)
            _Pairing([1, 2], [1, 2]).one_kernel(q, k, v, causal).sum().backward()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True
