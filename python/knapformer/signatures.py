"""Signatures of C++ functions as Python has them: for help(), inspect.signature() and notebooks.

pybind11 writes a signature as the first line of a docstring, where inspect does not look. Here each function is wrapped
by a Python function that has that line as its signature and passes its arguments on.
"""

from __future__ import annotations

import collections.abc
import datetime
import inspect
import re
import sys
import typing
from collections.abc import Callable
from functools import reduce, wraps
from operator import or_
from types import ModuleType
from typing import Any

from knapformer import _core


def show_signatures(module: ModuleType) -> None:
    """Wraps all functions, methods and constructors of C++ in the module. To be called before they are used."""
    names: dict[str, Any] = {"collections": collections, "datetime": datetime, "typing": typing}
    names |= {name: sys.modules[name] for name in ("knapformer", "torch") if name in sys.modules}
    owners: list[Any] = [module, *filter(inspect.isclass, vars(module).values())]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            function = getattr(value, "__func__", value)
            if inspect.isroutine(function) and (function.__doc__ or "").startswith(f"{name}("):
                face = _face(function, names)
                face.__qualname__ = name if owner is module else f"{owner.__name__}.{name}"
                setattr(owner, name, staticmethod(face) if isinstance(value, staticmethod) else face)


def _face(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    @wraps(function)
    def face(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    line, _, doc = (function.__doc__ or "").partition("\n")
    if doc.startswith("Overloaded function.\n"):
        overloads = [text.partition("\n") for text in re.split(r"^\d+\. ", doc, flags=re.MULTILINE)[1:]]
        signatures = [_signature(line, names) for line, _, _ in overloads]
        signature = reduce(_merged, signatures)
        doc = "\n\n".join(
            _overload(function.__name__, own, doc.strip(), signatures)
            for own, (_, _, doc) in zip(signatures, overloads, strict=True)
        )
    else:
        signature = _signature(line, names)
    face.__doc__ = doc.strip()
    face.__signature__ = signature  # type: ignore[attr-defined]
    face.__annotations__ = {p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty}
    face.__annotations__["return"] = signature.return_annotation
    return face


def _signature(line: str, names: dict[str, Any]) -> inspect.Signature:
    """The signature that a line "name(self: ..., parameter: type = default) -> type" describes."""
    line = re.sub(r"\(self: [\w.]+", "(self", line)
    # Without the plain type beside it, inspect shows such a class as <class 'SupportsIndex'>.
    for name, plain in (("SupportsIndex", "int"), ("SupportsInt", "int"), ("SupportsFloat", "float")):
        line = re.sub(rf": typing\.{name}(?=[,)]| = )", f": {plain} | typing.{name}", line)
    made: dict[str, Any] = {}
    exec(compile(f"def {line}: ...", "<signature>", "exec", dont_inherit=True), names, made)
    return inspect.signature(made.popitem()[1])


def _merged(first: inspect.Signature, second: inspect.Signature) -> inspect.Signature:
    """The signature of both overloads: a parameter that only one has, and requires, gets the default `...`."""
    common = first.parameters.keys() & second.parameters.keys()
    parameters = {**second.parameters, **first.parameters}.values()
    return inspect.Signature(
        sorted(
            (p if p.name in common or p.default is not p.empty else p.replace(default=...) for p in parameters),
            key=lambda p: p.kind,
        ),
        return_annotation=or_(first.return_annotation, second.return_annotation),
    )


def _overload(name: str, own: inspect.Signature, doc: str, overloads: list[inspect.Signature]) -> str:
    """The docstring of an overload, below a line with those of its parameters that not all overloads take."""
    differing = [str(p) for p in own.parameters.values() if not all(p.name in other.parameters for other in overloads)]
    returned = inspect.formatannotation(own.return_annotation)
    return f"{name}({', '.join(['...', *differing])}) -> {returned}\n\n{doc}"


show_signatures(_core)
