"""The packed FLUX transformer against diffusers' FluxTransformer2DModel: outputs, gradients, and weights both ways.

diffusers knows no lengths: every sample of its batch has the same number of text and image tokens, and all of them are
attended to. So samples of unequal length are compared one at a time, each at its own length, or padded in one batch
with a mask over keys, which FluxTransformer2DModel passes on to its attention.

The tolerance in float64 is that of float32: there diffusers still computes rotations and time embeddings in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from diffusers_checks import (
    assert_close,
    assert_same_gradients,
    assert_same_state,
    diffusers,
    layout_of,
    randomized,
    separate_and_fused,
)
from knapformer.models import FluxBatch, FluxConfig, build_model, init_weights
from knapformer.models.diffusers_flux import (
    FLUX_LAYOUTS,
    detect_flux_layout,
    diffusers_flux_config,
    flux_config,
    flux_from_diffusers,
    flux_from_state,
    flux_layout,
    flux_state,
    load_flux_state,
)
from knapformer.models.flux import FluxTransformer
from knapformer.models.state_layout import SafetensorsFolder
from torch import Tensor, nn

from knapformer import ArgumentError

FluxAttention = pytest.importorskip("diffusers.models.transformers.transformer_flux").FluxAttention

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
SMALL: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_embeds": True},
    "no guidance": {"guidance_embeds": False},
    "only double blocks": {"num_single_layers": 0},
    "only single blocks": {"num_layers": 0, "guidance_embeds": True},
    "patches": {"patch_size": 2, "out_channels": 3},
    "other heads": {"attention_head_dim": 32, "num_attention_heads": 3, "axes_dims_rope": (8, 12, 12)},
}


def theirs(dtype: torch.dtype = torch.float32, fused: bool = False, **changes: Any) -> Any:
    return randomized(diffusers.FluxTransformer2DModel(**{**SMALL, **changes}), dtype, fused)


def theirs_without_qkv_bias(fused: bool) -> Any:
    """diffusers has no argument for it, but its attention module has."""
    model = diffusers.FluxTransformer2DModel(**SMALL)
    for block in model.transformer_blocks:
        old, dim = block.attn, model.inner_dim
        block.attn = FluxAttention(
            dim, heads=old.heads, dim_head=old.head_dim, added_kv_proj_dim=dim, out_dim=dim, context_pre_only=False,
            bias=False, added_proj_bias=False, eps=1e-6,
        )  # fmt: skip
    return randomized(model, fused=fused)


def samples(config: FluxConfig, lens: list[tuple[int, int]], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """(text tokens, image tokens) of each; time steps in float32, in which diffusers computes with them."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return [
        {
            "image": normal(num_image, config.in_channels),
            "image_ids": torch.randint(0, 30, (num_image, 3), generator=generator),
            "text": normal(num_text, config.text_channels),
            "text_ids": torch.randint(0, 5, (num_text, 3), generator=generator),
            "pooled": normal(config.pooled_channels),
            "timestep": torch.rand((), generator=generator),
            "guidance": 4 * torch.rand((), generator=generator),
        }
        for num_text, num_image in lens
    ]


def packed(drawn: list[dict[str, Tensor]]) -> FluxBatch:
    return FluxBatch(
        **{name: torch.cat([s[name] for s in drawn]) for name in ("image", "image_ids", "text", "text_ids")},
        **{name: torch.stack([s[name] for s in drawn]) for name in ("pooled", "timestep", "guidance")},
        image_lens=[len(s["image"]) for s in drawn],
        text_lens=[len(s["text"]) for s in drawn],
    )


