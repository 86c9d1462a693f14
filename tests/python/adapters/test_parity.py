"""`check`: diffusers' models packed are themselves, and what it says of an adapter that leaves something out."""

from __future__ import annotations

from typing import Any

import pytest
from adapters.cases import CASES, cases, of
from knapformer.adapters import check, flux, register, registry
from knapformer.adapters.chunks import Moved, RunBlock
from torch import Tensor

from knapformer import ArgumentError, StateError

MODEL: Any = cases()["flux"].model_class


@pytest.mark.parametrize("name", CASES)
def test_packed_is_sample_by_sample(name: str) -> None:
    class_name, fields = CASES[name]
    check(of(class_name).model_class, ranks=1, **fields)


class Wrong(flux.Flux):
    """Leaves the single blocks out."""

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        return super().compute(model, moved, lambda block, *args: block(*args) if len(args) > 3 else args[0])


def test_what_differs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))

    class Derived(MODEL):  # type: ignore[misc]
        pass

    register(Derived, Wrong)
    with pytest.raises(StateError) as raised:
        check(Derived, ranks=1)
    lines = str(raised.value).splitlines()
    assert lines[0] == "Derived, packed, against its own forward"
    for line, name in zip(lines[1:], ("packed", "checkpointed", "LoRA", "no samples", "called modules"), strict=True):
        assert line.startswith(name)
    assert "output of samples[" in lines[1] and "gradient of " in lines[1]
    assert "no gradient of single_transformer_blocks.0.norm.linear.weight (" in lines[4]
    assert "single_transformer_blocks.0 is not called (" in lines[5]


def test_residuals_behind_other_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux.Flux, "control_of", staticmethod(lambda block, num_blocks, num_controls: 0))
    with pytest.raises(
        StateError, match=r"packed +output of .*; gradient of samples\[\d\]\['controlnet_block_samples'\]"
    ):
        check(MODEL, ranks=1, num_single_layers=0)


@pytest.mark.parametrize(
    ("case", "lacking", "message"),
    [
        (
            "flux",
            {"packed": {}},
            r"transformer_blocks\.0: got FluxTransformerBlock with the forward of FluxTransformerBlock, which",
        ),
        (
            "flux",
            {"packed": {name: of for name, of in flux.Flux.packed.items() if name != "AdaLayerNormContinuous"}},
            r"AdaLayerNormContinuous.forward\(\) takes .* were given: if a module was called with Packed, it needs",
        ),
        (
            "flux",
            {"processors": ()},
            r"attn.processor: got FluxAttnProcessor, expected one of Adapter.processors, which has none",
        ),
        (
            "flux",
            {"in_parts": ("attn", "norm1", "norm")},
            r"called modules +transformer_blocks.0.norm1_context is not called \(2 are not\), expected a call, or A",
        ),
        (
            "z-image",
            {"refiners": ()},
            r"called modules +context_refiner.0.attention is not called \(2 are not\), expected .* Adapter.blocks or r",
        ),
    ],
)
def test_what_an_adapter_lacks_is_named(
    case: str, lacking: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class, adapter = cases()[case].model_class, cases()[case].adapter
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    register(model_class, type("Lacking", (adapter,), lacking | {"__module__": __name__}))
    with pytest.raises((ArgumentError, StateError), match=message):
        check(model_class, ranks=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # The class names the width of its text otherwise than FLUX does, and has a mask, which FLUX has not.
        (
            "encoder_hidden_states",
            "got no field joint_attention_dim, by which it is drawn, expected Adapter.conditions",
        ),
        ("encoder_attention_mask", "got nothing that draws it, expected Adapter.conditions"),
    ],
)
def test_an_argument_that_cannot_be_drawn_is_named(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hunyuan = cases()["hunyuan-video"]
    conditions = {other: draw for other, draw in hunyuan.adapter.conditions.items() if other != name}
    monkeypatch.setattr(hunyuan.adapter, "conditions", conditions)
    message = rf"{name}: {message}\['{name}'\]"
    with pytest.raises(ArgumentError, match=message):
        check(hunyuan.model_class, ranks=1)


def test_processes_share_the_samples() -> None:
    assert check(MODEL).endswith("\nshared by 2 ranks  the same")


def test_what_cannot_be_checked_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"ranks: got 3, expected one of 1, 2, 4"):
        check(MODEL, ranks=3)
    with pytest.raises(ArgumentError, match=r"transformer: got int, expected a class with an adapter"):
        check(int)
