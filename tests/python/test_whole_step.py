"""A whole optimizer step in each of the three ways: gradients as one process has them, in float64 to 1e-10."""

from __future__ import annotations

import functools

import pytest
from distributed.ranks import run_ranks
from torch import Tensor
from whole_step_ranks import LENGTHS, WAYS, Case, Outcome, alone, gradient_error, run_cases, uncovered

# Whole samples alone, and bags that may share.
TOPOLOGIES = {2: ("g1n2", "g2/1n1"), 4: ("g1n4", "g2n2", "g4/2/1n1"), 8: ("g1n8", "g4n2", "g8/4/2/1n1")}


@functools.cache
def cases_of(world: int) -> list[Case]:
    """Every way with every number of micro-batches; wrappers, means and topologies in turn."""
    cases = []
    for i, way in enumerate(WAYS):
        for micro_batches in range(1, 9):
            topologies = TOPOLOGIES[world]
            # With few micro-batches sharing pays.
            topology = topologies[0] if micro_batches % 4 == 0 else topologies[-1 if micro_batches % 2 else 1]
            wrapper = ("ddp", "fsdp")[(i + micro_batches) % 2]
            mean = ("token", "sample")[(i + micro_batches // 2) % 2]
            # At 8 ranks every second one, for time.
            if world < 8 or (i + micro_batches) % 3 == 0:
                cases.append(Case(way, topology, micro_batches, wrapper, mean, LENGTHS))
    return cases


@functools.cache
def outcomes_of(world: int) -> list[list[Outcome]]:
    """Of each rank; all cases in one start."""
    return run_ranks(run_cases, world, cases_of(world), timeout_s=300)


@functools.cache
def wanted(mean: str) -> dict[str, Tensor]:
    return alone(mean, LENGTHS)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gradients_are_those_of_one_process(world: int) -> None:
    for of_rank in outcomes_of(world):
        for case, outcome in zip(cases_of(world), of_rank, strict=True):
            assert gradient_error(outcome, wanted(case.mean)) <= 1e-10, case


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_token_is_computed_once(world: int) -> None:
    for i, case in enumerate(cases_of(world)):
        assert uncovered([of_rank[i] for of_rank in outcomes_of(world)], LENGTHS) == {}, case


def test_the_cases_have_what_they_are_for() -> None:
    for world in (2, 4, 8):
        cases, outcomes = cases_of(world), outcomes_of(world)[0]
        for way in WAYS:
            of_way = [(case, outcome) for case, outcome in zip(cases, outcomes, strict=True) if case.way == way]
            assert any(outcome.num_shared > 0 for _, outcome in of_way), (world, way)
            assert {case.wrapper for case, _ in of_way} == {"ddp", "fsdp"}, (world, way)
    token, sample = wanted("token"), wanted("sample")
    assert any((token[name] - sample[name]).norm() > 0.05 * token[name].norm() for name in token)
