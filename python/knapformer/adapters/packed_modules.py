"""The modules that a packed call goes through by their `__call__`, so that FSDP gathers them on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from knapformer import ArgumentError
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.checks import STATE, is_one_of, name_of, of_forward
from knapformer.adapters.chunks import Packed, PackedForward


def packed_modules(adapter: Adapter, model: nn.Module) -> Iterator[tuple[str, nn.Module, PackedForward]]:
    """The modules that have a packed forward, by their names. Raises ArgumentError where a forward of a user's own
    would be bypassed."""
    found = set()
    for name, module in model.named_modules():
        known = next((base for base in type(module).__mro__ if is_one_of(adapter, adapter.packed, base)), None)
        if known is None:
            continue
        if (of := of_forward(module)) is not known:
            _refuse(adapter, name, module, of)
        found.add(module)
        yield name, module, adapter.packed[known.__name__]
    for name in adapter.lists():
        for i, block in enumerate(model.get_submodule(name).children()):
            if found.isdisjoint(block.modules()):
                _refuse(adapter, f"{name}.{i}", block, of_forward(block))


def module_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], Packed):
        return module.__dict__[STATE](module, *args)
    return type(module).forward(module, *args, **kwargs)


def _refuse(adapter: Adapter, name: str, module: nn.Module, of: type) -> None:
    got, expected = name_of(of, adapter.packed), " or ".join(adapter.packed) or "none"
    raise ArgumentError(
        f"{name}: got {type(module).__name__} with the forward of {got}, which a packed call would not compute, "
        f"expected that of {expected} (Adapter.packed)"
    )
