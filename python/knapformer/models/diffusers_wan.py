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

import math
from collections.abc import Iterable, Mapping
from typing import Any

from knapformer import ArgumentError
from knapformer.models.diffusers_state import Weights, projections
from knapformer.models.state_layout import Rows, StateLayout
from knapformer.models.wan import WanConfig, WanTransformer

WAN_LAYOUTS = ("diffusers", "diffusers-fused")


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
        num_blocks=diffusers_config["num_layers"],
        d_model=diffusers_config["num_attention_heads"] * diffusers_config["attention_head_dim"],
        num_heads=diffusers_config["num_attention_heads"],
        mlp_width=diffusers_config["ffn_dim"],
        in_channels=diffusers_config["in_channels"],
        out_channels=diffusers_config.get("out_channels") or diffusers_config["in_channels"],
        patch_size=tuple(diffusers_config["patch_size"]),
        text_channels=diffusers_config["text_dim"],
        time_channels=diffusers_config["freq_dim"],
        cross_attention_norm=diffusers_config["cross_attn_norm"],
        eps=diffusers_config["eps"],
        max_text_tokens=max_text_tokens,
    )


def diffusers_wan_config(config: WanConfig) -> dict[str, Any]:
    """The arguments of the WanTransformer3DModel of the same shape. Raises ArgumentError where there is none."""
    if config.rope_theta != 10000.0:
        raise ArgumentError(f"rope_theta: got {config.rope_theta!r}, expected 10000.0, which diffusers has fixed")
    return {
        "patch_size": config.patch_size,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "text_dim": config.text_channels,
        "freq_dim": config.time_channels,
        "ffn_dim": config.mlp_width,
        "num_layers": config.num_blocks,
        "cross_attn_norm": config.cross_attention_norm,
        "eps": config.eps,
    }


def detect_wan_layout(names: Iterable[str]) -> str:
    """Which of WAN_LAYOUTS a state dict with these names is. Raises ArgumentError for none."""
    found = set(names)
    if "patch_embedding.weight" not in found or "condition_embedder.time_proj.weight" not in found:
        raise ArgumentError("state_dict: got no condition_embedder.time_proj.weight, expected Wan weights of diffusers")
    return "diffusers-fused" if any(name.endswith("attn1.to_qkv.weight") for name in found) else "diffusers"


def _layout(config: WanConfig, fused: bool) -> StateLayout:
    layout, d = StateLayout(repeated=_layout(config, fused=False) if fused else None), config.d_model
    layout.same_linear("patch_embedding", d)
    layout.row_shapes["patch_embedding.weight"] = (config.in_channels, *config.patch_size)
    for name in (
        "time_embedder.linear_1",
        "time_embedder.linear_2",
        "text_embedder.linear_1",
        "text_embedder.linear_2",
    ):
        layout.same_linear(f"condition_embedder.{name}", d)
    layout.same_linear("condition_embedder.time_proj", 6 * d)
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        for attn, joined, separate in (
            (f"{block}.attn1", "to_qkv", ("to_q", "to_k", "to_v")),
            (f"{block}.attn2", "to_kv", ("to_k", "to_v")),
        ):
            layout.add_linear(f"{attn}.{joined}", *projections(attn, joined, separate, d, fused))
            layout.add_linear(f"{attn}.to_out", Rows(f"{attn}.to_out.0", d))
            for norm in ("norm_q", "norm_k"):
                layout.same(f"{attn}.{norm}.weight", d)
        layout.same_linear(f"{block}.attn2.to_q", d)
        if config.cross_attention_norm:
            layout.same_linear(f"{block}.norm2", d)
        layout.same_linear(f"{block}.ffn.net.0.proj", config.mlp_width)
        layout.same_linear(f"{block}.ffn.net.2", d)
        layout.same(f"{block}.scale_shift_table", 1)
    layout.same_linear("proj_out", config.out_channels * math.prod(config.patch_size))
    layout.same("scale_shift_table", 1)
    return layout


_WAN = Weights(
    WanTransformer,
    WAN_LAYOUTS,
    detect_wan_layout,
    lambda config, name: _layout(config, fused=name == "diffusers-fused"),
    lambda diffusers_config, _: wan_config(diffusers_config),
)
wan_layout, load_wan_state, wan_state = _WAN.layout, _WAN.load, _WAN.state
wan_from_diffusers, wan_from_state = _WAN.from_diffusers, _WAN.from_state
