"""Balanced models of diffusers on ranks, in all ways of training them, against diffusers alone, sample by sample."""

from __future__ import annotations

import functools

import pytest
import torch
from adapters.adapters_ranks import (
    ADAPTED,
    ADAPTED_CASE,
    COMPILED,
    COMPILED_CASE,
    FLUX,
    FROZEN,
    HYBRID,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_CASE,
    WRAPPED,
    Outcome,
    on_ranks,
    samples_of,
)
from adapters.cases import assert_gradients_equal, cases
from distributed.ranks import run_ranks
from knapformer.adapters.parity import one_by_one, relative_error

CASES = cases()
OTHERS = {
    (FROZEN, 2): FLUX,
    (ADAPTED, 2): ADAPTED_CASE,
    (COMPILED, 2): COMPILED_CASE,
    (WRAPPED, 2): FLUX,
    (HYBRID, 4): FLUX,
    (TENSOR_PARALLEL, 4): TENSOR_PARALLEL_CASE,
}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, int], Outcome]]:
    return run_ranks(on_ranks, 4, timeout_s=400, group_timeout_s=300)  # one pair waits for the other


@functools.cache
def expected_of(name: str, world: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], set[str]]:
    """What one process computes, and the names of what trains."""
    case = OTHERS[name, world] if (name, world) in OTHERS else CASES[name]
    return *one_by_one(case.make(), samples_of(case)), {
        name for name, p in case.make().named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize(("name", "world"), [*((name, world) for world in (2, 4) for name in CASES), *OTHERS])
def test_balanced_is_sample_by_sample(name: str, world: int, by_rank: list[dict[tuple[str, int], Outcome]]) -> None:
    outputs, expected, parameters = expected_of(name, world)
    if name == FROZEN:  # with all but these frozen
        parameters = {parameter for parameter in parameters if ".to_q." in parameter}
    outcomes = [outcomes[name, world] for outcomes in by_rank if (name, world) in outcomes]
    assert len(outcomes) == world
    assert name == ADAPTED or any(num_shared > 0 for *_, num_shared in outcomes), "no sequence was shared"
    assert {index for home, *_ in outcomes for index in home} == set(range(len(outputs)))
    for home, predictions, grads, _ in outcomes:
        assert len(predictions) == len(home)
        for index, prediction in zip(home, predictions, strict=True):
            assert relative_error(prediction, outputs[index]) <= 1e-5
        assert grads.keys() == parameters
        assert_gradients_equal(grads, {parameter: expected[parameter] for parameter in parameters & expected.keys()})
