"""What `balance` and packed calls refuse, since a packed call would not compute what the model itself does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters.cases import assert_gradients_equal, cases, of, packed_gradients
from knapformer.adapters.parity import SmallModel, one_by_one, relative_error

import knapformer

CASE = cases()["flux"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flux", r"transformer_blocks\[0\].attn: got fused projections, expected transformer.unfuse_qkv_projections"),
        ("wan", r"blocks\[0\].attn1: got fused projections, expected transformer.unfuse_qkv_projections"),
        (
            "sd3",
            r"transformer_blocks\[0\].attn.processor: got FusedJointAttnProcessor2_0, expected JointAttnProcessor2",
        ),
    ],
)
def test_fused_projections_are_refused(name: str, message: str) -> None:
    """Until they are undone, also where diffusers leaves its flag and the fused weights on the modules."""
    case = cases()[name]
    model: Any = knapformer.balance(case.make())
    samples = case.samples()
    model.fuse_qkv_projections()
    with pytest.raises(knapformer.StateError, match=message):
        model(samples)
    model.unfuse_qkv_projections()
    outputs, expected = one_by_one(knapformer.unbalance(model), samples)
    assert all(relative_error(p, o) <= 1e-5 for p, o in zip(knapformer.balance(model)(samples), outputs, strict=True))
    assert_gradients_equal(packed_gradients(model, samples), expected)


def test_what_cannot_be_packed_is_refused() -> None:
    model: Any = CASE.make()
    model.transformer_blocks[1].attn.processor = type("OtherProcessor", (), {})()
    with pytest.raises(
        knapformer.StateError, match=r"transformer_blocks\[1\].attn.processor: got OtherProcessor, expected FluxAttnP"
    ):
        knapformer.balance(model)
    model = knapformer.balance(CASE.make())
    model.single_transformer_blocks[0].attn.processor._parallel_config = object()
    with pytest.raises(knapformer.StateError, match=r"single_transformer_blocks\[0\].attn.processor: .*context parall"):
        model(CASE.samples())


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        (of("SD3Transformer2DModel", dual_attention_layers=(0,)), r"dual_attention_layers \(0,\), .* without"),
        (of("QwenImageTransformer2DModel", guidance_embeds=True), "guidance_embeds True, expected one without"),
        (of("SkyReelsV2Transformer3DModel", num_frame_per_block=2), "num_frame_per_block 2, expected 1"),
    ],
)
def test_a_model_that_is_set_to_compute_something_else_is_refused(case: SmallModel, setting: str) -> None:
    with pytest.raises(knapformer.StateError, match=f"transformer: got a model with {setting}"):
        knapformer.balance(case.make())


def test_a_cache_of_diffusers_is_refused_in_a_packed_call() -> None:
    """Its hooks take the shapes of diffusers' own calls, or sit on modules that a packed call does not call."""
    hooks = pytest.importorskip("diffusers.hooks")
    model: Any = knapformer.balance(CASE.make())
    samples = CASE.samples()
    expected = model(samples)
    model.enable_cache(hooks.FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(knapformer.StateError, match=r"cache: got one of diffusers, expected none in a packed call"):
        model(samples)
    model.disable_cache()
    assert torch.equal(model(samples)[0], expected[0])
