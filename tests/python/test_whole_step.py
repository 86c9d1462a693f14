"""A whole optimizer step in each of the three ways: gradients as one process has them, in float64 to 1e-10.

With KNAPFORMER_EXACTNESS in the environment (`make exactness`) for every way, number of ranks and of micro-batches,
topology, wrapper and mean.
"""

from __future__ import annotations

import functools
import itertools
import os

import pytest
from distributed.ranks import run_ranks
from torch import Tensor
from whole_step_ranks import LENGTHS, WAYS, Case, Outcome, alone, gradient_error, run_cases, uncovered

ALL = "KNAPFORMER_EXACTNESS" in os.environ
WORLDS = tuple(range(2, 9)) if ALL else (2, 4, 8)


def topologies_of(world: int) -> list[str]:
    """Bags of one rank, which share no sample; flat bags; and nested ones."""
    degrees = [degree for degree in (8, 4, 2, 1) if world % degree == 0]
    nested = "/".join(map(str, degrees))
    return list(dict.fromkeys([f"g1n{world}", f"g{world}n1", f"g{nested}n{world // degrees[0]}"]))


@functools.cache
def cases_of(world: int) -> list[Case]:
    topologies = topologies_of(world)
    if ALL:
        product = itertools.product(WAYS, topologies, range(1, 9), ("ddp", "fsdp"), ("token", "sample"))
        return [Case(*case, LENGTHS) for case in product]
    # Every way with every number of micro-batches; wrappers, means and topologies in turn.
    cases = []
    for i, way in enumerate(WAYS):
        for micro_batches in range(1, 9):
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
    return run_ranks(run_cases, world, cases_of(world), timeout_s=3600 if ALL else 300)


@functools.cache
def wanted(mean: str) -> dict[str, Tensor]:
    return alone(mean, LENGTHS)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_of_one_process(world: int) -> None:
    worst = 0.0
    for of_rank in outcomes_of(world):
        for case, outcome in zip(cases_of(world), of_rank, strict=True):
            error = gradient_error(outcome, wanted(case.mean))
            assert error <= 1e-10, case
            worst = max(worst, error)
    print(f"{world} ranks: {len(cases_of(world))} cases; gradients off by at most {worst:.1e}")


@pytest.mark.parametrize("world", WORLDS)
def test_every_token_is_computed_once(world: int) -> None:
    for i, case in enumerate(cases_of(world)):
        assert uncovered([of_rank[i] for of_rank in outcomes_of(world)], LENGTHS) == {}, case


def test_the_cases_have_what_they_are_for() -> None:
    for world in WORLDS:
        cases, outcomes = cases_of(world), outcomes_of(world)[0]
        for way in WAYS:
            of_way = [(case, outcome) for case, outcome in zip(cases, outcomes, strict=True) if case.way == way]
            assert any(outcome.num_shared > 0 for _, outcome in of_way), (world, way)
            assert {case.wrapper for case, _ in of_way} == {"ddp", "fsdp"}, (world, way)
    token, sample = wanted("token"), wanted("sample")
    assert any((token[name] - sample[name]).norm() > 0.05 * token[name].norm() for name in token)
