"""What test_train_lora.py runs on two ranks: examples/train_lora.py, three times in one process each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def trainings(rank: int, world: int, data: Path, out: Path, steps: int) -> dict[str, list[float]]:
    """Losses of the plain loop, of the balanced one, and of one that goes on from the middle of an epoch."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    sys.path.insert(0, str(EXAMPLES))
    from train_lora import parse_arguments, train

    def run(name: str, *options: str) -> list[float]:
        common = ("--data", str(data), "--out", str(out / name), "--cpu", "--save-every", str(steps))
        return train(parse_arguments([*common, *options]))

    return {
        "plain": run("plain", "--plain", "--steps", str(steps)),
        "balanced": run("balanced", "--steps", str(steps)),
        "first part": run("parts", "--steps", str(steps // 2 - 1)),
        "second part": run("parts", "--steps", str(steps), "--resume"),
    }
