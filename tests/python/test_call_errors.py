"""What a call that does not fit is answered with: one line, that of Python's own functions. None of it needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import knapformer as kf
from knapformer import _core

LENS = [[40, 3], [5]]


def like_plan(
    seq_lens_per_rank: Any, topology: Any, d_model: Any, gamma: Any = 0, *, micro_batches: Any = 1, sync: Any = ""
) -> None:
    """As plan is called. Python's own answers are what plan's are held against."""


def answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(TypeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((LENS,), {}),
        ((LENS, "g1n2"), {}),
        ((LENS, "g1n2"), {"gamma": 0.4, "micro_batches": 2}),
        ((LENS, "g1n2", 8), {"gama": 0.4}),
        ((LENS, "g1n2", 8), {"topology": "g2n1"}),
    ],
)
def test_plan_answers_as_python_does(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    python = answer(like_plan, *args, **kwargs).partition(". Did you mean")[0]  # from 3.13 on
    assert answer(kf.plan, *args, **kwargs) == python.replace("like_plan", "plan")


def test_the_overload_that_was_meant_answers() -> None:
    assert answer(kf.plan, LENS, "g1n2", 8, sync="step") == (
        "plan() missing 1 required keyword-only argument: 'micro_batches'"
    )
    assert answer(kf.plan, *[LENS] * 14) == "plan() takes at most 12 positional arguments but 14 were given"


def test_methods_constructors_and_functions_alike() -> None:
    plan = kf.plan(LENS, "g2n1", 8)
    step = kf.plan(LENS, "g2n1", 8, micro_batches=2)
    assert answer(plan.validate, 3) == "Plan.validate() takes at most 0 positional arguments but 1 was given"
    assert (
        answer(step.home_sequences, 1)
        == "StepPlan.home_sequences() missing 1 required positional argument: 'micro_batch'"
    )
    assert answer(kf.TrainedModel, 4) == "TrainedModel() takes at most 0 positional arguments but 1 was given"
    assert answer(_core.head_shares, 1, degree=2) == (
        "head_shares() missing 1 required positional argument: 'num_kv_heads'"
    )


def test_a_wrong_type_names_its_argument() -> None:
    plan = kf.plan(LENS, "g2n1", 8)
    step = kf.plan(LENS, "g2n1", 8, micro_batches=2)
    for call, message in [
        (lambda: _core.head_shares(4, "a", 1), "num_kv_heads: got 'a', expected an integer"),
        (lambda: _core.head_shares(4, 2.5, 1), "num_kv_heads: got 2.5, expected an integer"),
        (lambda: step.home_sequences(0, micro_batch=None), "micro_batch: got None, expected an integer"),
        (lambda: kf.Plan.validate(3), "self: got 3, expected knapformer._core.Plan"),
        (lambda: kf.predict_step(LENS), f"plan: got {LENS}, expected knapformer._core.Plan"),
    ]:
        with pytest.raises(kf.ArgumentError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(
        kf.ArgumentError, match=r"^head_shares\(\): got num_heads=1180591620717411303424, .* expected num_h"
    ):
        _core.head_shares(2**70, 1, 1)
    plan.validate()


def test_a_type_error_from_within_stays_what_it_is() -> None:
    class Broken:
        def __index__(self) -> int:
            raise TypeError("plan(): broken")

    with pytest.raises(kf.ArgumentError, match=r"^d_model: got "):
        kf.plan(LENS, "g2n1", Broken())
    with pytest.raises(TypeError, match=r"No constructor defined"):
        kf.DataMix(3)  # type: ignore[call-arg]
