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
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from knapformer import ArgumentError
from knapformer.models.diffusers_state import FUSED, Weights, our_config, projections, their_config
from knapformer.models.flux import FluxConfig, FluxTransformer
from knapformer.models.state_layout import Rows, StateLayout

FLUX_LAYOUTS = ("diffusers", FUSED, "original", "torchtitan")

# Our fields in diffusers' words.
_WORDS = {
    "num_double_blocks": "num_layers",
    "num_single_blocks": "num_single_layers",
    "num_heads": "num_attention_heads",
    "in_channels": "in_channels",
    "text_channels": "joint_attention_dim",
    "pooled_channels": "pooled_projection_dim",
    "guidance": "guidance_embeds",
}
# What FluxTransformer2DModel has no option for.
_FIXED_IN_DIFFUSERS = {"mlp_ratio": 4.0, "time_channels": 256, "rope_theta": 10000.0, "qkv_bias": True}


def flux_config(diffusers_config: Mapping[str, Any]) -> FluxConfig:
    """The configuration of a FluxTransformer2DModel (its `config`, or what its config.json holds) in our words."""
    out_channels = diffusers_config.get("out_channels") or diffusers_config["in_channels"]
    return FluxConfig(
        **our_config(diffusers_config, _WORDS),
        out_channels=out_channels * diffusers_config["patch_size"] ** 2,
        rope_axes=tuple(diffusers_config.get("axes_dims_rope", (16, 56, 56))),
    )


def diffusers_flux_config(config: FluxConfig) -> dict[str, Any]:
    """The arguments of the FluxTransformer2DModel of the same shape. Raises ArgumentError where there is none."""
    fields = their_config(config, _WORDS, _FIXED_IN_DIFFUSERS)
    return {**fields, "patch_size": 1, "out_channels": config.out_channels, "axes_dims_rope": config.rope_axes}


def detect_flux_layout(names: Iterable[str]) -> str:
    """Which of FLUX_LAYOUTS a state dict with these names is. Raises ArgumentError for none."""
    found = set(names)
    if "x_embedder.weight" in found:
        return FUSED if any(name.endswith("attn.to_qkv.weight") for name in found) else "diffusers"
    if "img_in.weight" in found:
        return "torchtitan" if any(name.endswith("norm.query_norm.weight") for name in found) else "original"
    raise ArgumentError("state_dict: got neither x_embedder.weight nor img_in.weight, expected FLUX weights")


def _read_config(diffusers_config: Mapping[str, Any], names: Iterable[str]) -> FluxConfig:
    """diffusers' configuration does not say whether its projections have a bias; the names of its tensors do."""
    found, first = set(names), "transformer_blocks.0.attn."
    has_bias = not any(
        f"{first}{name}.weight" in found and f"{first}{name}.bias" not in found for name in ("to_q", "to_qkv")
    )
    return dataclasses.replace(flux_config(diffusers_config), qkv_bias=has_bias)


def _fill(layout: StateLayout, model: FluxTransformer, name: str) -> None:
    if name in ("diffusers", FUSED):
        layout.add_model(model, functools.partial(_in_diffusers, model.config, name == FUSED))
        return
    # In torchtitan's words; norms' weights alone are called otherwise in the original.
    suffix = "_norm.scale" if name == "original" else "_norm.weight"
    layout.add_model(model, functools.partial(_in_original, model.config), lambda n: n.replace("_norm.weight", suffix))


def _in_diffusers(config: FluxConfig, fused: bool, module: str, num_rows: int) -> list[Rows]:
    d, of_image, of_text = config.d_model, ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    parent, _, product = module.rpartition(".")
    if product == "to_qkv":
        return projections(parent, "to_qkv", of_image, d, fused)
    if product == "add_qkv_proj":
        return projections(parent, "to_added_qkv", of_text, d, fused)
    if product == "proj_in":
        qkv = projections(f"{parent}.attn", "to_qkv", of_image, d, fused)
        return [*qkv, Rows(f"{parent}.proj_mlp", config.mlp_width)]
    return [Rows(f"{module}.0" if product == "to_out" else module, num_rows)]


_ORIGINAL = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "transformer_blocks.#.norm1.linear": "double_blocks.#.img_mod.lin",
    "transformer_blocks.#.norm1_context.linear": "double_blocks.#.txt_mod.lin",
    "transformer_blocks.#.attn.to_qkv": "double_blocks.#.img_attn.qkv",
    "transformer_blocks.#.attn.add_qkv_proj": "double_blocks.#.txt_attn.qkv",
    "transformer_blocks.#.attn.to_out": "double_blocks.#.img_attn.proj",
    "transformer_blocks.#.attn.to_add_out": "double_blocks.#.txt_attn.proj",
    "transformer_blocks.#.attn.norm_q": "double_blocks.#.img_attn.norm.query_norm",
    "transformer_blocks.#.attn.norm_k": "double_blocks.#.img_attn.norm.key_norm",
    "transformer_blocks.#.attn.norm_added_q": "double_blocks.#.txt_attn.norm.query_norm",
    "transformer_blocks.#.attn.norm_added_k": "double_blocks.#.txt_attn.norm.key_norm",
    "transformer_blocks.#.ff.net.0.proj": "double_blocks.#.img_mlp.0",
    "transformer_blocks.#.ff.net.2": "double_blocks.#.img_mlp.2",
    "transformer_blocks.#.ff_context.net.0.proj": "double_blocks.#.txt_mlp.0",
    "transformer_blocks.#.ff_context.net.2": "double_blocks.#.txt_mlp.2",
    "single_transformer_blocks.#.norm.linear": "single_blocks.#.modulation.lin",
    "single_transformer_blocks.#.proj_in": "single_blocks.#.linear1",
    "single_transformer_blocks.#.attn.norm_q": "single_blocks.#.norm.query_norm",
    "single_transformer_blocks.#.attn.norm_k": "single_blocks.#.norm.key_norm",
    "single_transformer_blocks.#.proj_out": "single_blocks.#.linear2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}


def _in_original(config: FluxConfig, module: str, num_rows: int) -> list[Rows]:
    blocks, _, rest = module.partition("blocks.")
    index, _, of_block = rest.partition(".")
    name = _ORIGINAL[f"{blocks}blocks.#.{of_block}" if rest else module].replace("#", index)
    if module == "norm_out.linear":  # shift before scale there, scale before shift here and in diffusers
        return [Rows(name, config.d_model, first=config.d_model), Rows(name, config.d_model)]
    return [Rows(name, num_rows)]


_FLUX = Weights(FluxTransformer, FLUX_LAYOUTS, detect_flux_layout, _fill, _read_config)
flux_layout, load_flux_state, flux_state = _FLUX.layout, _FLUX.load, _FLUX.state
flux_from_diffusers, flux_from_state = _FLUX.from_diffusers, _FLUX.from_state
