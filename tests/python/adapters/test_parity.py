"""What `check` says of an adapter that leaves something out; what a packed call keeps, which it does not say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from adapters.cases import cases
from knapformer.adapters import check, flux, register, registry
from knapformer.adapters.packed import Moved, RunBlock
from knapformer.adapters.parity import SmallModel
from torch import Tensor, nn

from knapformer import ArgumentError, StateError

MODEL: Any = cases()["flux"].model_class


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


def test_a_packed_call_keeps_as_much_for_the_backward_pass() -> None:
    small = SmallModel(MODEL, controlled=True)
    model, samples = small.make(), small.samples()
    own = sum(kept_bytes(model, partial(small.adapter.expected, model, sample)) for sample in samples)
    small.balance(model)
    packed, none = (kept_bytes(model, partial(model, of)) / own for of in (samples, []))
    assert 0.7 < packed < 1.2 and none < 0.1


def kept_bytes(model: nn.Module, call: Callable[[], Any]) -> int:
    held = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = call()  # noqa: F841  (holds the graph, so that no memory is taken twice)
    return sum(held.values())


def test_what_cannot_be_checked_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"ranks: got 3, expected one of 1, 2, 4"):
        check(MODEL, ranks=3)
    with pytest.raises(ArgumentError, match=r"transformer: got int, expected a class with an adapter"):
        check(int)
