"""Makes the figures of docs/training_run.md: about twenty minutes on two idle cores.

    python docs/training_run.py            runs what is missing in build/training_run, then writes the pictures
    python docs/training_run.py --again    runs everything anew

Runs of examples/train_images.py with the balancer in the model: without and with it, a step of each in turn, in float32
and, shorter, in float64; one that is killed and resumed; and a longer one on smaller pictures, for samples. Then the
batch sampler, without and with it, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from picture_training.launch import finish, kill_after, start  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

RUNS = ROOT / "build" / "training_run"
PICTURES = ROOT / "docs" / "pictures"
NUM_STEPS, NUM_STEPS_FP64, KILLED_AFTER = 400, 40, 105
NUM_STEPS_PICTURES, NUM_STEPS_KILLED = 500, 160
NUM_STEPS_SAMPLER = 40
VALIDATED = ("--validate-every", "20")
IN_MODEL = ("--balancer", "g2/1n1", "--micro-batches", "1", "--batch-size", "6")
PICTURE_OPTIONS = ("--resolutions", "32,48,64", "--batch-size", "12", "--time-shift", "3", "--checkpoint-every", "250")
NUM_WARMUP = 5  # steps that no time is taken of

Log = list[dict[str, Any]]


def run_all() -> None:
    for name, options in (
        ("compare", (*IN_MODEL, "--compare", "--steps", str(NUM_STEPS), "--no-samples", *VALIDATED)),
        ("pictures", (*IN_MODEL, "--steps", str(NUM_STEPS_PICTURES), *PICTURE_OPTIONS)),
        (
            "compare_fp64",
            (*IN_MODEL, "--compare", "--steps", str(NUM_STEPS_FP64), "--precision", "fp64", "--no-samples"),
        ),
        ("sampler", ("--compare", "--steps", str(NUM_STEPS_SAMPLER), "--no-samples")),
    ):
        if not (RUNS / name / "done").exists():
            finish(start(RUNS / name, *options))
            (RUNS / name / "done").touch()
    killed = RUNS / "killed"
    if not (killed / "done").exists():
        shutil.rmtree(killed, ignore_errors=True)
        options = (*IN_MODEL, "--steps", str(NUM_STEPS_KILLED), "--no-samples")
        kill_after(start(killed, *options), killed, KILLED_AFTER, timeout_s=3600)
        shutil.copy(killed / "log.jsonl", killed / "before.jsonl")
        finish(start(killed, *options, "--resume"))
        (killed / "done").touch()


def read(path: Path) -> Log:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses(log: Log, name: str) -> list[float]:
    return [entry[name]["loss"] for entry in log]


def validation_losses(log: Log, name: str) -> dict[int, float]:
    return {entry["step"]: of["validation_loss"] for entry in log if "validation_loss" in (of := entry[name])}


def differences(a: list[float], b: list[float]) -> list[float]:
    return [abs(x - y) / y for x, y in zip(a, b, strict=True)]


def smooth(values: list[float], window: int = 10) -> list[float]:
    return [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def times(log: Log, name: str) -> dict[str, float]:
    steps = [entry[name] for entry in log[NUM_WARMUP:]]
    return {
        "seconds": sum(step["seconds"] for step in steps),
        "cpu_seconds_of_slowest_rank": sum(max(step["cpu_seconds"]) for step in steps),
        "cpu_seconds_of_all_ranks": sum(sum(step["cpu_seconds"]) for step in steps),
    }


def wirs(log: Log, name: str) -> list[float]:
    """Highest over lowest work of a rank, the mean over the micro-batches of each step."""
    return [statistics.mean(max(ranks) / min(ranks) for ranks in entry[name]["work"]) for entry in log]


def slowest(log: Log, name: str) -> float:
    """Planned work of the slowest rank of each micro-batch, added up."""
    return sum(max(ranks) for entry in log for ranks in entry[name]["work"])


def most_tokens(log: Log, name: str) -> int:
    return max(max(ranks) for entry in log for ranks in entry[name]["tokens"])


def results(log: Log, log_fp64: Log, sampler: Log, before: Log, resumed: Log) -> dict[str, Any]:
    balanced, plain = losses(log, "balanced"), losses(log, "not balanced")
    first_resumed = next(i for i, (a, b) in enumerate(zip(before, resumed, strict=False)) if a != b)
    return {
        "loss_of_first_and_last_20_steps": [statistics.mean(plain[:20]), statistics.mean(plain[-20:])],
        "largest_relative_difference_fp32": max(differences(balanced, plain)),
        "validation_loss": {name: validation_losses(log, name) for name in ("not balanced", "balanced")},
        "largest_relative_difference_fp64": max(
            differences(losses(log_fp64, "balanced"), losses(log_fp64, "not balanced"))
        ),
        "killed_after_steps": len(before),
        "resumed_from_step": first_resumed,
        "largest_relative_difference_of_resumed": max(
            differences(losses(resumed, "balanced"), balanced[: len(resumed)])
        ),
        "mean_wir_before": statistics.mean(wirs(log, "not balanced")),
        "mean_wir_after": statistics.mean(wirs(log, "balanced")),
        "sampler": {
            "largest_relative_difference_fp32": max(
                differences(losses(sampler, "balanced"), losses(sampler, "not balanced"))
            ),
            "mean_wir_before": statistics.mean(wirs(sampler, "not balanced")),
            "mean_wir_after": statistics.mean(wirs(sampler, "balanced")),
            "work_of_slowest_before_over_after": slowest(sampler, "not balanced") / slowest(sampler, "balanced"),
            "most_tokens": {name: most_tokens(sampler, name) for name in ("not balanced", "balanced")},
            "times": {name: times(sampler, name) for name in ("not balanced", "balanced")},
        },
        "num_timed_steps": len(log) - NUM_WARMUP,
        "times": {name: times(log, name) for name in ("not balanced", "balanced")},
        "environment": {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
    }


def draw(log: Log, log_fp64: Log, resumed: Log, figures: dict[str, Any], path: Path) -> None:
    plain, balanced = losses(log, "not balanced"), losses(log, "balanced")
    from_step = figures["resumed_from_step"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2, 1))
    top.plot(plain, color="0.85", linewidth=0.8)
    top.plot(smooth(plain), color="tab:orange", linewidth=5, alpha=0.5, label="not balanced")
    top.plot(smooth(balanced), color="tab:blue", linewidth=1.8, label="balanced")
    top.plot(
        range(from_step, len(resumed)),
        smooth(losses(resumed, "balanced"))[from_step:],
        color="black",
        linewidth=1.2,
        linestyle=(0, (2, 3)),
        label=f"balanced, killed in step {figures['killed_after_steps']}, resumed from {from_step}",
    )
    held_out = validation_losses(log, "balanced")
    top.plot(held_out.keys(), held_out.values(), "o", color="tab:red", markersize=4, label="balanced, held-out samples")
    top.set_ylabel("loss (mean of 10 steps; grey: each)")
    top.set_ylim(bottom=0)
    top.legend(frameon=False)
    for entries, color, label in ((log, "tab:blue", "float32"), (log_fp64, "tab:green", "float64")):
        values = differences(losses(entries, "balanced"), losses(entries, "not balanced"))
        bottom.semilogy([max(value, 1e-17) for value in values], ".", color=color, markersize=3, label=label)
    bottom.set_ylabel("relative difference of\nthe two (none: 1e-17)")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, loc="center right")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run everything anew")
    if parser.parse_args().again:
        shutil.rmtree(RUNS, ignore_errors=True)
    run_all()
    log, log_fp64 = read(RUNS / "compare" / "log.jsonl"), read(RUNS / "compare_fp64" / "log.jsonl")
    resumed = read(RUNS / "killed" / "log.jsonl")
    sampler = read(RUNS / "sampler" / "log.jsonl")
    figures = results(log, log_fp64, sampler, read(RUNS / "killed" / "before.jsonl"), resumed)
    (RUNS / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))
    draw(log, log_fp64, resumed, figures, PICTURES / "training_curves.png")
    shutil.copy(RUNS / "pictures" / "samples.png", PICTURES / "training_samples.png")


if __name__ == "__main__":
    main()
