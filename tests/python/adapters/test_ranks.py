"""Balanced models of diffusers on real ranks, under FSDP2, against diffusers sample by sample in one process."""

from __future__ import annotations

import functools

import pytest
from adapters.adapters_ranks import HOMES, Outcome, samples_of, sharded_and_balanced
from adapters.cases import assert_gradients_equal, cases, one_by_one, relative_error
from distributed.ranks import run_ranks

CASES = list(cases())
TOPOLOGIES = {2: "g2/1n1", 4: "g4/2/1n1"}


@functools.cache
def by_rank(world: int) -> list[dict[str, Outcome]]:
    return run_ranks(sharded_and_balanced, world, CASES, TOPOLOGIES[world], timeout_s=300)


@pytest.mark.parametrize("world", HOMES)
@pytest.mark.parametrize("name", CASES)
def test_balanced_is_sample_by_sample(name: str, world: int) -> None:
    outputs, expected = one_by_one(cases()[name].make(), samples_of(name))
    assert any(outcome[name][2] > 0 for outcome in by_rank(world)), "no sequence was shared"
    for rank, outcomes in enumerate(by_rank(world)):
        predictions, grads, _ = outcomes[name]
        assert len(predictions) == len(HOMES[world][rank])
        for index, prediction in zip(HOMES[world][rank], predictions, strict=True):
            assert relative_error(prediction, outputs[index]) <= 1e-5
        assert grads.keys() == dict(cases()[name].make().named_parameters()).keys()
        assert_gradients_equal(grads, expected)
