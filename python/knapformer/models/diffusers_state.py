"""What loading and saving the weights of diffusers' models has in common, whichever the model. It is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.models.config import BaseConfig
from knapformer.models.model import PackedModel
from knapformer.models.state_layout import Rows, StateLayout

FUSED = "diffusers-fused"  # the layout after fuse_qkv_projections(), where the separate projections are there as well

_Config = TypeVar("_Config")
_Model = TypeVar("_Model", bound=PackedModel)


@dataclass(frozen=True)
class Weights(Generic[_Config, _Model]):
    """The weights of one packed model, to and from the layouts of state dicts that they are known in."""

    model: Callable[[_Config], _Model]
    layouts: tuple[str, ...]
    detect: Callable[[Iterable[str]], str]  # which of `layouts` tensors with these names are; or ArgumentError
    fill: Callable[[StateLayout, _Model, str], None]  # with all parameters of a model, for one of `layouts`
    read_config: Callable[[Mapping[str, Any], Iterable[str]], _Config]  # from diffusers' words and the tensors' names

    def layout(self, config: _Config, name: str) -> StateLayout:
        """The table of a layout for models of a configuration."""
        if name not in self.layouts:
            raise ArgumentError(f"layout: got {name!r}, expected one of {', '.join(self.layouts)}")
        layout = StateLayout(repeated=self.layout(config, "diffusers") if name == FUSED else None)
        with torch.device("meta"):
            self.fill(layout, self.model(config), name)
        return layout

    def from_diffusers(self, transformer: Any, dtype: torch.dtype | None = None) -> _Model:
        """The packed model of diffusers' one, its projections fused or not, on that model's device.

        dtype: of the parameters, by default the other model's. Nothing is shared between the two models.
        """
        state, device = transformer.state_dict(), next(transformer.parameters()).device
        return self.from_state(state, self.read_config(transformer.config, state), dtype, device)

    def from_state(
        self,
        state: Mapping[str, Tensor],
        config: _Config | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> _Model:
        """The packed model of a state dict in any of the layouts.

        config: of the packed model; may be left out for a SafetensorsFolder whose config.json is there. dtype: of the
        parameters, by default the state's.
        """
        if config is None:
            carried: Mapping[str, Any] | None = getattr(state, "config", None)
            if not carried:
                raise ArgumentError(
                    "config: got none, expected one, or a state dict that carries diffusers' config.json"
                )
            config = self.read_config(carried, state)
        table = self.layout(config, self.detect(state))
        first = next(iter(table.parameters.values()))[0].name
        with torch.device("meta"):
            model = self.model(config)
        model = model.to(dtype or state[first].dtype).to_empty(device=device)
        table.load(model, state)
        return model

    def load(self, model: _Model, state: Mapping[str, Tensor]) -> None:
        """Copies a state dict in any of the layouts into a model, plain or sharded (see StateLayout.load)."""
        self.layout(model.config, self.detect(state)).load(model, state)

    def state(self, model: _Model, layout: str = "diffusers", keep: bool = True) -> dict[str, Tensor]:
        """The model's weights as a state dict of a layout, on the CPU. Of a sharded model every rank calls it.

        keep: whether this rank wants the result (see StateLayout.save).
        """
        return self.layout(model.config, layout).save(model, keep)


def our_config(diffusers_config: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """The fields that differ from diffusers' by name alone, and the width. words: their name of each of our fields."""
    width = diffusers_config["num_attention_heads"] * diffusers_config["attention_head_dim"]
    return {"d_model": width, **{ours: diffusers_config[theirs] for ours, theirs in words.items()}}


def their_config(config: BaseConfig, words: Mapping[str, str], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse. fixed: what theirs has no option for. Raises ArgumentError where ours differs in that."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ArgumentError(f"{name}: got {getattr(config, name)!r}, expected {value!r}, which diffusers has fixed")
    return {"attention_head_dim": config.head_dim, **{theirs: getattr(config, ours) for ours, theirs in words.items()}}


def projections(attention: str, fused_name: str, names: tuple[str, ...], num_rows: int, fused: bool) -> list[Rows]:
    """Products of an attention module, of `num_rows` rows each, as they are before or after fuse_qkv_projections()."""
    if fused:
        return [Rows(f"{attention}.{fused_name}", num_rows * len(names))]
    return [Rows(f"{attention}.{name}", num_rows) for name in names]
