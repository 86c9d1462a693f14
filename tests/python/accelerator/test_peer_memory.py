"""Ranks that write into each other's memory, on the simulated accelerator."""

from __future__ import annotations

import torch
from accelerator.model_ranks import models_agree
from accelerator.peer_memory_ranks import (
    a_mistake_where_memory_grows,
    another_stream_is_left_alone,
    attention_raises_meanwhile,
    peer_memory_without_the_kernel,
    transports_agree,
    whole_sequences_attend_meanwhile,
)
from distributed.ranks import run_ranks


def test_a_models_step_by_peer_memory_is_the_same_to_the_bit() -> None:
    """A checkpointed one: attention in it is recomputed, and its exchanges with it."""
    name = "flux-tiny"
    by_all_to_all, by_peer_memory = (run_ranks(models_agree, 2, [name], "g2n1", peers) for peers in (False, True))
    for expected, of_rank in zip(by_all_to_all, by_peer_memory, strict=True):
        for step in (0, 1):
            out, loss, grads, counted = of_rank[name]["sim", step]
            expected_out, expected_loss, expected_grads, _ = expected[name]["sim", step]
            assert torch.equal(out, expected_out) and loss == expected_loss
            assert all(torch.equal(grads[parameter], grad) for parameter, grad in expected_grads.items())
            assert counted.launched.count("barrier") > 0
            assert counted.syncs == ([] if step else ["synchronizeDevice"] * 2)  # for the first region alone


def test_sums_by_peer_memory_are_the_same_to_the_bit() -> None:
    for by_all_to_all, by_peer_memory in run_ranks(transports_agree, 4):
        assert len(by_all_to_all) == len(by_peer_memory) > 0
        assert all(torch.equal(a, b) for a, b in zip(by_all_to_all, by_peer_memory, strict=True))


def test_whole_sequences_attend_while_ranks_write_to_their_peers() -> None:
    of_ranks = run_ranks(whole_sequences_attend_meanwhile, 2)
    assert any(waits for waits, _, _ in of_ranks)
    for waits, by_peer_memory, by_all_to_all in of_ranks:
        assert waits in ([], [2, 2]), "both barriers are behind attention on whole sequences"
        assert len(by_peer_memory) == 3
        assert all(torch.equal(a, b) for a, b in zip(by_peer_memory, by_all_to_all, strict=True))


def test_an_exchange_that_is_dropped_gives_no_memory_away_before_its_end() -> None:
    for waits, left in run_ranks(attention_raises_meanwhile, 2):
        assert waits == [2] and left == 0


def test_an_exchange_waits_for_streams_on_which_results_are_read_and_once_more() -> None:
    for waited in run_ranks(another_stream_is_left_alone, 2):
        assert waited == [True, True, True, False]


def test_a_mistake_is_seen_where_peer_memory_grows() -> None:
    """Torch's ranks meet in its store there, where none looks for what others say."""
    for kind, message, seconds, waits in run_ranks(a_mistake_where_memory_grows, 2, timeout_s=100):
        assert kind == "ArgumentError" and "q: got 100001 rows" in message and seconds < 20, (kind, message, seconds)
        # Nothing behind the first region: the rank that failed may be what the device waits for.
        assert waits == ["synchronizeDevice"] * 2


def test_peer_memory_asks_for_the_packing_kernel() -> None:
    for raised in run_ranks(peer_memory_without_the_kernel, 2):
        assert (
            raised.startswith("ArgumentError: ") and "peer_memory: got tensors on sim:0, expected a device on" in raised
        )
