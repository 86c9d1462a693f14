"""Attention over packed sequences, through what the installed torch ships.

On an accelerator torch's own variable-length attention takes all sequences in one kernel where it supports the device
and the dtype; elsewhere scaled_dot_product_attention runs over sequences, neighbours of one length together. The choice
is made by trying the kernel: a device that it does not support, or a dtype that it refuses, takes the second way. No
package beside torch is needed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import _disable_current_modes

from knapformer._core import check_mask
from knapformer._torch import MaskTables
from knapformer.device_copies import to_device
from knapformer.masked import MaskedAttention, as_autocast, attend, layout_on, no_attention
from knapformer.models.packing import Lengths, lengths_list
from knapformer.models.stages import Stages


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths, mask: str = "full") -> Tensor:
    """Each packed sequence attends to itself.

    q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads a divisor of heads; seq_lens adds up to
    tokens, zeros allowed; mask: of all sequences, as in `knapformer.attention_pairs`.

    Returns (tokens, heads, head_dim). Scaled by head_dim ** -0.5.
    """
    lens = tuple(lengths_list(seq_lens))
    if mask not in ("full", "causal"):
        out: Tensor = _masked(lens, mask)(q, k, v)
        return out
    return _pairing(lens, lens).attend(q, k, v, mask == "causal")


class PackedAttention:
    """varlen_attention with a mask, as an object: SequenceBalancer.attention reads its `mask`, and calls it with this
    rank's heads of whole sequences, or with a part of their queries. mask: None: of each sequence, the planned one."""

    cuts_queries = True

    def __init__(self, mask: str | None = "full") -> None:
        self.mask = None if mask is None else check_mask(mask)
        self.takes_masks = mask not in ("full", "causal")  # then a balancer gives it the MaskTables of what is packed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a kernel that takes lengths
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_lens: Lengths | MaskTables,
        key_lens: Lengths | None = None,
        query_starts: Lengths | None = None,
    ) -> Tensor:
        """key_lens, query_starts: as in SequenceBalancer.attention, where queries are a part of their sequences. With
        the mask "causal" the last query sees the last key; ValueError where they lie otherwise."""
        if isinstance(query_lens, MaskTables):
            return attend(q, k, v, layout_on(query_lens, q.device))
        if key_lens is None:
            return varlen_attention(q, k, v, query_lens, self.mask or "planned")
        pairing = _pairing(tuple(lengths_list(query_lens)), tuple(lengths_list(key_lens)))
        causal = self.mask == "causal"
        starts = None if query_starts is None else lengths_list(query_starts)
        if causal and starts != pairing.causal_starts:
            raise ValueError(f"query_starts: got {starts}, expected {pairing.causal_starts}, to the end of the keys")
        return pairing.attend(q, k, v, causal)

    def merges(self, q: Tensor) -> bool:
        """Whether a kernel for such queries gives the log-sum-exps by which in_stages merges."""
        (q,) = as_autocast(q)
        return q.device.type == "cpu" or (
            q.is_cuda and _kernel_runs(q.device, q.dtype, q.shape[2], grouped=False, causal=False)
        )

    def in_stages(
        self, q: Tensor, query_lens: Lengths, next_stage: Callable[[], tuple[Tensor, Tensor, Tensor] | None]
    ) -> Tensor:
        """Full attention to keys that come in stages: next_stage() gives k, v and the number of keys of each sequence,
        and None after the last stage."""
        lens, (q,) = tuple(lengths_list(query_lens)), as_autocast(q)
        stages = Stages(q)
        for k, v, key_lens in iter(next_stage, None):
            stages.add(_pairing(lens, tuple(lengths_list(key_lens))), *as_autocast(k, v))
        return stages.result()


@functools.cache
def kernel_for(mask: str | None) -> PackedAttention:
    """The kernel of attention without `attend`. mask: that of all sequences of a step; None: they have several."""
    return PackedAttention(mask if mask in ("full", "causal") else None)


