"""What loading the weights of diffusers' models has in common, whichever the model. diffusers is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from knapformer import ArgumentError
from knapformer.models.state_layout import Rows

_Config = TypeVar("_Config")
_Model = TypeVar("_Model", bound=nn.Module)


def carried_config(state: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """diffusers' configuration, which a SafetensorsFolder may carry. Raises ArgumentError where there is none."""
    config: Mapping[str, Any] | None = getattr(state, "config", None)
    if not config:
        raise ArgumentError("config: got none, expected one, or a state dict that carries diffusers' config.json")
    return config


def empty_model(
    model: Callable[[_Config], _Model], config: _Config, dtype: torch.dtype, device: torch.device | str
) -> _Model:
    """A model to load into: memory without values."""
    with torch.device("meta"):
        built = model(config)
    return built.to(dtype).to_empty(device=device)


def projections(attention: str, fused_name: str, names: tuple[str, ...], num_rows: int, fused: bool) -> list[Rows]:
    """Products of an attention module, of `num_rows` rows each, as they are before or after fuse_qkv_projections()."""
    if fused:
        return [Rows(f"{attention}.{fused_name}", num_rows * len(names))]
    return [Rows(f"{attention}.{name}", num_rows) for name in names]
