"""What help(), inspect.signature() and pickle see of functions of C++, held against the stubs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pydoc
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from bound_names import bound, stub_of

import knapformer as kf
from knapformer import _core

MODULES = [_core] + ([importlib.import_module("knapformer.balancer")._torch] if _core.torch_version else [])

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


@pytest.mark.parametrize("module", MODULES)
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


@pytest.mark.parametrize("module", MODULES)
def test_help_shows_no_builtin_of_pybind11(module: ModuleType) -> None:
    for name, value in bound(module).items():
        if not inspect.isroutine(value) or (value.__doc__ or "").startswith("Initialize self"):
            continue
        text = pydoc.plain(pydoc.render_doc(value))
        line = f"{name.rpartition('.')[2]}{inspect.signature(value)}"
        assert "".join(line.split()) in "".join(text.split()), text  # from 3.13 on a parameter has a line of its own
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


@pytest.mark.skipif(_core.torch_version is None, reason="built without torch")
def test_a_method_of_the_balancer_has_one() -> None:
    routing = inspect.signature(kf.SequenceBalancer.plan_routing)
    assert list(routing.parameters) == ["self", "seq_lens", "d_model", "masks", "work"]
    assert routing.return_annotation is kf.Plan
