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
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import _disable_current_modes

from knapformer._core import check_mask
from knapformer._torch import MaskTables
from knapformer.attention.inputs import as_autocast, no_attention
from knapformer.attention.masked import MaskedAttention, attend, layout_on
from knapformer.attention.packed_rows import Lengths, lengths_list, to_device
from knapformer.attention.stages import attend_in_stages


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths, mask: str = "full") -> Tensor:
    """Each packed sequence attends to itself.

    q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads a divisor of heads; seq_lens adds up to
    tokens, zeros allowed; mask: of all sequences, as in `knapformer.attention_pairs`.

    Returns (tokens, heads, head_dim). Scaled by head_dim ** -0.5.
    """
    if mask not in ("full", "causal"):
        out: Tensor = _masked(tuple(lengths_list(seq_lens)), mask)(q, k, v)
    else:
        out = pairing_of(seq_lens, seq_lens).attend(q, k, v, mask == "causal")
    return out


class PackedAttention:
    """varlen_attention with a mask, as an object: Step.attention reads its `mask`, and calls it with this rank's
    heads of whole sequences, or with a part of their queries. mask: None: of each sequence, the planned one."""

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
        """key_lens, query_starts: as in Step.attention, where queries are a part of their sequences. With
        the mask "causal" the last query sees the last key; ValueError where they lie otherwise."""
        if isinstance(query_lens, MaskTables):
            return attend(q, k, v, layout_on(query_lens, q.device))
        if key_lens is None:
            return varlen_attention(q, k, v, query_lens, self.mask or "planned")
        pairing = pairing_of(query_lens, key_lens)
        causal = self.mask == "causal"
        starts = None if query_starts is None else lengths_list(query_starts)
        if causal and starts != (at_the_end := [keys - queries for queries, keys in zip(*pairing.lens, strict=True)]):
            raise ValueError(f"query_starts: got {starts}, expected {at_the_end}, to the end of the keys")
        out: Tensor = pairing.attend(q, k, v, causal)
        return out

    def merges(self, q: Tensor, v: Tensor) -> bool:
        """Whether a kernel for such queries and values gives the log-sum-exps by which in_stages merges."""
        (q,) = as_autocast(q)
        is_taken = q.device.type == "cpu" or (
            q.is_cuda and _kernel_runs(q.device, q.dtype, q.shape[2], grouped=False, causal=False)
        )
        return is_taken and q.shape[2] == v.shape[2]

    def in_stages(
        self, q: Tensor, query_lens: Lengths, next_stage: Callable[[], tuple[Tensor, Tensor, Tensor] | None]
    ) -> Tensor:
        """Full attention to keys that come in stages: next_stage() gives k, v and the number of keys of each sequence,
        and None after the last stage."""
        pairings = ((pairing_of(query_lens, key_lens), k, v) for k, v, key_lens in iter(next_stage, None))
        stages = ((of.offsets_on(q.device) if q.is_cuda else of.lens, k, v) for of, k, v in pairings)
        return attend_in_stages(q, stages)


@functools.cache
def kernel_for(mask: str | None) -> PackedAttention:
    """The kernel of attention without `attend`. mask: that of all sequences of a step; None: they have several."""
    return PackedAttention(mask if mask in ("full", "causal") else None)


def pairing_of(query_lens: Lengths, key_lens: Lengths) -> Pairing:
    """Both list all sequences, zeros allowed."""
    return _pairing(tuple(lengths_list(query_lens)), tuple(lengths_list(key_lens)))


