"""Wan weights of diffusers' WanTransformer3DModel, to and from the packed WanTransformer, bit for bit.

Layouts: "diffusers", as its files hold it, and "diffusers-fused", after its fuse_qkv_projections(), where the separate
projections are there as well.

    model = wan_from_diffusers(WanTransformer3DModel.from_pretrained(...))    # a model in memory
    model = wan_from_state(SafetensorsFolder("Wan2.1-T2V-14B/transformer"))   # files, read tensor by tensor
    ...
    diffusers_model.load_state_dict(wan_state(model))                         # and back

diffusers itself is not imported: a state dict and a configuration are plain data. Its pipelines pad every text to 512
tokens with zeros, and the video attends to that padding; a published model wants the same here, a text length of 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from knapformer import ArgumentError
from knapformer.models.diffusers_state import FUSED, Weights, our_config, projections, their_config
from knapformer.models.state_layout import Rows, StateLayout
from knapformer.models.wan import WanConfig, WanTransformer

WAN_LAYOUTS = ("diffusers", FUSED)
# Our fields in diffusers' words.
_WORDS = {
    "num_blocks": "num_layers",
    "num_heads": "num_attention_heads",
    "mlp_width": "ffn_dim",
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "text_channels": "text_dim",
    "time_channels": "freq_dim",
    "cross_attention_norm": "cross_attn_norm",
    "eps": "eps",
}
_FUSED_HERE = {"to_qkv": ("to_q", "to_k", "to_v"), "to_kv": ("to_k", "to_v")}


def wan_config(diffusers_config: Mapping[str, Any], max_text_tokens: int = 512) -> WanConfig:
    """The configuration of a WanTransformer3DModel (its `config`, or what its config.json holds) in our words.

    Raises ArgumentError for one with an image branch.
    """
    for name in ("image_dim", "added_kv_proj_dim"):
        if diffusers_config.get(name) is not None:
            raise ArgumentError(
                f"{name}: got {diffusers_config[name]!r}, expected None: a model without an image branch"
            )
    return WanConfig(
        **our_config(diffusers_config, _WORDS),
        out_channels=diffusers_config.get("out_channels") or diffusers_config["in_channels"],
        max_text_tokens=max_text_tokens,
    )


def diffusers_wan_config(config: WanConfig) -> dict[str, Any]:
    """The arguments of the WanTransformer3DModel of the same shape. Raises ArgumentError where there is none."""
    return {**their_config(config, _WORDS, {"rope_theta": 10000.0}), "out_channels": config.out_channels}


def detect_wan_layout(names: Iterable[str]) -> str:
    """Which of WAN_LAYOUTS a state dict with these names is. Raises ArgumentError for none."""
    found = set(names)
    if "patch_embedding.weight" not in found or "condition_embedder.time_proj.weight" not in found:
        raise ArgumentError("state_dict: got no condition_embedder.time_proj.weight, expected Wan weights of diffusers")
    return FUSED if any(name.endswith("attn1.to_qkv.weight") for name in found) else "diffusers"


def _fill(layout: StateLayout, model: WanTransformer, name: str) -> None:
    config: WanConfig = model.config
    layout.row_shapes["patch_embedding.weight"] = (config.in_channels, *config.patch_size)

    def there(module: str, num_rows: int) -> list[Rows]:
        attention, _, product = module.rpartition(".")
        if product in _FUSED_HERE:
            return projections(attention, product, _FUSED_HERE[product], config.d_model, name == FUSED)
        return [Rows(f"{module}.0" if product == "to_out" else module, num_rows)]

    layout.add_model(model, there)


_WAN = Weights(
    WanTransformer, WAN_LAYOUTS, detect_wan_layout, _fill, lambda diffusers_config, _: wan_config(diffusers_config)
)
wan_layout, load_wan_state, wan_state = _WAN.layout, _WAN.load, _WAN.state
wan_from_diffusers, wan_from_state = _WAN.from_diffusers, _WAN.from_state
