"""examples/train_lora.py on two ranks, under DDP and FSDP2: neither balancing nor going on changes a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters.lora_ranks import trainings
from distributed.ranks import run_ranks

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

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


def assert_results_equal(whole: Path, resumed: Path) -> None:
    """The averaged weights of a resumed run. Those of the plain loop are not compared: AdamW divides by the gradient's
    size, so that weights whose gradient is next to zero follow its rounding. There the losses are what is held."""
    from safetensors.torch import load_file

    expected, got = (load_file(next(folder.glob("*.safetensors"))) for folder in (whole, resumed))
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.allclose(got[key], value, rtol=0, atol=1e-5 * value.abs().max().item()), key
