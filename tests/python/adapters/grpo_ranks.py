"""What test_train_grpo.py runs: examples/train_grpo.py, and the same in one process by formulas written out."""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

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
