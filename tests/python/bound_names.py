"""The names that a C++ module gives to Python."""

from __future__ import annotations

import inspect
from types import ModuleType


def bound(module: ModuleType) -> dict[str, object]:
    """Functions, classes and their public members, and constructors, by name."""
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        found[name] = value
        for member, of in vars(value).items() if inspect.isclass(value) else ():
            if member == "__init__" or not member.startswith("_"):
                found[f"{name}.{member}"] = of.__func__ if isinstance(of, staticmethod) else of
    return found