def their_output(model: Any, *drawn: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
    """Of samples of equal lengths and positions: (samples, image tokens, out_channels)."""
    out: Tensor = model(
        hidden_states=torch.stack([s["image"] for s in drawn]),
        encoder_hidden_states=torch.stack([s["text"] for s in drawn]),
        pooled_projections=torch.stack([s["pooled"] for s in drawn]),
        timestep=torch.stack([s["timestep"] for s in drawn]),
        img_ids=drawn[0]["image_ids"],
        txt_ids=drawn[0]["text_ids"],
        guidance=torch.stack([s["guidance"] for s in drawn]) if model.config.guidance_embeds else None,
        joint_attention_kwargs=None if mask is None else {"attention_mask": mask},
        return_dict=False,
    )[0]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sample_is_diffusers_at_its_own_length(variant: str, fused: bool, dtype: torch.dtype) -> None:
    model = theirs(dtype, fused, **VARIANTS[variant])
    ours = flux_from_diffusers(model)
    drawn = samples(ours.config, [(5, 12), (1, 30), (7, 7), (5, 12), (16, 1)], dtype)
    with torch.no_grad():
        outs = ours(packed(drawn)).split([len(s["image"]) for s in drawn])
        for sample, out in zip(drawn, outs, strict=True):
            assert_close(out, their_output(model, sample)[0], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packed_here_is_padded_there(dtype: torch.dtype) -> None:
    """One batch of diffusers with every sample padded to the longest, and padding masked out as keys."""
    model = theirs(dtype, guidance_embeds=True)
    ours = flux_from_diffusers(model)
    drawn = samples(ours.config, [(5, 12), (2, 30), (8, 24), (1, 6)], dtype)
    num_text, num_image = 8, 30
    text_ids = torch.zeros(num_text, 3, dtype=torch.int64)
    image_ids = torch.stack([torch.zeros(30), torch.arange(30) // 6, torch.arange(30) % 6], 1).long()  # rows of 6
    mask = torch.zeros(len(drawn), 1, 1, num_text + num_image, dtype=torch.bool)
    padded = []
    for i, sample in enumerate(drawn):
        n_text, n_image = len(sample["text"]), len(sample["image"])
        mask[i, ..., :n_text] = mask[i, ..., num_text : num_text + n_image] = True
        wide = {name: torch.full((rows, sample[name].shape[1]), 9.0, dtype=dtype)
                for name, rows in (("text", num_text), ("image", num_image))}  # fmt: skip
        wide["text"][:n_text], wide["image"][:n_image] = sample["text"], sample["image"]
        padded.append({**sample, **wide, "text_ids": text_ids, "image_ids": image_ids})
        sample["text_ids"], sample["image_ids"] = text_ids[:n_text], image_ids[:n_image]
    with torch.no_grad():
        outs = ours(packed(drawn)).split([len(s["image"]) for s in drawn])
        for out, wanted in zip(outs, their_output(model, *padded, mask=mask), strict=True):
            assert_close(out, wanted[: len(out)], TOLERANCE[dtype])


def test_text_padding_counts_as_in_diffusers_where_it_is_given_as_text() -> None:
    """What a published model was trained with: its text padded with zeros and no mask."""
    model = theirs()
    ours = flux_from_diffusers(model)
    (sample,) = samples(ours.config, [(9, 12)], torch.float32)
    sample["text"][4:] = 0
    short = {**sample, "text": sample["text"][:4], "text_ids": sample["text_ids"][:4]}
    with torch.no_grad():
        wanted = their_output(model, sample)[0]
        assert_close(ours(packed([sample])), wanted, 1e-5)
        assert (ours(packed([short])) - wanted).abs().max() > 1e-3


@separate_and_fused
def test_gradients_are_diffusers_gradients(fused: bool) -> None:
    model = theirs(torch.float64, fused, guidance_embeds=True)
    ours = flux_from_diffusers(model)
    drawn = samples(ours.config, [(5, 12), (3, 20)], torch.float64)
    out = ours(packed(drawn))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    for sample, part in zip(drawn, weight.split([12, 20]), strict=True):
        (their_output(model, sample)[0] * part).sum().backward()
    assert_same_gradients(ours, model, lambda grads: flux_from_state(grads, ours.config), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_come_back_bit_for_bit(variant: str, fused: bool, dtype: torch.dtype) -> None:
    model = theirs(dtype, fused, **VARIANTS[variant])
    assert_same_state(flux_state(flux_from_diffusers(model), layout_of(fused)), model.state_dict())


@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_into_diffusers_it_computes_the_same(variant: str, fused: bool, tmp_path: Any) -> None:
    """A model that was made here: diffusers builds its own from our configuration, loads, saves and reads again."""
    config = flux_config(theirs(**VARIANTS[variant]).config)
    ours = build_model(config)
    assert isinstance(ours, FluxTransformer)
    init_weights(ours, seed=11)
    model = diffusers.FluxTransformer2DModel(**diffusers_flux_config(config))
    if fused:
        model.fuse_qkv_projections()
    model.load_state_dict(flux_state(ours, layout_of(fused)))
    if not fused:
        model.save_pretrained(tmp_path)  # refuses tensors that share memory
        model = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    (sample,) = samples(config, [(5, 12)], torch.float32)
    with torch.no_grad():
        assert_close(their_output(model, sample)[0], ours(packed([sample])), 1e-5)


def test_files_are_read_with_their_configuration(tmp_path: Any) -> None:
    model = theirs(guidance_embeds=True)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_state(flux_state(flux_from_state(SafetensorsFolder(tmp_path))), model.state_dict())
    half = flux_from_state(SafetensorsFolder(tmp_path), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@separate_and_fused
def test_projections_without_bias(fused: bool) -> None:
    model = theirs_without_qkv_bias(fused)
    ours = flux_from_diffusers(model)
    assert not ours.config.qkv_bias and ours.transformer_blocks[0].attn.to_qkv.bias is None
    (sample,) = samples(ours.config, [(5, 12)], torch.float32)
    with torch.no_grad():
        assert_close(ours(packed([sample])), their_output(model, sample)[0], 1e-5)
    assert_same_state(flux_state(ours, layout_of(fused)), model.state_dict())


def test_after_fusing_the_fused_projections_are_the_ones_that_count() -> None:
    """diffusers keeps the separate ones, which training leaves behind."""
    model = theirs(fused=True)
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_qkv.weight.mul_(1.5)
        model.single_transformer_blocks[1].attn.to_qkv.bias.add_(0.5)
    ours = flux_from_diffusers(model)
    (sample,) = samples(ours.config, [(5, 12)], torch.float32)
    with torch.no_grad():
        assert_close(ours(packed([sample])), their_output(model, sample)[0], 1e-5)


def test_the_models_share_no_memory() -> None:
    model = theirs()
    ours = flux_from_diffusers(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert_same_state(model.state_dict(), before)


@pytest.mark.parametrize("norm_weight", ["scale", "weight"])
def test_the_published_files_are_read_as_diffusers_reads_them(norm_weight: str) -> None:
    """Against diffusers' own converter. It has the width of the published model fixed, so columns are few instead."""
    convert = pytest.importorskip(
        "diffusers.loaders.single_file_utils"
    ).convert_flux_transformer_checkpoint_to_diffusers
    config = FluxConfig(num_double_blocks=2, num_single_blocks=2)
    original, layout = flux_layout(config, "original"), flux_layout(config, "diffusers")
    heights: dict[str, int] = {}
    for rows in (rows for parts in original.parameters.values() for rows in parts):
        heights[rows.name] = max(heights.get(rows.name, 0), rows.first + rows.count)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(height, *([2] if name.endswith(".weight") else []), generator=generator)
        for name, height in heights.items()
    }
    wanted = convert(dict(state))
    assert wanted.keys() == layout.names()
    if norm_weight == "weight":
        state = {name.replace("_norm.scale", "_norm.weight"): value for name, value in state.items()}
    assert detect_flux_layout(state) == ("original" if norm_weight == "scale" else "torchtitan")

    # A module of the right names and these shapes.
    holder = FewColumns(config, {name: wanted[parts[0].name].shape[1:] for name, parts in layout.parameters.items()})
    flux_layout(config, detect_flux_layout(state)).load(holder, state)
    assert_same_state(layout.save(holder), wanted)
    assert_same_state(flux_layout(config, detect_flux_layout(state)).save(holder), state)


class FewColumns(nn.Module):
    """Parameters with the names and rows of a FluxTransformer's, but other columns."""

    def __init__(self, config: FluxConfig, columns: dict[str, torch.Size]) -> None:
        super().__init__()
        for name, parts in flux_layout(config, "diffusers").parameters.items():
            module: nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]
            height = sum(rows.count for rows in parts)
            module.register_parameter(leaf, nn.Parameter(torch.full((height, *columns[name]), float("nan"))))


@pytest.mark.parametrize("layout", FLUX_LAYOUTS)
def test_every_layout_comes_back(layout: str) -> None:
    config = dataclasses.replace(flux_config(theirs(guidance_embeds=True).config), qkv_bias=layout != "torchtitan")
    ours, other = FluxTransformer(config), FluxTransformer(config)
    init_weights(ours, 1)
    init_weights(other, 2)
    state = flux_state(ours, layout)
    assert detect_flux_layout(state) == layout
    load_flux_state(other, state)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_what_does_not_fit_is_named() -> None:
    model = theirs()
    state, config = model.state_dict(), flux_config(model.config)
    del state["transformer_blocks.1.attn.to_k.weight"]
    with pytest.raises(ArgumentError, match=r"no transformer_blocks\.1\.attn\.to_k\.weight"):
        flux_from_state(state, config)
    with pytest.raises(ArgumentError, match=r"unknown lora\.weight"):
        flux_from_state({**model.state_dict(), "lora.weight": torch.zeros(1)}, config)
    with pytest.raises(ArgumentError, match=r"x_embedder\.bias: got shape \(3,\), expected \(64,\)"):
        flux_from_state({**model.state_dict(), "x_embedder.bias": torch.zeros(3)}, config)
    with pytest.raises(ArgumentError, match=r"guidance_embedder"):
        flux_from_state(theirs(guidance_embeds=True).state_dict(), config)
    with pytest.raises(ArgumentError, match="expected FLUX weights"):
        flux_from_state({"weight": torch.zeros(1)}, config)
    with pytest.raises(ArgumentError, match="config: got none"):
        flux_from_state(model.state_dict())
    with pytest.raises(ArgumentError, match="layout: got 'hf'"):
        flux_layout(config, "hf")
    with pytest.raises(ArgumentError, match=r"mlp_ratio: got 2\.0, expected 4\.0"):
        diffusers_flux_config(dataclasses.replace(config, mlp_ratio=2.0))
