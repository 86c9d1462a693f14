"""What both models are built of: rotary positions and a checkpointed block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn


def rotations(position_ids: Tensor, axes: Sequence[int], theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding (RoPE) over several axes, to be computed once a step.

    position_ids (tokens, axes) integers; axes: features of a head for each axis, even. Returns unit numbers
    (tokens, 1, head_dim / 2), complex64 or, where `dtype` is float64, complex128: they rotate the pairs (0, 1), ...
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    angles = []
    for axis, width in enumerate(axes):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=position_ids.device) / width
        angles.append(position_ids[:, axis, None].to(torch.float64) * theta**-exponents)
    angle = torch.cat(angles, 1).unsqueeze(1)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex128 if real == torch.float64 else torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """(tokens, heads, head_dim) rotated by `rotations`, in float32 or better, returned in the dtype of x."""
    wide = torch.float64 if rotation.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """A block that may be computed again in the backward pass instead of keeping its activations.

    The checkpoint is inside the module's call, so that FSDP's hooks of the module surround it: parameters are gathered
    once for the recomputation and the gradient.
    """

    checkpointed = False
    keeps_exchanges = False

    def forward(self, *args: Any) -> Any:
        if self.checkpointed and torch.is_grad_enabled():
            # No block draws random numbers, so there is no generator state to restore.
            contexts: Any = noop_context_fn
            if self.keeps_exchanges:
                from knapformer.checkpointing import keep_exchanges as contexts
            return checkpoint(self.compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return self.compute(*args)

    def compute(self, *args: Any) -> Any:
        raise NotImplementedError


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), linear. Named as the published FLUX weights are: net.0.proj, net.2."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(_ProjectedGelu(d_model, width), nn.Identity(), nn.Linear(width, d_model))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class _ProjectedGelu(nn.Module):
    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.proj(x), approximate="tanh")
