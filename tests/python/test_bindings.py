"""What stubs and help() are made of: names of the C++ modules have docstrings, parameters names and types."""

from __future__ import annotations

import ast
import inspect
import pickle
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from knapformer.balancer import _torch

import knapformer as kf
from knapformer import _core


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


def stub_of(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(re.sub(r"\.[^/]*$", ".pyi", module.__file__)).read_text()


def test_stubs_lie_beside_the_modules() -> None:
    """For type checkers and editors; made at build time."""
    for module in (_core, _torch):
        text = stub_of(module)
        assert all(f"def {name}(" in text or f"class {name}" in text for name in bound(module) if "." not in name)


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


Parameters = dict[str, tuple[str, str | None]]  # kind, default


def functions_of(module: ModuleType) -> Iterator[tuple[str, Parameters]]:
    """Of the module's stub: each function, method and constructor, every overload by itself."""
    for node in ast.parse(stub_of(module)).body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(function, ast.FunctionDef) or any(
                "property" in ast.dump(d) for d in function.decorator_list
            ):
                continue
            of, found = function.args, Parameters()
            assert not of.posonlyargs
            defaults = [None] * (len(of.args) - len(of.defaults)) + of.defaults
            for kind, parameters, values in [
                ("POSITIONAL_OR_KEYWORD", of.args, defaults),
                ("VAR_POSITIONAL", [of.vararg] if of.vararg else [], [None]),
                ("KEYWORD_ONLY", of.kwonlyargs, of.kw_defaults),
                ("VAR_KEYWORD", [of.kwarg] if of.kwarg else [], [None]),
            ]:
                for parameter, value in zip(parameters, values, strict=False):
                    found[parameter.arg] = kind, None if value is None else repr(ast.literal_eval(value))
            yield prefix + function.name, found


@pytest.mark.parametrize("module", [_core, _torch])
def test_every_function_has_the_signature_of_its_stub(module: ModuleType) -> None:
    names = bound(module)
    seen: dict[str, Parameters] = {}
    for name, parameters in functions_of(module):
        if name not in names:
            continue
        signature = inspect.signature(names[name])  # type: ignore[arg-type]
        shown = {
            p.name: (p.kind.name, None if p.default is p.empty else repr(p.default))
            for p in signature.parameters.values()
        }
        if name == "plan":  # two overloads, shown as one: micro_batches may be left out
            assert shown["micro_batches"] == ("KEYWORD_ONLY", "Ellipsis")
            assert parameters.keys() <= shown.keys()
            shown = {key: shown[key] for key in parameters} | (
                {"micro_batches": ("KEYWORD_ONLY", None)} if "micro_batches" in parameters else {}
            )
        assert shown == parameters, name
        typed = [p for p in signature.parameters.values() if p.name != "self"]
        assert all(not isinstance(p.annotation, str) and p.annotation is not p.empty for p in typed), name
        assert signature.return_annotation is not signature.empty, name
        seen[name] = parameters
    routines = {name for name, value in names.items() if inspect.isroutine(value) and hasattr(value, "__wrapped__")}
    assert routines == seen.keys() and len(seen) > 5


@pytest.mark.parametrize("module", [_core, _torch])
def test_help_shows_no_builtin_of_pybind11(module: ModuleType) -> None:
    for name, value in bound(module).items():
        if not inspect.isroutine(value) or (value.__doc__ or "").startswith("Initialize self"):
            continue
        text = pydoc.plain(pydoc.render_doc(value))
        line = text.splitlines()[2]
        assert line == f"{name.rpartition('.')[2]}{inspect.signature(value)}", text
        assert not re.search("pybind|instancemethod|<class", text), text
        assert text.startswith(
            f"Python Library Documentation: function {name.rpartition('.')[2]} in module {module.__name__}"
        )


def test_a_signature_names_what_it_belongs_to() -> None:
    assert kf.plan.__qualname__ == "plan" and kf.Plan.on.__qualname__ == "Plan.on"
    assert pickle.loads(pickle.dumps(kf.plan)) is kf.plan is _core.plan
    assert inspect.signature(kf.Plan.on).return_annotation is kf.Plan
    topology = inspect.signature(kf.Topology)
    assert list(topology.parameters) == ["text", "num_ranks"] and topology.parameters["text"].annotation is str
    routing = inspect.signature(kf.SequenceBalancer.plan_routing)
    assert list(routing.parameters) == ["self", "seq_lens", "d_model", "masks", "work"]
    assert routing.return_annotation is kf.Plan
