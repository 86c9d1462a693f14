"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotation:
    """Rotary position embedding (RoPE): the angles by which the heads of packed tokens are rotated.

    turns (tokens, 1, head_dim / 2, 2), float32 or float64: cosine and sine of the angle of each pair of features.

    It is no tensor and no dataclass: FSDP's mixed precision casts those down where they are arguments of a module.
    """

    def __init__(self, turns: Tensor) -> None:
        self.turns = turns


def rotations(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """To be computed once a step. Features (0, 1), (2, 3), ... are the pairs.

    positions (tokens,) integers; head_dim: features of a head, even; float32, or float64 where `dtype` is that.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = (positions[:, None].to(torch.float64) * theta**-exponents).unsqueeze(1)
    return Rotation(torch.stack([angle.cos(), angle.sin()], -1).to(torch.promote_types(dtype, torch.float32)))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """(tokens, heads, head_dim) rotated in the dtype of `rotation`, returned in the dtype of x."""
    turns, pairs = rotation.turns, x.to(rotation.turns.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # Inductor fuses real arithmetic with the operations beside it
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    elif len(turns) != len(x):  # one would be taken for all
        raise ValueError(f"rotation: got angles of {len(turns)} tokens, expected {len(x)}, as x has")
    else:
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(turns))
    return out.flatten(-2).to(x.dtype)
