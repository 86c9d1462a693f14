"""What the tests of FLUX and of Wan against diffusers' models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.set_verbosity_error()

separate_and_fused = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


def layout_of(fused: bool) -> str:
    return "diffusers-fused" if fused else "diffusers"


def randomized(model: Any, dtype: torch.dtype = torch.float32, fused: bool = False) -> Any:
    """A diffusers model, changed: random weights, none of them as it would start (zero biases, unit norms)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(0.0, std, generator=generator)
        for module in model.modules():
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)) and module.weight is not None:
                module.weight.add_(1.0)
    model.to(dtype)
    if fused:
        model.fuse_qkv_projections()
    return model


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, name: str = "output") -> None:
    size = wanted.abs().max().item()
    assert got.shape == wanted.shape, name
    assert size > 0.01, f"{name}: too small to tell an error from none"
    assert (got - wanted).abs().max().item() <= tolerance * max(size, 1.0), name


def assert_same_gradients(
    ours: nn.Module, theirs: nn.Module, of_state: Callable[[Mapping[str, Tensor]], nn.Module], tolerance: float
) -> None:
    """of_state: the packed model of a state dict of theirs.

    A gradient is laid out as its weight is: loaded into a second model, theirs can be compared by our names. The
    separate projections of a fused model have none.
    """
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    wanted = of_state(grads)
    for (name, parameter), expected in zip(ours.named_parameters(), wanted.parameters(), strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, expected, tolerance, name)


def assert_same_state(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
