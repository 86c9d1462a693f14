"""Which classes `balance` takes for those that an adapter knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters.cases import SIZES, Sample, cases
from torch import nn

import knapformer

CASE = cases()["flux"]


def samples_of() -> list[Sample]:
    return [CASE.sample(*size, seed) for seed, size in enumerate(SIZES[:3])]


def test_a_class_with_a_forward_of_its_own_needs_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed call would leave out what it adds."""
    from knapformer.adapters import flux, register, registry

    model: Any = CASE.make()

    class Derived(type(model)):  # type: ignore[misc]
        pass

    class Doubling(Derived):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return (2 * super().forward(*args, **kwargs).sample,)

    model.__class__ = Derived
    assert knapformer.unbalance(knapformer.balance(model)) is model
    model.__class__ = Doubling
    message = (
        r"transformer: got Doubling, with a forward of its own in place of FluxTransformer2DModel's, expected an ad"
    )
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    register(Doubling, flux.Flux)
    assert knapformer.balance(model) is model


def of_another_module(of: type, forward: Callable[..., Any] | None = None) -> type:
    """A class like this one, with its name, as in a user's copy of diffusers' file."""
    own = dict(of.__dict__) if forward is None else {**of.__dict__, "forward": forward}
    return type(of.__name__, of.__bases__, {**own, "__module__": "lab.models"})


def test_a_class_that_only_has_the_name_needs_an_adapter() -> None:
    model: Any = CASE.make()
    model.__class__ = of_another_module(type(model))
    with pytest.raises(knapformer.ArgumentError, match=r"transformer: got FluxTransformer2DModel of lab.models, expe"):
        knapformer.balance(model)


def test_an_adapter_for_a_class_of_the_same_name_leaves_that_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapformer.adapters import flux, register, registry

    class Silent(flux.Flux):
        def head(self, model: Any, x: torch.Tensor, home: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
            predictions, out = super().head(model, x, home)
            return [0 * p for p in predictions], out

    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    models: list[Any] = [CASE.make(), CASE.make()]
    models[0].__class__ = of_another_module(type(models[0]))
    register(type(models[0]), Silent)
    own, of_diffusers = (knapformer.balance(model)(samples_of())[0] for model in models)
    assert own.abs().max() == 0
    assert of_diffusers.abs().max() > 0


def test_a_processor_that_only_has_the_name_is_refused() -> None:
    model: Any = CASE.make()
    processor = model.transformer_blocks[0].attn.processor
    processor.__class__ = of_another_module(type(processor))
    message = r"transformer_blocks\[0\].attn.processor: got FluxAttnProcessor of lab.models, expected FluxAttnProc"
    with pytest.raises(knapformer.StateError, match=message):
        knapformer.balance(model)


def test_a_block_that_only_has_the_name_is_refused() -> None:
    model: Any = CASE.make()
    block = model.transformer_blocks[1]
    block.__class__ = of_another_module(type(block))
    message = "transformer_blocks.1: got FluxTransformerBlock with the forward of FluxTransformerBlock of lab.models, w"
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)


@pytest.mark.parametrize(
    ("case", "owner", "part"),
    [
        ("flux", "transformer_blocks.0.", "attn"),
        ("flux", "transformer_blocks.1.", "norm1_context"),
        ("flux", "single_transformer_blocks.0.", "norm"),
        ("qwen-image", "transformer_blocks.0.", "attn"),
        ("sd3", "transformer_blocks.0.", "norm1"),
        ("wan", "blocks.0.", "attn2"),
        ("wan", "", "condition_embedder"),
    ],
)
def test_a_module_that_is_read_in_parts_has_the_forward_of_diffusers(case: str, owner: str, part: str) -> None:
    model: Any = cases()[case].make()
    module = model.get_submodule(owner + part)

    class Derived(type(module)):  # type: ignore[misc]
        pass

    class Doubling(Derived):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    module.__class__ = Derived
    assert knapformer.unbalance(knapformer.balance(model)) is model
    module.__class__ = Doubling
    message = f"{owner}{part}: got Doubling with a forward of its own, which a packed call would not compute, expected"
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)


def test_a_block_that_came_after_balance_is_named() -> None:
    model: Any = knapformer.balance(CASE.make())
    model.transformer_blocks.append(CASE.make().transformer_blocks[0])
    message = r"transformer_blocks\[2\]: got a block that came after balance\(\), expected balance\(\) again"
    with pytest.raises(knapformer.StateError, match=message):
        model(samples_of())
    assert len(knapformer.balance(model)(samples_of())) == 3


def test_several_models_at_once_are_refused() -> None:
    models = nn.ModuleList([CASE.make(), CASE.make()])
    with pytest.raises(knapformer.ArgumentError, match="transformer: got ModuleList with 2 models, expected one: call"):
        knapformer.balance(models)


def test_a_block_with_a_forward_of_its_own_is_refused() -> None:
    """A packed call would compute diffusers' block in its place."""
    model: Any = CASE.make()
    block = model.transformer_blocks[1]

    class Derived(type(block)):  # type: ignore[misc]
        pass

    class Gated(Derived):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    block.__class__ = Derived
    assert knapformer.unbalance(knapformer.balance(model)) is model
    block.__class__ = Gated
    message = (
        "transformer_blocks.1: got Gated with the forward of Gated, which a packed call would not compute, expected "
        "that of FluxTransformerBlock or"
    )
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)
