"""Balanced models of diffusers on real ranks, under FSDP2, against diffusers sample by sample in one process."""

from __future__ import annotations

import functools

import pytest
from adapters.adapters_ranks import HOMES, Outcome, on_ranks, samples_of
from adapters.cases import assert_gradients_equal, cases, one_by_one, relative_error
from distributed.ranks import run_ranks

CASES = list(cases())
TOPOLOGIES = {2: "g2/1n1", 4: "g4/2/1n1"}


@functools.cache
def by_rank(world: int) -> list[dict[str, Outcome]]:
    return run_ranks(on_ranks, world, CASES, TOPOLOGIES[world], timeout_s=300)


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


def test_under_ddp_a_frozen_base_and_a_rank_without_samples() -> None:
    _, expected = one_by_one(cases()[CASES[0]].make(), samples_of(CASES[0]))
    for predictions, grads, num_shared in (outcomes["ddp"] for outcomes in by_rank(2)):
        assert num_shared > 0
        assert len(predictions) in (0, len(samples_of(CASES[0])))
        assert grads.keys() == {name for name in expected if ".to_q." in name}
        assert_gradients_equal(grads, {name: expected[name] for name in grads})
