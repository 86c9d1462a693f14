"""What help(), inspect.signature() and pickle see of functions of C++."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import re
from types import ModuleType

import pytest
from bound_names import bound

import knapformer as kf
from knapformer import _core

MODULES = [_core] + ([importlib.import_module("knapformer.balancer")._torch] if _core.torch_version else [])


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
