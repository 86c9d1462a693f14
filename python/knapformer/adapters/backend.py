"""Attention of a packed call by the backend that the user chose in diffusers (`set_attention_backend`)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.masked import no_attention
from knapformer.models.packing import Lengths, lengths_list
from knapformer.models.step import Attend


def attend_by(attn: nn.Module) -> Attend | None:
    """The function that computes the attention of this module; None: the PackedStep's own."""
    backend = _backend_of(attn)
    return None if backend is None else _Dispatched(backend)


def _backend_of(attn: nn.Module) -> Any:
    """The module's backend; None stands for torch's own attention."""
    if not hasattr(attn, "processor"):  # not of diffusers
        return None
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backend = getattr(attn.processor, "_attention_backend", None)
    if backend is None:
        backend = _AttentionBackendRegistry.get_active_backend()[0]
    backend = AttentionBackendName(backend)
    return None if backend == AttentionBackendName.NATIVE else backend


class _Dispatched:
    """Neighbouring sequences of one length are one batch for the backend."""

    cuts_queries = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, query_lens: Lengths, key_lens: Lengths | None = None, _: Any = None
    ) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        queries = lengths_list(query_lens)
        keys = queries if key_lens is None else lengths_list(key_lens)
        runs = [(*lens, len(list(run))) for lens, run in itertools.groupby(zip(queries, keys, strict=True)) if lens[1]]
        if q.numel() == 0:
            return no_attention(q, k, v)
        # Once for each head of the queries: few backends take grouped heads.
        k, v = (t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        parts = [q.split([num_queries * count for num_queries, _, count in runs])]
        parts += [t.split([num_keys * count for _, num_keys, count in runs]) for t in (k, v)]
        outs = []
        for (num_queries, num_keys, count), *of_run in zip(runs, *parts, strict=True):
            if num_queries == 0:
                continue
            lens = (num_queries, num_keys, num_keys)
            batch = (part.unflatten(0, (count, length)) for part, length in zip(of_run, lens, strict=True))
            outs.append(dispatch_attention_fn(*batch, backend=self._backend).flatten(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]
