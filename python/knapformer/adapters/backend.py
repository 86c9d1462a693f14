"""Attention of a packed call by the backend that the user chose in diffusers (`set_attention_backend`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from knapformer.models.attention import pairing_of
from knapformer.models.packing import Lengths
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

        pairing = pairing_of(query_lens, query_lens if key_lens is None else key_lens)
        return pairing.attend(q, k, v, kernel=partial(dispatch_attention_fn, backend=self._backend))
