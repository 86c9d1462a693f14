"""What the models are built of: rotary positions, time steps, hidden layers, and a checkpointed block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn


def rotations(position_ids: Tensor, axes: Sequence[int], theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding (RoPE) over several axes, to be computed once a step.

    position_ids (tokens, axes) integers; axes: features of a head for each axis, even. Returns unit numbers
    (tokens, 1, head_dim / 2), complex64 or, where `dtype` is float64, complex128: they rotate the pairs (0, 1), ...
    """
    angles = []
    for axis, width in enumerate(axes):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=position_ids.device) / width
        angles.append(position_ids[:, axis, None].to(torch.float64) * theta**-exponents)
    angle = torch.cat(angles, 1).unsqueeze(1)
    return torch.polar(torch.ones_like(angle), angle).to(
        torch.complex128 if dtype == torch.float64 else torch.complex64
    )


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """(tokens, heads, head_dim) rotated by `rotations`, in float32 or better, returned in the dtype of x."""
    wide = torch.float64 if rotation.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def timestep_embedding(timestep: Tensor, num_channels: int, scale: float = 1000.0) -> Tensor:
    """(samples,) -> (samples, num_channels) in float32 or better: cosines, then sines, of scale * t."""
    wide = torch.promote_types(timestep.dtype, torch.float32)
    half = num_channels // 2
    exponents = torch.arange(half, dtype=wide, device=timestep.device) / half
    angles = scale * timestep.to(wide).unsqueeze(1) * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], 1)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Embedder(nn.Module):
    """Linear, an activation, linear: of what conditions the blocks, (rows, num_channels) -> (rows, d_model)."""

    def __init__(self, num_channels: int, d_model: int, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.linear_1 = nn.Linear(num_channels, d_model)
        self.linear_2 = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.activation(self.linear_1(x.to(self.linear_1.weight.dtype))))
        return out


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
        return tanh_gelu(self.proj(x))
