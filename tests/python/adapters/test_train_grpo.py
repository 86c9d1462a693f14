"""examples/train_grpo.py: on two ranks rewards and losses are those of a plain loop in one process."""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"


def training(rank: int, world: int, *options: str) -> list[dict[str, Any]]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    sys.path.insert(0, str(EXAMPLES))
    from train_grpo import parse_arguments, train

    return train(parse_arguments(list(options)))


def plain_training(rank: int, world: int, num_rounds: int, group_size: int) -> list[dict[str, Any]]:
    """The same, by the model's own forward, picture by picture, with formulas written out."""
    sys.path.insert(0, str(EXAMPLES))
    import train_grpo as grpo

    model = grpo.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log = []
    for number in range(num_rounds):
        count = len(grpo.SIZES) * group_size
        pictures = [grpo.Picture(i // group_size, number * count + i) for i in range(count)]
        finals: dict[int, float] = {}
        steps: list[tuple[Any, ...]] = []  # picture, state, time, its step, what came of it, its probability
        for picture in pictures:
            x = picture.states[0]
            for time, after in zip(grpo.TIMES[:-1].tolist(), grpo.TIMES[1:].tolist(), strict=True):
                with torch.no_grad():
                    mean, deviation = moved(model, picture, x, time, after)
                y = mean + deviation * torch.randn(x.shape, generator=picture.draw)
                steps.append((picture, x, time, after, y, log_density(y, mean, deviation)))
                x = y
            finals[picture.seed] = -((x.mean(0) - picture.wanted) ** 2).mean().item()
        losses = []
        for _ in range(2):
            parts = []
            for picture, x, time, after, y, before in steps:
                of_group = [finals[other.seed] for other in pictures if other.prompt == picture.prompt]
                advantage = (finals[picture.seed] - statistics.mean(of_group)) / (statistics.stdev(of_group) + 1e-4)
                ratio = (log_density(y, *moved(model, picture, x, time, after)) - before).exp()
                parts.append(-min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)))
            loss = sum(parts) / len(parts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        log.append({"reward": statistics.mean(finals[picture.seed] for picture in pictures), "losses": losses})
    return log


def moved(model: Any, picture: Any, x: torch.Tensor, time: float, after: float) -> tuple[torch.Tensor, float]:
    v = model(x[None], timestep=torch.tensor([time]), **picture.conditions).sample[0]
    variance = 0.7**2 * time / (1 - min(time, 0.8))
    mean = x - (v + variance / (2 * time) * (x + (1 - time) * v)) * (time - after)
    return mean, math.sqrt(variance * (time - after))


def log_density(y: torch.Tensor, mean: torch.Tensor, deviation: float) -> torch.Tensor:
    return (-((y - mean) ** 2) / (2 * deviation**2) - math.log(deviation * math.sqrt(2 * math.pi))).mean()


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
