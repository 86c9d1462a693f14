"""What models are built of: rotary positions, and a checkpointed block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def rotations(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding (RoPE), to be computed once a step.

    positions (tokens,) integers; head_dim: features of a head, even. Returns unit numbers (tokens, 1, head_dim / 2),
    complex64 or, where `dtype` is float64, complex128: they rotate the pairs (0, 1), ...
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = (positions[:, None].to(torch.float64) * theta**-exponents).unsqueeze(1)
    return torch.polar(torch.ones_like(angle), angle).to(
        torch.complex128 if dtype == torch.float64 else torch.complex64
    )


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

    checkpoint: Callable[..., Any] | None = None  # what then calls `compute`

    def forward(self, *args: Any) -> Any:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(self.compute, *args)
        return self.compute(*args)

    def compute(self, *args: Any) -> Any:
        raise NotImplementedError
