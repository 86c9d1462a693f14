"""What all kernels of attention do with queries, keys and values first."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast in its dtype, to which torch's attention would cast them, float64 excepted. Norms under autocast
    give queries and keys in float32: these would be exchanged in twice the bytes, and no kernel for variable lengths
    takes them."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros for q, as wide as v, in place of a kernel that would get no tokens or no heads.

    Where more ranks than heads share a sequence, some have no heads. Some kernels fail on empty inputs.

    Keeps q, k and v in the graph: their collectives run, and their parameters get gradients, on every rank.
    """
    return (q.sum(-1, keepdim=True) + k.sum() + v.sum()) * 0 + q.new_zeros(v.shape[-1])
