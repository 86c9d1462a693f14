"""Attention of a packed call by the backend that the user chose in diffusers (`set_attention_backend`)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.models.attention import no_attention
from knapformer.models.packing import Lengths, lengths_list
from knapformer.models.step import Attend


def attend_by(attn: nn.Module) -> Attend | None:
    """The function that computes the attention of this module; None: the PackedStep's own."""
    backend = _backend_of(attn)
    return None if backend is None else functools.partial(_dispatched, backend)


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


def _dispatched(backend: Any, q: Tensor, k: Tensor, v: Tensor, seq_lens: Lengths) -> Tensor:
    """Neighbouring sequences of one length are one batch for the backend."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths_list(seq_lens)) if length > 0]
    if not runs or q.shape[1] == 0:
        return no_attention(q, k, v)
    sizes = [length * count for length, count in runs]
    outs = []
    for (length, count), *parts in zip(runs, *(t.split(sizes) for t in (q, k, v)), strict=True):
        batch = (part.unflatten(0, (count, length)) for part in parts)
        outs.append(dispatch_attention_fn(*batch, backend=backend).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
