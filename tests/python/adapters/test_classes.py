"""Which classes `balance` takes for those that an adapter knows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from adapters.cases import GUIDE, cases
from knapformer.adapters import registry
from knapformer.adapters.chunks import Part
from knapformer.adapters.parity import relative_error
from torch import nn

import knapformer

CASE = cases()["flux"]
PAGE = Path(__file__).parents[3] / "docs/integration.md"


def test_the_guide_lists_the_classes() -> None:
    rows = ["| class | since | balanced sequence | not in a packed call |", "| --- | --- | --- | --- |"]
    for name in registry.names():
        rows.append(f"| `{name}` | {' | '.join(GUIDE[name])} |")
    assert "\n".join(rows) in PAGE.read_text()


def derived(of: type) -> tuple[type, type]:
    """A class that derives from this one and keeps its forward, and one with a forward of its own."""

    class Derived(of):
        pass

    class Doubling(Derived):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    return Derived, Doubling


def test_a_class_with_a_forward_of_its_own_needs_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed call would leave out what it adds."""
    from knapformer.adapters import flux, register

    model: Any = CASE.make()
    model.__class__, doubling = derived(type(model))
    assert knapformer.unbalance(knapformer.balance(model)) is model
    model.__class__ = doubling
    message = (
        r"transformer: got Doubling, with a forward of its own in place of FluxTransformer2DModel's, expected an ad"
    )
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    register(doubling, flux.Flux)
    assert knapformer.balance(model) is model


def of_another_module(of: type) -> type:
    """A class like this one, with its name, as in a user's copy of diffusers' file."""
    return type(of.__name__, of.__bases__, {**of.__dict__, "__module__": "lab.models"})


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ("", ValueError, r"transformer: got FluxTransformer2DModel of lab.models, expe"),
        (
            "transformer_blocks.1", ValueError,
            r"transformer_blocks.1: got FluxTransformerBlock with the forward of FluxTransformerBlock of lab.models, w",
        ),
        (
            "transformer_blocks.0.attn.processor", RuntimeError,
            r"transformer_blocks\[0\].attn.processor: got FluxAttnProcessor of lab.models, expected FluxAttnProc",
        ),
    ],
)  # fmt: skip
def test_a_class_that_only_has_the_name_is_refused(part: str, error: type[Exception], message: str) -> None:
    model: Any = CASE.make()
    owner, _, name = part.rpartition(".")
    module: Any = getattr(model.get_submodule(owner), name) if part else model
    module.__class__ = of_another_module(type(module))
    with pytest.raises(error, match=message):
        knapformer.balance(model)


def test_an_adapter_for_a_class_of_the_same_name_leaves_that_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapformer.adapters import flux, register

    class Silent(flux.Flux):
        def head(self, model: Any, x: torch.Tensor, home: Any) -> list[Part]:
            return [dataclasses.replace(part, out=0 * part.out) for part in super().head(model, x, home)]

    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    models: list[Any] = [CASE.make(), CASE.make()]
    models[0].__class__ = of_another_module(type(models[0]))
    register(type(models[0]), Silent)
    own, of_diffusers = (knapformer.balance(model)(CASE.samples())[0] for model in models)
    assert own.abs().max() == 0
    assert of_diffusers.abs().max() > 0


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
    kept, doubling = derived(type(module))
    place = re.sub(r"\.(\d)\.", r"[\1].", owner) or "transformer."
    for of, on_the_object in ((kept, False), (doubling, False), (kept, True)):
        module.__class__ = of
        if on_the_object:
            module.forward = module.forward
        elif of is kept:
            assert knapformer.unbalance(knapformer.balance(model)) is model
            continue
        message = f"{place}{part}: got {of.__name__} with a forward of its own, which a packed call would not compute"
        with pytest.raises(knapformer.ArgumentError, match=re.escape(message)):
            knapformer.balance(model)


def louder(of: type) -> type:
    class Louder(of):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda x: 1.1 * x, super().forward(*args, **kwargs))

    return Louder


@pytest.mark.parametrize("name", cases())
@torch.no_grad()
def test_every_other_module_is_called_as_it_is(name: str) -> None:
    """Also an activation that a user puts in the place of another."""
    case = cases()[name]
    model: Any = case.make()
    for path, module in [*model.named_modules()][1:]:
        is_known = type(module).__name__ in case.adapter.packed or path.rpartition(".")[2] in case.adapter.in_parts
        if not is_known and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.__class__ = louder(type(module))
    samples = case.samples()
    expected = [case.adapter.expected(model, sample) for sample in samples]
    for prediction, output in zip(case.balance(model)(samples), expected, strict=True):
        assert relative_error(prediction, output) <= 1e-5


def test_a_block_that_came_after_balance_is_named() -> None:
    model: Any = knapformer.balance(CASE.make())
    model.transformer_blocks.append(CASE.make().transformer_blocks[0])
    message = r"transformer_blocks\[2\]: got a block that came after balance\(\), expected balance\(\) again"
    with pytest.raises(knapformer.StateError, match=message):
        model(CASE.samples())
    assert len(knapformer.balance(model)(CASE.samples())) == 5


def test_what_no_adapter_knows_is_refused() -> None:
    with pytest.raises(
        knapformer.ArgumentError,
        match=r"(?s)transformer: got Linear, expected one of .*; for others .*BalancedBatchSampler\(",
    ):
        knapformer.balance(nn.Linear(2, 2))


def test_several_models_at_once_are_refused() -> None:
    models = nn.ModuleList([CASE.make(), CASE.make()])
    with pytest.raises(knapformer.ArgumentError, match="transformer: got ModuleList with 2 models, expected one: call"):
        knapformer.balance(models)


@pytest.mark.parametrize(
    ("case", "name", "expected"),
    [
        ("flux", "transformer_blocks.1", "FluxTransformerBlock"),
        ("hunyuan-video", "context_embedder.token_refiner", "HunyuanVideoTransformerBlock"),
    ],
)
def test_a_block_with_a_forward_of_its_own_is_refused(case: str, name: str, expected: str) -> None:
    """A packed call would compute diffusers' block in its place."""
    model: Any = cases()[case].make()
    block = model.get_submodule(name)
    block.__class__, doubling = derived(type(block))
    assert knapformer.unbalance(knapformer.balance(model)) is model
    block.__class__ = doubling
    message = (
        f"{name}: got Doubling with the forward of Doubling, which a packed call would not compute, "
        f"expected that of {expected} or"
    )
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model)
