"""Models of other implementations on real ranks: balanced, with text as a second stream, and weights in shards."""

from __future__ import annotations

import functools

import pytest
import torch
from distributed.ranks import run_ranks
from knapformer.models import FluxTransformer, WanTransformer, init_weights
from knapformer.models.diffusers_flux import flux_state
from knapformer.models.diffusers_wan import wan_state
from known_models_ranks import FLUX, WAN, Outcome, WanStep, sharded_weights, too_long_a_text, wan_alone, wan_on_ranks

RELATIVE_ERROR = 1e-10

# ((frames, rows, columns), text tokens) of each sample of each rank. Two steps, whose gradients add up: long videos
# that are shared, texts of every length from none to the longest, a rank without samples.
STEPS: dict[int, list[WanStep]] = {
    2: [[[((1, 2, 3), 3), ((4, 3, 4), 7)], [((1, 1, 1), 1)]], [[], [((2, 2, 2), 0), ((1, 5, 2), 5), ((3, 4, 4), 2)]]],
    4: [
        [[((3, 4, 5), 7)], [], [((1, 2, 2), 0), ((1, 1, 3), 4)], [((2, 3, 3), 1)]],
        [[((1, 1, 2), 2)], [((1, 3, 1), 3), ((1, 1, 1), 6)], [((1, 2, 2), 0)], [((2, 5, 4), 5)]],
    ],
}
TOPOLOGIES: dict[int, list[str | None]] = {2: [None, "g1n2", "g2n1"], 4: ["g1n2+g2n1", "g4n1", "g2n1", "g4/2/1n1"]}


@functools.cache
def alone(world: int) -> Outcome:
    return wan_alone(STEPS[world])


@functools.cache
def by_rank(world: int) -> list[list[Outcome]]:
    return run_ranks(wan_on_ranks, world, TOPOLOGIES[world], STEPS[world], timeout_s=240)


@pytest.mark.parametrize(("world", "topology"), [(n, topology) for n in TOPOLOGIES for topology in TOPOLOGIES[n]])
def test_wan_on_ranks_is_one_process_with_all_the_data(world: int, topology: str | None) -> None:
    losses, grads, text_grads = alone(world)
    outcomes = [of_rank[TOPOLOGIES[world].index(topology)] for of_rank in by_rank(world)]
    for got_losses, got_grads, _ in outcomes:
        assert got_losses == pytest.approx(losses, rel=RELATIVE_ERROR)
        assert got_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert grad.norm() > 0, f"{name}: no gradient to compare"
            assert (got_grads[name] - grad).norm() <= RELATIVE_ERROR * grad.norm(), name
    # What a text is told by the chunks of its video, wherever they were, arrives at home as one sum.
    for step, grad in enumerate(text_grads):
        got = torch.cat([text_grad[step] for _, _, text_grad in outcomes])
        assert (got - grad).norm() <= RELATIVE_ERROR * grad.norm()


def test_a_text_longer_than_its_room_is_named() -> None:
    for message in run_ranks(too_long_a_text, 2):
        assert message == "text_lens: got 8 tokens, expected at most max_text_tokens = 7"


def test_sharded_models_load_and_save_without_being_whole() -> None:
    flux, wan = FluxTransformer(FLUX), WanTransformer(WAN)
    init_weights(flux, 1)
    init_weights(wan, 2)
    states = {"flux": flux_state(flux), "original": flux_state(flux, "original"), "wan": wan_state(wan)}
    other, keeper = run_ranks(sharded_weights, 2, states["original"], states["wan"])
    assert 0.4 < keeper["share"] < 0.6
    for name, state in states.items():
        assert other[name] == {}
        assert keeper[name].keys() == state.keys()
        assert all(torch.equal(keeper[name][key], value) for key, value in state.items())
