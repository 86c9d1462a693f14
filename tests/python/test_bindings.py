"""What help() is made of: names of the C++ modules have docstrings, parameters names and types."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest
from bound_names import bound
from knapformer.balancer import _torch

from knapformer import _core


def problems(name: str, value: object) -> list[str]:
    doc = inspect.getdoc(inspect.unwrap(value)) or ""  # type: ignore[arg-type]
    if inspect.isclass(value) or inspect.isdatadescriptor(value):
        return [] if doc.strip() else [f"{name}: no docstring"]
    if doc.startswith("Initialize self"):  # a class that is not constructed
        return []
    text = doc.partition("\n")[2]
    if text.startswith("Overloaded function."):
        # Each has a signature and a text of its own: "1. plan(...) -> Plan", and what it does.
        overloads = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
        return [problem for overload in overloads for problem in signature_problems(name, overload)]
    return signature_problems(name, doc)


def signature_problems(name: str, doc: str) -> list[str]:
    signature, _, text = doc.partition("\n")
    found = [] if text.strip() or name.endswith(".__init__") else [f"{name}: no docstring"]
    if re.search(r"\barg\d+\b", signature):
        found.append(f"{name}: a parameter without a name: {signature}")
    if "::" in signature or " object at 0x" in signature:
        found.append(f"{name}: C++ in the signature: {signature}")
    if re.search(r"\*\*kwargs[,)]|\*args[,)]|: (typing\.Any|object)\b|\b(list|dict|tuple)\b(?!\[)", signature):
        found.append(f"{name}: arguments without a type: {signature}")
    return found


@pytest.mark.parametrize("module", [_core, _torch])
def test_every_binding_says_what_it_is_and_takes(module: ModuleType) -> None:
    names = bound(module)
    assert len(names) > 15
    assert [problem for name, value in names.items() for problem in problems(name, value)] == []


def test_a_binding_without_a_docstring_or_a_name_is_found() -> None:
    def bad() -> None: ...

    bad.__doc__ = "bad(arg0: int, x: std::vector<Rank>, **kwargs) -> None\n"
    assert [problem.split(":")[1] for problem in problems("bad", bad)] == [
        " no docstring",
        " a parameter without a name",
        " C++ in the signature",
        " arguments without a type",
    ]
    for untyped in ("x: object", "x: list", "x: dict[str, tuple]"):
        bad.__doc__ = f"bad({untyped}) -> None\nDoes nothing."
        assert problems("bad", bad) == [f"bad: arguments without a type: bad({untyped}) -> None"]
    bad.__doc__ = (
        "bad(*args, **kwargs)\nOverloaded function.\n\n1. bad(x: int) -> int\n\nHalf.\n\n2. bad(x: list) -> int\n"
    )
    assert problems("bad", bad) == ["bad: no docstring", "bad: arguments without a type: bad(x: list) -> int"]
    assert problems("nothing", property()) == ["nothing: no docstring"]


@pytest.mark.parametrize("module", [_core, _torch])
def test_every_binding_answers_a_call_that_does_not_fit_in_one_line(module: ModuleType) -> None:
    for name, value in bound(module).items():
        doc = inspect.getdoc(inspect.unwrap(value)) or ""  # type: ignore[arg-type]
        if not callable(value) or inspect.isclass(value) or "**" in doc or doc.startswith("Initialize self"):
            continue
        is_constructor = name.endswith(".__init__")
        with pytest.raises(TypeError) as caught:
            (getattr(module, name.partition(".")[0]) if is_constructor else value)(no_such_argument=1)
        of = name.removesuffix(".__init__")
        names = (of, of.rpartition(".")[2])  # the second of a static method
        assert str(caught.value) in [f"{n}() got an unexpected keyword argument 'no_such_argument'" for n in names]