class PackedCrossAttention:
    """From packed queries to packed keys of the same sequences, with all heads, e.g. from video tokens to their text.

    A token's query needs only the keys of its own sequence, so nothing is exchanged here: with a balancer the text is
    taken to where the chunks are. Made once a step for its many layers.

    query_lens, key_lens: tokens of each sequence in the two streams; both list all sequences, zeros allowed.
    The output of a sequence without keys is zero.
    """

    def __init__(self, query_lens: Lengths, key_lens: Lengths) -> None:
        self.lens = lengths_list(query_lens), lengths_list(key_lens)
        if len(self.lens[0]) != len(self.lens[1]):
            raise ValueError(f"key_lens: got {len(self.lens[1])} lengths, expected {len(self.lens[0])}")
        self._num_rows = tuple(map(sum, self.lens))
        # (sequences, query length, key length): neighbours of equal lengths are computed together.
        pairs = itertools.groupby(zip(*self.lens, strict=True))
        self.runs = [(len(list(run)), *pair) for pair, run in pairs if pair != (0, 0)]
        self._offsets: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a kernel that takes lengths
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (query tokens, heads, head_dim); k, v (key tokens, heads, head_dim). Returns the shape of q."""
        return self.attend(q, k, v, causal=False)

    @property
    def causal_starts(self) -> list[int]:
        """Where the first query of each sequence lies among its keys."""
        return [num_keys - num_queries for num_queries, num_keys in zip(*self.lens, strict=True)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Causal: the last query of a sequence to all of its keys, the one before it to all but one, and so on."""
        if (q.shape[0], k.shape[0]) != self._num_rows:
            got, (num_queries, num_keys) = f"{q.shape[0]} queries and {k.shape[0]} keys", self._num_rows
            raise ValueError(f"q, k: got {got}, expected {num_queries} and {num_keys}, as the lengths say")
        q, k, v = as_autocast(q, k, v)
        if q.shape[1] == 0 or all(query_len * key_len == 0 for _, query_len, key_len in self.runs):
            return no_attention(q, k, v)
        if _may_have_kernel(q.device) and _kernel_runs(
            q.device, q.dtype, q.shape[2], grouped=k.shape[1] != q.shape[1], causal=causal
        ):
            return self.one_kernel(q, k, v, causal)
        return self._by_sequence(q, k, v, causal)

    def _by_sequence(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        # split, not slices: the gradient of split is one concatenation, that of each slice a tensor of full size.
        query_parts = q.split([count * length for count, length, _ in self.runs])
        key_sizes = [count * length for count, _, length in self.runs]
        grouped = k.shape[1] != q.shape[1]
        if grouped and q.device.type != "cpu":
            # Where no kernel takes grouped heads, as for float32 on CUDA, torch falls back to matrices of all scores.
            k, v = _for_each_head(q, k, v)
            grouped = False
        outs = []
        parts = zip(self.runs, query_parts, k.split(key_sizes), v.split(key_sizes), strict=True)
        for (count, query_len, key_len), q_run, k_run, v_run in parts:
            if query_len * key_len == 0:
                outs.append(q_run * 0)
                continue
            q_run = q_run.unflatten(0, (count, query_len)).transpose(1, 2)
            k_run, v_run = (part.unflatten(0, (count, key_len)).transpose(1, 2) for part in (k_run, v_run))
            if causal and query_len < key_len:
                out = _causal_to_the_end(q_run, k_run, v_run, grouped)
            else:
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
                k, v = _for_each_head(q, k, v)
        run: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]
        return run(q, k, v, *self.offsets_on(q.device), max(self.lens[0]), max(self.lens[1]), **options)

    def offsets_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where sequences of queries and keys begin and end, int32: copied once, for all layers and passes."""
        if device not in self._offsets:
            with torch.inference_mode(False):  # a later step may want gradients
                ends = [torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in self.lens]
                of_queries, of_keys = to_device(torch.stack(ends), device).unbind(0)
            self._offsets[device] = (of_queries, of_keys)
        return self._offsets[device]


def _causal_to_the_end(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """Causal attention of the last queries of sequences, (sequences, heads, queries, head_dim), to all of their keys:
    in blocks of queries, so that there is no matrix of all of them."""
    block, num_keys, outs = 512, k.shape[2] - q.shape[2], []
    for part in q.split(block, 2):
        seen = torch.ones(part.shape[2], num_keys + part.shape[2], dtype=torch.bool, device=q.device).tril(num_keys)
        num_keys += part.shape[2]
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]
        outs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=seen, enable_gqa=grouped))
    return torch.cat(outs, 2)


def _for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped heads of keys and values, once for each head of the queries."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


@functools.lru_cache(maxsize=64)
def _masked(seq_lens: tuple[int, ...], mask: str) -> MaskedAttention:
    return MaskedAttention(seq_lens, [mask] * len(seq_lens))


# Of a step as many as its bag has degrees; those of micro-batches in flight are kept, too.
@functools.lru_cache(maxsize=64)
def _pairing(query_lens: tuple[int, ...], key_lens: tuple[int, ...]) -> PackedCrossAttention:
    return PackedCrossAttention(query_lens, key_lens)


def _may_have_kernel(device: torch.device) -> bool:
    return device.type != "cpu"


@functools.cache
def _kernel_options() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def _kernel_runs(device: torch.device, dtype: torch.dtype, head_dim: int, *, grouped: bool, causal: bool) -> bool:
    """Whether torch's variable-length attention takes these: tried once, forward and backward, on two short sequences.

    The first call comes in the middle of a block, which may be under activation checkpointing: the block must not save
    the tensors of this trial. So the trial has saved-tensor hooks of its own, and runs outside of dispatch modes (such
    as that of selective checkpointing).
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with _disable_current_modes(), own_hooks, torch.inference_mode(False), torch.enable_grad():
            q, k, v = (
                torch.ones(3, num_heads, head_dim, device=device, dtype=dtype, requires_grad=True)
                for num_heads in ((2, 1, 1) if grouped else (1, 1, 1))
            )
            PackedCrossAttention([1, 2], [1, 2]).one_kernel(q, k, v, causal).sum().backward()
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel, and is not remembered
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"torch's variable-length attention of {dtype} with heads of {head_dim} on {device}"
        warnings.warn(f"knapformer: {what}: {reason}; sequences are attended to one by one", stacklevel=2)
        return False
    return True
