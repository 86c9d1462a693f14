"""The packed Wan transformer against diffusers' WanTransformer3DModel: outputs, gradients, and weights both ways.

diffusers knows no lengths: all videos of its batch have one shape, all texts one length, and all of it is attended to.
So samples of unequal shape or text are compared one at a time, each at its own; equal ones as one batch.

The tolerance in float64 is that of float32: there diffusers still computes norms and rotations in it.
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
from knapformer.models import WanBatch, WanTransformer, init_weights
from knapformer.models.diffusers_wan import (
    diffusers_wan_config,
    load_wan_state,
    wan_config,
    wan_from_diffusers,
    wan_from_state,
    wan_layout,
    wan_state,
)
from knapformer.models.patches import grid_of, unpatchify
from knapformer.models.state_layout import SafetensorsFolder
from torch import Tensor

from knapformer import ArgumentError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 2e-6}
SMALL: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 256,
    "ffn_dim": 96,
    "num_layers": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "patches in time": {"patch_size": (2, 1, 2)},
    "no norm before cross-attention": {"cross_attn_norm": False},
    "other channels out": {"out_channels": 3, "in_channels": 6},
    "other heads": {"num_attention_heads": 3, "attention_head_dim": 20, "eps": 1e-3},
}
SHAPES = [(2, 4, 6), (4, 2, 2), (2, 8, 4), (2, 4, 6)]  # (frames, height, width) of each video
TEXT_LENS = [5, 1, 9, 16]
Sample = tuple[Tensor, Tensor, Tensor]  # video, text, time step


def theirs(dtype: torch.dtype = torch.float32, fused: bool = False, **changes: Any) -> Any:
    return randomized(diffusers.WanTransformer3DModel(**{**SMALL, **changes}), dtype, fused)


def samples(model: Any, dtype: torch.dtype, shapes: list[tuple[int, int, int]], text_lens: list[int]) -> list[Sample]:
    """Time steps in float32, in which diffusers computes with them."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(model.config.in_channels, *shape, generator=generator, dtype=dtype),
            torch.randn(length, model.config.text_dim, generator=generator, dtype=dtype),
            1000 * torch.rand((), generator=generator),
        )
        for shape, length in zip(shapes, text_lens, strict=True)
    ]


def packed(model: WanTransformer, drawn: list[Sample]) -> WanBatch:
    videos, texts, timesteps = zip(*drawn, strict=True)
    return WanBatch.of_samples(videos, texts, torch.stack(timesteps), model.config.patch_size)


def our_outputs(model: WanTransformer, drawn: list[Sample]) -> list[Tensor]:
    batch, patch_size = packed(model, drawn), model.config.patch_size
    parts = model(batch).split(list(batch.video_lens))
    return [unpatchify(p, grid_of(s[0], patch_size), patch_size) for p, s in zip(parts, drawn, strict=True)]


def their_output(model: Any, *drawn: Sample) -> Tensor:
    """Of samples of one shape and one text length: (samples, channels, frames, height, width)."""
    videos, texts, timesteps = (torch.stack(part) for part in zip(*drawn, strict=True))
    out: Tensor = model(videos, timesteps, texts, return_dict=False)[0]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sample_is_diffusers_at_its_own_shape(variant: str, fused: bool, dtype: torch.dtype) -> None:
    model = theirs(dtype, fused, **VARIANTS[variant])
    ours = wan_from_diffusers(model)
    drawn = samples(model, dtype, SHAPES, TEXT_LENS)
    with torch.no_grad():
        for sample, out in zip(drawn, our_outputs(ours, drawn), strict=True):
            assert_close(out, their_output(model, sample)[0], TOLERANCE[dtype])


def test_a_batch_of_equal_shapes_is_diffusers_batch() -> None:
    """Texts padded with zeros to one length, as the published model's pipeline does."""
    model = theirs()
    ours = wan_from_diffusers(model)
    drawn = samples(model, torch.float32, [(2, 4, 6)] * 3, [16] * 3)
    for (_, text, _), length in zip(drawn, (4, 16, 0), strict=True):
        text[length:] = 0
    with torch.no_grad():
        for out, wanted in zip(our_outputs(ours, drawn), their_output(model, *drawn), strict=True):
            assert_close(out, wanted, 1e-5)


