"""examples/train_lora.py on two ranks, under DDP and FSDP2: neither balancing nor going on changes a loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters.lora_ranks import trainings
from distributed.ranks import run_ranks
from torch.utils.data import DataLoader

from knapformer import BalancedBatchSampler

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[3] / "examples/train_lora.py"
# Two optimizer steps an epoch.
SIZES = [(16, 16), (64, 48), (130, 33), (32, 96), (48, 48), (16, 200), (96, 96), (20, 40), (33, 17)] * 2
NUM_STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        if i % 4:
            (folder / f"{i}.txt").write_text(" ".join(["a", "picture", "of", "noise"][: i % 4] * (i % 3 + 1)))
    return folder


def test_losses_are_those_of_the_plain_loop_also_after_a_resume(folder: Path, tmp_path: Path) -> None:
    losses, of_the_other = run_ranks(trainings, 2, folder, tmp_path, NUM_STEPS, timeout_s=240)
    assert losses == of_the_other  # reduced over ranks
    for name, values in losses.items():
        assert len(set(values)) == NUM_STEPS, name
        assert values == pytest.approx(losses[name[:4] + " plain"], rel=1e-5), name
    assert_results_equal(tmp_path / "lora ddp", tmp_path / "lora ddp, resumed")
    assert_results_equal(tmp_path / "full fsdp2", tmp_path / "full fsdp2, resumed")


def test_the_place_is_that_of_the_steps_taken_where_workers_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from train_lora import Progress

    def new() -> Progress:
        sampler = BalancedBatchSampler(
            [5, 9, 200, 30] * 16, batch_size=2, d_model=64, micro_batches=2, num_replicas=1, rank=0
        )
        return Progress(sampler)

    def train(progress: Progress, num_steps: int) -> list[int]:
        assert progress.sampler is not None
        loader = DataLoader(range(64), batch_sampler=progress.sampler, collate_fn=list, num_workers=2)
        progress.step_of_pass, seen = 0, []
        for number, batch in enumerate(loader, 1):
            seen += batch
            progress.step_of_pass += number % 2 == 0
            if progress.step_of_pass == num_steps:
                break
        return seen

    progress, seen = new(), []
    for num_steps in (3, 5, 100):  # a run that is resumed twice
        seen += train(progress, num_steps)
        state, progress = progress.state_dict(), new()
        progress.load_state_dict(state)
    assert sorted(seen) == list(range(64))


def test_fewer_pictures_than_a_step_are_refused(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--data",
        str(folder),
        "--out",
        str(tmp_path),
        "--cpu",
        "--batch-size",
        "100",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--data: got 18 pictures, expected at least" in done.stderr, done.stderr


def assert_results_equal(whole: Path, resumed: Path) -> None:
    """The averaged weights of a resumed run. Those of the plain loop are not compared: AdamW divides by the gradient's
    size, so that weights whose gradient is next to zero follow its rounding. There the losses are what is held."""
    from safetensors.torch import load_file

    expected, got = (load_file(next(folder.glob("*.safetensors"))) for folder in (whole, resumed))
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.allclose(got[key], value, rtol=0, atol=1e-5 * value.abs().max().item()), key
