"""examples/train_grpo.py: on two ranks rewards and losses are those of a plain loop in one process."""

from __future__ import annotations

import statistics

import pytest
from adapters.grpo_ranks import plain_training, training
from distributed.ranks import run_ranks

pytest.importorskip("diffusers")
NUM_ROUNDS, GROUP_SIZE = 2, 2


def test_two_ranks_train_as_one_process() -> None:
    (expected,) = run_ranks(plain_training, 1, NUM_ROUNDS, GROUP_SIZE, timeout_s=300)
    options = ("--rounds", str(NUM_ROUNDS), "--group-size", str(GROUP_SIZE))
    log, of_the_other = run_ranks(training, 2, *options, timeout_s=300)
    assert log == of_the_other  # reduced over ranks
    for entry, of_plain in zip(log, expected, strict=True):
        assert entry["reward"] == pytest.approx(of_plain["reward"], rel=1e-5)
        assert entry["losses"] == pytest.approx(of_plain["losses"], abs=1e-6)
    assert all(abs(entry["losses"][1]) > 1e-4 for entry in expected)  # the first is 0: the model is the one that drew


@pytest.mark.nightly
def test_rewards_grow() -> None:
    (log,) = run_ranks(training, 1, "--rounds", "12", timeout_s=600)
    assert statistics.mean(entry["reward"] for entry in log[-3:]) > log[0]["reward"] + 0.1
