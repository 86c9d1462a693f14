"""accelerate, Lightning and transformers' Trainer on two ranks, in the guides' own words, against one process."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from test_integration_guide import TRAINING, blocks_of
from torch import Tensor
from trainers.trainer_ranks import accelerated, others, prepared

pytest.importorskip("accelerate")

SAID = "ArgumentError: loss_divisor: got none"


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The weights after two epochs in one process: steps are a DistributedSampler's, losses means over tokens."""
    lengths = [40, 7, 64, 5, 9, 30, 300, 12] * 3
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, dtype=torch.float64)
    data = [
        torch.randn(length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i, length in enumerate(lengths)
    ]
    for epoch in range(2):
        for step in torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).split(8):
            loss = torch.cat([model(data[i]) for i in step]).square().mean()
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data -= 0.1 * gradient
    return model.weight.detach()


def check_trained(outcomes: list[tuple[dict[str, Tensor], list[str]]], expected: Tensor) -> None:
    for weights, _ in outcomes:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-10, msg=name)


def test_accelerate_trains_as_one_process(tmp_path: Path, expected: Tensor) -> None:
    (block,) = blocks_of("Weighting losses", TRAINING)
    outcomes = run_ranks(accelerated, 2, tmp_path, block)
    check_trained(outcomes, expected)
    for _, (unsaid,) in outcomes:
        assert unsaid.startswith(
            f"{SAID}, while accelerate accumulates 2 micro-batches; expected 2 for accelerator.backward"
        )


# Imported here, Lightning would have other tests of this process say what divides their losses.
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_and_transformers_train_as_one_process(tmp_path: Path, expected: Tensor) -> None:
    outcomes = run_ranks(others, 2, tmp_path, blocks_of("Trainers"), timeout_s=400)
    check_trained(outcomes, expected)
    for _, (lightning, transformers, dealt_again, as_sampler) in outcomes:
        assert lightning.startswith(f"{SAID}, expected a number, as lightning.pytorch.trainer.trainer is imported")
        assert "trainer.accumulate_grad_batches" in lightning
        assert transformers.startswith(SAID)
        assert dealt_again.startswith("TypeError") and "Trainer(use_distributed_sampler=False)" in dealt_again
        assert as_sampler.startswith(
            "ArgumentError: sampler: got a BalancedBatchSampler, dealt once more by lightning."
        )


def test_accelerate_leaves_a_ranks_lists_as_they_are(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"even_batches": False},
        {"use_seedable_sampler": True},
        {"use_stateful_dataloader": True},
        {"split_batches": True},
        {"dispatch_batches": True},
    ]
    outcomes = run_ranks(prepared, 2, tmp_path, cases, timeout_s=200)
    for seen in outcomes:
        plain = seen["plain"]
        assert plain[0] != plain[1]
        for case in cases:
            assert seen[str(case)] == plain[:2], case
        assert seen["skipped"] == plain[1][3:]
        assert seen["skipped, then prepared"] == plain[0][3:]
        assert re.match(
            "StateError: epoch: got 0, though a state of epoch 2 was loaded.*set_epoch", seen["epoch not told"]
        )
        assert seen["resumed"] == [plain[2][4:], plain[3]]
        expected = (
            "StateError: accelerate was imported after the BalancedBatchSampler was made",
            "ArgumentError: num_replicas: got 1, in a loader for accelerate's 2 processes",
            "ArgumentError: sampler: got a BalancedBatchSampler, expected it as the loader's batch_sampler",
            "ArgumentError: micro_batches: got 2, while accelerate accumulates 4",
            "ArgumentError: loader: got one that accelerate prepared",
        )
        assert all(map(str.startswith, seen["errors"], expected)), seen["errors"]
    for epoch in range(2):
        assert sorted(i for seen in outcomes for indices in seen["{}"][epoch] for i in indices) == list(range(96))
