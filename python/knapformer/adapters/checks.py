"""Whether a packed call computes what the model itself does: which models are refused, and in which words."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from knapformer import ArgumentError, StateError
from knapformer.adapters.adapter import Adapter

LIBRARY = "diffusers"
STATE = "_knapformer"  # the attribute of modules whose forward balance() has replaced
_WRAPPERS = ("peft", "torch")  # packages whose modules wrap others, and call them


def check_model(adapter: Adapter, model: Any) -> None:
    """Raises StateError where the model computes what packed blocks do not, ArgumentError where a module that is called
    in parts has a forward of a user's own."""
    for name in adapter.refused:
        if value := getattr(model.config, name, None):
            raise StateError(f"transformer: got a model with {name} {value!r}, expected one without")
    adapter.check(model)
    if getattr(model, "is_cache_enabled", False):
        raise StateError("cache: got one of diffusers, expected none in a packed call (transformer.disable_cache())")
    for name, module in modules_in_parts(adapter, model):
        _check_part(adapter, name, module)


def check_blocks(adapter: Adapter, model: Any) -> None:
    """Raises StateError where balance() has not seen a block."""
    for name in adapter.lists():
        for i, block in enumerate(model.get_submodule(name)):
            if not any(STATE in module.__dict__ for module in block.modules()):
                raise StateError(f"{name}[{i}]: got a block that came after balance(), expected balance() again")


def modules_in_parts(adapter: Adapter, model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the adapter's `in_parts`, by their names."""
    owners = {"transformer": model}
    for name in adapter.lists():
        owners |= {f"{name}[{i}]": block for i, block in enumerate(model.get_submodule(name))}
    for (name, owner), part in itertools.product(owners.items(), adapter.in_parts):
        if (module := getattr(owner, part, None)) is not None:
            yield f"{name}.{part}", module


def package_of(of: type) -> str:
    return of.__module__.partition(".")[0]


def name_of(of: type, expected: Collection[str]) -> str:
    """For messages: the class's name, with its module where the name alone would be as expected."""
    return f"{of.__name__} of {of.__module__}" if of.__name__ in expected else of.__name__


def of_forward(module: nn.Module) -> type:
    """The class that defines the forward that the module runs."""
    return next(base for base in type(module).__mro__ if "forward" in base.__dict__)


def is_one_of(adapter: Adapter, names: Collection[str], of: type) -> bool:
    return of.__name__ in names and package_of(of) in (LIBRARY, package_of(type(adapter)))


def _check_part(adapter: Adapter, name: str, module: Any) -> None:
    package = package_of(of_forward(module))
    is_put = "forward" in module.__dict__ and STATE not in module.__dict__ and package not in _WRAPPERS
    if is_put or package not in (LIBRARY, *_WRAPPERS, package_of(type(adapter))):
        raise ArgumentError(
            f"{name}: got {type(module).__name__} with a forward of its own, which a packed call would not "
            f"compute, expected a class of {LIBRARY} (Adapter.in_parts)"
        )
    if not hasattr(module, "processor"):
        return
    if not is_one_of(adapter, adapter.processors, type(module.processor)):
        got = name_of(type(module.processor), adapter.processors)
        expected = " or ".join(adapter.processors) or "one of Adapter.processors, which has none"
        raise StateError(f"{name}.processor: got {got}, expected {expected}")
    if getattr(module.processor, "_parallel_config", None) is not None:
        raise StateError(
            f"{name}.processor: got a model with diffusers' context parallelism, expected one without: bags of the "
            "balancer share sequences"
        )
    if hasattr(module, "unfuse_projections") and module.fused_projections:  # else its processor is another
        raise StateError(f"{name}: got fused projections, expected transformer.unfuse_qkv_projections()")
