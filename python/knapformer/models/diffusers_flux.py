"""FLUX weights of other implementations, to and from the packed FluxTransformer, bit for bit.

Layouts, by name:

    diffusers        FluxTransformer2DModel as its files hold it
    diffusers-fused  the same after its fuse_qkv_projections(); the separate projections are there as well
    original         the published checkpoint files (double_blocks.0.img_attn.qkv.weight, ...)
    torchtitan       its FLUX model: the original names, norms' weights called weight

    model = flux_from_diffusers(FluxTransformer2DModel.from_pretrained(...))    # a model in memory
    model = flux_from_state(SafetensorsFolder("FLUX.1-dev/transformer"))        # files, read tensor by tensor
    ...
    diffusers_model.load_state_dict(flux_state(model))                          # and back

diffusers itself is not imported: a state dict and a configuration are plain data. What the two models make of equal
weights is equal, too, with one thing to know: diffusers has no lengths, its samples attend to the padding of their
text. A sample whose text is padded to 512 tokens there has a text length of 512 here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from knapformer import ArgumentError
from knapformer.models.diffusers_state import Weights, projections
from knapformer.models.flux import FluxConfig, FluxTransformer
from knapformer.models.state_layout import Rows, StateLayout

FLUX_LAYOUTS = ("diffusers", "diffusers-fused", "original", "torchtitan")

# What FluxTransformer2DModel has no option for.
_FIXED_IN_DIFFUSERS = {"mlp_ratio": 4.0, "time_channels": 256, "rope_theta": 10000.0, "qkv_bias": True}


def flux_config(diffusers_config: Mapping[str, Any]) -> FluxConfig:
    """The configuration of a FluxTransformer2DModel (its `config`, or what its config.json holds) in our words."""
    return FluxConfig(
        num_double_blocks=diffusers_config["num_layers"],
        num_single_blocks=diffusers_config["num_single_layers"],
        d_model=diffusers_config["num_attention_heads"] * diffusers_config["attention_head_dim"],
        num_heads=diffusers_config["num_attention_heads"],
        in_channels=diffusers_config["in_channels"],
        out_channels=(diffusers_config.get("out_channels") or diffusers_config["in_channels"])
        * diffusers_config["patch_size"] ** 2,
        text_channels=diffusers_config["joint_attention_dim"],
        pooled_channels=diffusers_config["pooled_projection_dim"],
        rope_axes=tuple(diffusers_config.get("axes_dims_rope", (16, 56, 56))),
        guidance=diffusers_config["guidance_embeds"],
    )


def diffusers_flux_config(config: FluxConfig) -> dict[str, Any]:
    """The arguments of the FluxTransformer2DModel of the same shape. Raises ArgumentError where there is none."""
    for name, value in _FIXED_IN_DIFFUSERS.items():
        if getattr(config, name) != value:
            raise ArgumentError(f"{name}: got {getattr(config, name)!r}, expected {value!r}, which diffusers has fixed")
    return {
        "patch_size": 1,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_double_blocks,
        "num_single_layers": config.num_single_blocks,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text_channels,
        "pooled_projection_dim": config.pooled_channels,
        "guidance_embeds": config.guidance,
        "axes_dims_rope": config.rope_axes,
    }


def detect_flux_layout(names: Iterable[str]) -> str:
    """Which of FLUX_LAYOUTS a state dict with these names is. Raises ArgumentError for none."""
    found = set(names)
    if "x_embedder.weight" in found:
        return "diffusers-fused" if any(name.endswith("attn.to_qkv.weight") for name in found) else "diffusers"
    if "img_in.weight" in found:
        return "torchtitan" if any(name.endswith("norm.query_norm.weight") for name in found) else "original"
    raise ArgumentError("state_dict: got neither x_embedder.weight nor img_in.weight, expected FLUX weights")


def _table(config: FluxConfig, name: str) -> StateLayout:
    if name in ("diffusers", "diffusers-fused"):
        return _diffusers_layout(config, fused=name == "diffusers-fused")
    return _original_layout(config, "scale" if name == "original" else "weight")


def _read_config(diffusers_config: Mapping[str, Any], names: Iterable[str]) -> FluxConfig:
    return dataclasses.replace(flux_config(diffusers_config), qkv_bias=_has_qkv_bias(names))


def _has_qkv_bias(names: Iterable[str]) -> bool:
    found = set(names)
    first = "transformer_blocks.0.attn."
    return not any(
        f"{first}{name}.weight" in found and f"{first}{name}.bias" not in found for name in ("to_q", "to_qkv")
    )


def _diffusers_layout(config: FluxConfig, fused: bool) -> StateLayout:
    d, of_image, of_text = config.d_model, ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    layout = StateLayout(repeated=_diffusers_layout(config, fused=False) if fused else None)
    layout.same_linear("x_embedder", d)
    layout.same_linear("context_embedder", d)
    for embedder in _embedders(config):
        layout.same_linear(f"time_text_embed.{embedder}.linear_1", d)
        layout.same_linear(f"time_text_embed.{embedder}.linear_2", d)
    for i in range(config.num_double_blocks):
        block = f"transformer_blocks.{i}"
        layout.same_linear(f"{block}.norm1.linear", 6 * d)
        layout.same_linear(f"{block}.norm1_context.linear", 6 * d)
        attn = f"{block}.attn"
        image_qkv = projections(attn, "to_qkv", of_image, d, fused)
        text_qkv = projections(attn, "to_added_qkv", of_text, d, fused)
        layout.add_linear(f"{attn}.to_qkv", *image_qkv, bias=config.qkv_bias)
        layout.add_linear(f"{attn}.add_qkv_proj", *text_qkv, bias=config.qkv_bias)
        layout.add_linear(f"{attn}.to_out", Rows(f"{attn}.to_out.0", d))
        layout.same_linear(f"{attn}.to_add_out", d)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            layout.same(f"{attn}.{norm}.weight", config.head_dim)
        for ff in ("ff", "ff_context"):
            layout.same_linear(f"{block}.{ff}.net.0.proj", config.mlp_width)
            layout.same_linear(f"{block}.{ff}.net.2", d)
    for i in range(config.num_single_blocks):
        block = f"single_transformer_blocks.{i}"
        layout.same_linear(f"{block}.norm.linear", 3 * d)
        attn = f"{block}.attn"
        qkv = projections(attn, "to_qkv", of_image, d, fused)
        layout.add_linear(f"{block}.proj_in", *qkv, Rows(f"{block}.proj_mlp", config.mlp_width))
        for norm in ("norm_q", "norm_k"):
            layout.same(f"{attn}.{norm}.weight", config.head_dim)
        layout.same_linear(f"{block}.proj_out", d)
    layout.same_linear("norm_out.linear", 2 * d)
    layout.same_linear("proj_out", config.out_channels)
    return layout


def _original_layout(config: FluxConfig, norm_weight: str) -> StateLayout:
    layout, d = StateLayout(), config.d_model

    def add(here: str, there: str, num_rows: int, bias: bool = True) -> None:
        layout.add_linear(here, Rows(there, num_rows), bias=bias)

    def add_norms(here: str, there: str, prefix: str = "") -> None:
        for ours, theirs in (("q", "query_norm"), ("k", "key_norm")):
            layout.add(
                f"{here}.norm_{prefix}{ours}.weight", Rows(f"{there}.norm.{theirs}.{norm_weight}", config.head_dim)
            )

    add("x_embedder", "img_in", d)
    add("context_embedder", "txt_in", d)
    for here, there in _embedders(config).items():
        add(f"time_text_embed.{here}.linear_1", f"{there}.in_layer", d)
        add(f"time_text_embed.{here}.linear_2", f"{there}.out_layer", d)
    for i in range(config.num_double_blocks):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        add(f"{here}.norm1.linear", f"{there}.img_mod.lin", 6 * d)
        add(f"{here}.norm1_context.linear", f"{there}.txt_mod.lin", 6 * d)
        add(f"{here}.attn.to_qkv", f"{there}.img_attn.qkv", 3 * d, config.qkv_bias)
        add(f"{here}.attn.add_qkv_proj", f"{there}.txt_attn.qkv", 3 * d, config.qkv_bias)
        add(f"{here}.attn.to_out", f"{there}.img_attn.proj", d)
        add(f"{here}.attn.to_add_out", f"{there}.txt_attn.proj", d)
        add_norms(f"{here}.attn", f"{there}.img_attn")
        add_norms(f"{here}.attn", f"{there}.txt_attn", "added_")
        for ours, theirs in (("ff", "img_mlp"), ("ff_context", "txt_mlp")):
            add(f"{here}.{ours}.net.0.proj", f"{there}.{theirs}.0", config.mlp_width)
            add(f"{here}.{ours}.net.2", f"{there}.{theirs}.2", d)
    for i in range(config.num_single_blocks):
        here, there = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        add(f"{here}.norm.linear", f"{there}.modulation.lin", 3 * d)
        add(f"{here}.proj_in", f"{there}.linear1", 3 * d + config.mlp_width)
        add_norms(f"{here}.attn", there)
        add(f"{here}.proj_out", f"{there}.linear2", d)
    # Shift before scale there, scale before shift here and in diffusers.
    last = "final_layer.adaLN_modulation.1"
    layout.add_linear("norm_out.linear", Rows(last, d, first=d), Rows(last, d))
    add("proj_out", "final_layer.linear", config.out_channels)
    return layout


def _embedders(config: FluxConfig) -> dict[str, str]:
    """Their names in diffusers and here, and in the original layout."""
    guidance = {"guidance_embedder": "guidance_in"} if config.guidance else {}
    return {"timestep_embedder": "time_in", **guidance, "text_embedder": "vector_in"}


_FLUX = Weights(FluxTransformer, FLUX_LAYOUTS, detect_flux_layout, _table, _read_config)
flux_layout, load_flux_state, flux_state = _FLUX.layout, _FLUX.load, _FLUX.state
flux_from_diffusers, flux_from_state = _FLUX.from_diffusers, _FLUX.from_state
