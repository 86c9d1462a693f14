"""The balancer changes no number: loss and every parameter's gradient after FSDP's reduction, on real Gloo ranks.

Each outcome, also of ranks without a balancer, is held against a single process that holds all the data and knows
neither ranks nor sharding nor balancer. In float64, to 1e-10.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from distributed.ranks import run_ranks
from exactness_ranks import CLUSTER, GAMMA, Case, Outcome, Step, run_alone, run_cases
from knapformer.adapters.named import load_config
from numpy.linalg import norm

from knapformer import plan

RELATIVE_ERROR = 1e-10

# (text tokens, image tokens) of each sample of each rank; two steps, whose gradients add up.
TWO_RANKS: dict[str, tuple[Step, ...]] = {
    "uneven": ([[(3, 9), (0, 6)], [(5, 40)]], [[(2, 17)], [(0, 4), (1, 1), (7, 12)]]),
    "rank without samples": ([[], [(3, 9), (0, 6), (2, 2), (0, 25)]], [[(4, 9), (1, 8), (0, 3)], []]),
    "no text": ([[(0, 7)], [(0, 20), (0, 3)]], [[(0, 30), (0, 5)], [(0, 1)]]),
}
FOUR_RANKS: dict[str, tuple[Step, ...]] = {
    "uneven": (
        [[(3, 9)], [], [(0, 30), (4, 4)], [(2, 50), (0, 1)]],  # one sample is shorter than a bag of four
        [[(2, 3), (0, 8)], [(6, 41)], [(0, 2)], []],
    )
}
EIGHT_RANKS: dict[str, tuple[Step, ...]] = {
    "uneven": ([[(3, 9)], [], [(0, 90), (4, 4)], [(2, 30)], [(0, 7)] * 3, [(5, 44)], [(0, 20)], [(1, 16)]],)
}
MODELS = ("flux-tiny", "transformer-tiny")
TOPOLOGIES = {
    2: (None, "g1n2", "g2n1", "g2/1n1"),
    4: (None, "g1n2+g2n1", "g4n1", "g2n1", "g4/2/1n1"),  # g2n1 makes two replicas
    8: (None, "g8/4/2/1n1"),
}
DATA = {2: TWO_RANKS, 4: FOUR_RANKS, 8: EIGHT_RANKS}
WORLDS = tuple(TOPOLOGIES)


def cases_of(world: int) -> dict[str, Case]:
    return {
        f"{world} ranks, {model}, {topology}, {'checkpointed' if checkpointing else 'kept'}, {data}": Case(
            model, topology, checkpointing, steps
        )
        for model in MODELS
        for topology in TOPOLOGIES[world]
        for checkpointing in ((False, True) if world < 8 else (True,))
        for data, steps in DATA[world].items()
    }


def start_ranks(world: int) -> dict[str, Outcome]:
    """All cases in one start of the ranks; as rank 0 saw them. full_tensor() is the same on every rank."""
    cases = cases_of(world)
    by_rank = run_ranks(run_cases, world, list(cases.values()), timeout_s=500)
    return dict(zip(cases, by_rank[0], strict=True))


# Fixtures, and not a cache: pytest keeps a failure, too, and does not start the ranks again for every case.
@pytest.fixture(scope="module")
def outcomes_2() -> dict[str, Outcome]:
    return start_ranks(2)


@pytest.fixture(scope="module")
def outcomes_4() -> dict[str, Outcome]:
    return start_ranks(4)


@pytest.fixture(scope="module")
def outcomes_8() -> dict[str, Outcome]:
    return start_ranks(8)


@functools.cache
def expected(model: str, data: str, world: int) -> Outcome:
    return run_alone(model, DATA[world][data])


def assert_equal(got: Outcome, wanted: Outcome) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=RELATIVE_ERROR)
    assert got[1].keys() == wanted[1].keys()
    for parameter, gradient in wanted[1].items():
        assert np.isfinite(gradient).all()
        difference, size = norm(got[1][parameter] - gradient), norm(gradient)
        assert difference <= RELATIVE_ERROR * size, f"{parameter}: off by {difference:.3g} of {size:.3g}"


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in WORLDS for name in cases_of(world)])
def test_equal_to_one_process_with_all_the_data(world: int, name: str, request: pytest.FixtureRequest) -> None:
    outcomes = request.getfixturevalue(f"outcomes_{world}")
    assert_equal(outcomes[name], expected(cases_of(world)[name].model, name.rsplit(", ", 1)[1], world))


@pytest.mark.parametrize("world", [4, 8])
def test_nested_plans_share_at_several_degrees_with_uneven_chunks(world: int) -> None:
    topology = TOPOLOGIES[world][-1]
    assert topology is not None
    degrees, uneven = set(), 0
    for steps in DATA[world].values():
        for step in steps:
            lens = [[text + image for text, image in samples] for samples in step]
            for model in MODELS:
                made = plan(
                    lens, topology, d_model=load_config(model).d_model, gamma=GAMMA, solver="balanced", cluster=CLUSTER
                )
                degrees |= set(made.degree_of_sequence)
                chunks: dict[int, list[int]] = {}
                for sequence, _, _, tokens in made.chunks:
                    chunks.setdefault(sequence, []).append(tokens)
                uneven += sum(max(c) - min(c) > 1 for c in chunks.values())
    assert len(degrees) >= 3 and uneven > 0, (degrees, uneven)


def test_gradients_that_could_hide_an_error_are_not_zero() -> None:
    """With text and image in the batch every parameter matters."""
    for model in MODELS:
        _, grads = expected(model, "uneven", 4)
        assert all(norm(gradient) > 0 for gradient in grads.values())
