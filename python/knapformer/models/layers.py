"""What models are built of: rotary positions, and a checkpointed block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def rotations(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding (RoPE), to be computed once a step.

    positions (tokens,) integers; head_dim: features of a head, even. Returns cosine and sine of the angle by which each
    of the pairs of features (0, 1), ... is rotated: (tokens, 1, head_dim / 2, 2) in float32 or, where `dtype` is that,
    float64.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = (positions[:, None].to(torch.float64) * theta**-exponents).unsqueeze(1)
    return torch.stack([angle.cos(), angle.sin()], -1).to(torch.promote_types(dtype, torch.float32))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """(tokens, heads, head_dim) rotated by `rotations`, in their dtype, returned in the dtype of x."""
    pairs = x.to(rotation.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # Inductor makes one pass over memory of this, and fuses nothing that is complex
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:  # the fewest passes of single operations
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return rotated.flatten(-2).to(x.dtype)


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