class Pairing:
    """Which packed queries attend to which packed keys: those of the same sequence, e.g. all of them, a part of the
    queries, or from video tokens to their text. The output of a sequence without keys is zero."""

    def __init__(self, query_lens: Sequence[int], key_lens: Sequence[int]) -> None:
        self.lens = query_lens, key_lens
        if len(query_lens) != len(key_lens):
            raise ValueError(f"key_lens: got {len(key_lens)} lengths, expected {len(query_lens)}")
        self._num_rows = tuple(map(sum, self.lens))
        # (sequences, query length, key length): neighbours of equal lengths are computed together.
        pairs = itertools.groupby(zip(*self.lens, strict=True))
        self.runs = [(len(list(run)), *pair) for pair, run in pairs if pair != (0, 0)]
        self._offsets: dict[torch.device | torch.Stream, tuple[Tensor, Tensor, int, int]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a kernel that takes lengths
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, kernel: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """q (query tokens, heads, head_dim); k, v (key tokens, kv heads, head_dim). Returns the shape of q.

        Causal: the last query of a sequence to all of its keys, the one before it to all but one, and so on. kernel:
        one that computes q, k, v of (sequences, length, heads, head_dim), where torch's is not to be taken.
        """
        if (q.ndim, q.shape[0], k.shape[0]) != (3, *self._num_rows):
            got, rows = f"shapes {tuple(q.shape)} and {tuple(k.shape)}", self._num_rows
            raise ValueError(
                f"q, k: got {got}, expected three dimensions, {rows[0]} and {rows[1]} rows, by the lengths"
            )
        q, k, v = as_autocast(q, k, v)
        grouped = k.shape[1] != q.shape[1]
        if q.shape[1] == 0 or all(query_len * key_len == 0 for _, query_len, key_len in self.runs):
            return no_attention(q, k, v)
        if kernel is not None:  # few take grouped heads
            return self._by_runs(q, *_for_each_head(q, k, v), kernel)
        if _kernel_runs(q.device, q.dtype, q.shape[2], grouped=grouped, causal=causal):
            return self.one_kernel(q, k, v, causal)
        if q.device.type != "cpu":
            # Where no kernel takes grouped heads, as for float32 on CUDA, torch falls back to matrices of all scores.
            k, v = _for_each_head(q, k, v)
        return self._by_runs(q, k, v, partial(_scaled_dot_product, causal=causal))

    def _by_runs(self, q: Tensor, k: Tensor, v: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
        # split, not slices: the gradient of split is one concatenation, that of each slice a tensor of full size.
        sizes = [[run[0] * run[of] for run in self.runs] for of in (1, 2, 2)]
        parts = (t.split(of) for t, of in zip((q, k, v), sizes, strict=True))
        outs = []
        for (count, query_len, key_len), *of_run in zip(self.runs, *parts, strict=True):
            if query_len * key_len == 0:
                outs.append(no_attention(*of_run))
                continue
            batch = (t.unflatten(0, (count, n)) for t, n in zip(of_run, (query_len, key_len, key_len), strict=True))
            outs.append(kernel(*batch).flatten(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def one_kernel(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        options: dict[str, object] = {"window_size": (-1, 0)} if causal else {}
        if k.shape[1] != q.shape[1]:
            if _TAKES_GROUPED_HEADS:
                options["enable_gqa"] = True
            else:
                k, v = _for_each_head(q, k, v)
        run: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]
        return run(q, k, v, *self.offsets_on(q.device), **options)

    def offsets_on(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Where sequences of queries and keys begin and end, int32, and the longest of each: copied once a stream."""
        stream = device if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)
        if stream not in self._offsets:
            with torch.inference_mode(False):  # a later step may want gradients
                ends = [torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in self.lens]
                of_queries, of_keys = to_device(torch.stack(ends), device).unbind(0)
            self._offsets[stream] = (of_queries, of_keys, max(self.lens[0]), max(self.lens[1]))
        return self._offsets[stream]


# Of a step as many as its bag has degrees; those of micro-batches in flight are kept, too.
_pairing = functools.lru_cache(maxsize=64)(Pairing)
_WITHOUT_KERNEL = ["cpu"]  # devices that have none for variable lengths
_TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention of (sequences, length, heads, head_dim)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped, num_keys = k.shape[1] != q.shape[1], k.shape[2] - q.shape[2]
    if not causal or num_keys == 0:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)
    outs = []  # the last queries, to all keys: in blocks of queries, so that there is no matrix of all of them
    for part in q.split(512, 2):
        seen = torch.ones(part.shape[2], num_keys + part.shape[2], dtype=torch.bool, device=q.device).tril(num_keys)
        num_keys += part.shape[2]
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]
        outs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=seen, enable_gqa=grouped))
    return torch.cat(outs, 2).transpose(1, 2)


def _for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped heads of keys and values, once for each head of the queries."""
    if (repeats := q.shape[1] // k.shape[1]) == 1:
        return k, v
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


@functools.lru_cache(maxsize=64)
def _masked(seq_lens: tuple[int, ...], mask: str) -> MaskedAttention:
    return MaskedAttention(seq_lens, [mask] * len(seq_lens))


@functools.cache
def _kernel_runs(device: torch.device, dtype: torch.dtype, head_dim: int, *, grouped: bool, causal: bool) -> bool:
    """Whether torch's variable-length attention takes these: tried once, forward and backward, on two short sequences.

    The first call comes in the middle of a block, which may be under activation checkpointing: the block must not save
    the tensors of this trial. So the trial has saved-tensor hooks of its own, and runs outside of dispatch modes (such
    as that of selective checkpointing).
    """
    if dtype not in (torch.float16, torch.bfloat16) or device.type in _WITHOUT_KERNEL:
        return False
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with _disable_current_modes(), own_hooks, torch.inference_mode(False), torch.enable_grad():
            q, k, v = (
                torch.ones(3, num_heads, head_dim, device=device, dtype=dtype, requires_grad=True)
                for num_heads in ((2, 1, 1) if grouped else (1, 1, 1))
            )
            Pairing([1, 2], [1, 2]).one_kernel(q, k, v, causal).sum().backward()
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel, and is not remembered
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"torch's variable-length attention of {dtype} with heads of {head_dim} on {device}"
        warnings.warn(f"knapformer: {what}: {reason}; runs of one length go one by one", stacklevel=2)
        return False
    return True