@separate_and_fused
def test_gradients_are_diffusers_gradients(fused: bool) -> None:
    model = theirs(torch.float64, fused)
    ours = wan_from_diffusers(model)
    drawn = samples(model, torch.float64, SHAPES, TEXT_LENS)
    outs = our_outputs(ours, drawn)
    weights = [torch.randn_like(out) for out in outs]
    torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum().backward()
    for sample, weight in zip(drawn, weights, strict=True):
        (their_output(model, sample)[0] * weight).sum().backward()
    assert_same_gradients(ours, model, lambda grads: wan_from_state(grads, ours.config), 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_come_back_bit_for_bit(variant: str, fused: bool, dtype: torch.dtype) -> None:
    model = theirs(dtype, fused, **VARIANTS[variant])
    assert_same_state(wan_state(wan_from_diffusers(model), layout_of(fused)), model.state_dict())


@separate_and_fused
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_into_diffusers_it_computes_the_same(variant: str, fused: bool, tmp_path: Any) -> None:
    """A model that was made here: diffusers builds its own from our configuration, loads and saves it."""
    config = wan_config(theirs(**VARIANTS[variant]).config)
    ours = WanTransformer(config)
    init_weights(ours, seed=11)
    model = diffusers.WanTransformer3DModel(**diffusers_wan_config(config))
    if fused:
        model.fuse_qkv_projections()
    model.load_state_dict(wan_state(ours, layout_of(fused)))
    if not fused:
        model.save_pretrained(tmp_path)  # refuses tensors that share memory
        files = SafetensorsFolder(tmp_path)
        model = diffusers.WanTransformer3DModel.from_config(files.config)
        model.load_state_dict(dict(files))
        again = wan_from_state(files)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    drawn = samples(model, torch.float32, SHAPES[:1], TEXT_LENS[:1])
    with torch.no_grad():
        assert_close(their_output(model, *drawn)[0], our_outputs(ours, drawn)[0], 1e-5)


def test_mixed_precision_is_diffusers_mixed_precision() -> None:
    """In bfloat16 both round at the same places: an output that is not computed in the same widths differs more."""
    model = theirs()
    # diffusers keeps norms, tables and the time embedding in float32; here parameters are of one dtype. Both start from
    # values that bfloat16 can hold.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    drawn = samples(model, torch.float32, SHAPES, TEXT_LENS)
    drawn = [(video.bfloat16(), text.bfloat16(), timestep) for video, text, timestep in drawn]
    exact = [their_output(model, (video.float(), text.float(), t))[0] for video, text, t in drawn]
    ours, half = wan_from_diffusers(model, torch.bfloat16), theirs().bfloat16()
    half.load_state_dict(model.state_dict())
    with torch.no_grad():
        for sample, out, wanted in zip(drawn, our_outputs(ours, drawn), exact, strict=True):
            our_error, their_error = (
                (got.float() - wanted).norm().item() for got in (out, their_output(half, sample)[0])
            )
            assert our_error <= 1.2 * their_error


def test_what_does_not_fit_is_named() -> None:
    model = theirs()
    state, config = model.state_dict(), wan_config(model.config)
    with pytest.raises(ArgumentError, match="image_dim: got 1280, expected None"):
        wan_config({**model.config, "image_dim": 1280})
    with pytest.raises(ArgumentError, match="expected Wan weights"):
        wan_from_state({"patch_embedding.weight": torch.zeros(1)}, config)
    with pytest.raises(ArgumentError, match=r"no blocks\.0\.norm2\.bias, blocks\.0\.norm2\.weight"):
        wan_from_state(theirs(cross_attn_norm=False).state_dict(), config)
    wrong = {**state, "patch_embedding.weight": torch.zeros(64, 4, 2, 2, 1)}
    with pytest.raises(ArgumentError, match=r"patch_embedding\.weight: got shape \(64, 4, 2, 2, 1\)"):
        wan_from_state(wrong, config)
    with pytest.raises(ArgumentError, match="whose configuration is not the layout's"):
        wan_layout(dataclasses.replace(config, num_blocks=1), "diffusers").load(wan_from_diffusers(model), {})
    with pytest.raises(ArgumentError, match=r"state_dict: got unknown blocks\.1"):
        load_wan_state(WanTransformer(dataclasses.replace(config, num_blocks=1)), state)
