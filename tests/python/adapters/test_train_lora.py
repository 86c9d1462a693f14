"""examples/train_lora.py on two ranks, under DDP and FSDP2: neither balancing nor going on changes a loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.ranks import run_ranks
from torch.utils.data import DataLoader

from knapformer import BalancedBatchSampler

EXAMPLES = Path(__file__).parents[3] / "examples"
LAUNCHED_WITH = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # what `accelerate launch --use_fsdp --fsdp_version 2 ...` sets beside ACCELERATE_USE_FSDP


def _take_fsdp2() -> None:
    """Makes accelerate use FSDP2 here: it would do so only with an accelerator, but its code runs on CPUs as well."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(LAUNCHED_WITH)
    state = Accelerator(cpu=True).state
    PartialState().distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()


def trainings(rank: int, world: int, data: Path, out: Path, steps: int) -> dict[str, list[float]]:
    """Losses of the plain loop, of the balanced one, and of one that goes on from the middle of an epoch."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    common = ("--data", str(data), "--cpu", "--save-every", str(steps))

    def whole(name: str, *options: str) -> list[float]:
        return _losses(*common, *options, "--out", str(out / name), "--steps", str(steps))

    def in_parts(name: str, *options: str) -> list[float]:
        options = (*common, *options, "--out", str(out / name))
        first = _losses(*options, "--steps", str(steps // 2 - 1))
        return first + _losses(*options, "--steps", str(steps), "--resume")

    return {
        "lora plain": whole("lora plain", "--plain"),
        "lora ddp": whole("lora ddp"),
        "lora ddp, resumed": in_parts("lora ddp, resumed"),
        "lora fsdp2, resumed": in_parts("lora fsdp2, resumed", "--fsdp2"),
        "full plain": whole("full plain", "--full", "--plain"),
        "full fsdp2": whole("full fsdp2", "--full", "--fsdp2"),
        "full fsdp2, resumed": in_parts("full fsdp2, resumed", "--full", "--fsdp2"),
    }


def _losses(*options: str) -> list[float]:
    """options: those of the program; "--fsdp2" stands for accelerate's own launch options."""
    sys.path.insert(0, str(EXAMPLES))
    from accelerate.state import AcceleratorState
    from train_lora import parse_arguments, train

    AcceleratorState._reset_state(reset_partial_state=True)
    if "--fsdp2" in options:
        _take_fsdp2()
    losses = train(parse_arguments([option for option in options if option != "--fsdp2"]))
    assert AcceleratorState().is_fsdp2 == ("--fsdp2" in options)
    return losses


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


def test_the_place_is_that_of_the_steps_taken_where_workers_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
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
    command = [sys.executable, str(EXAMPLES / "train_lora.py"), "--cpu", "--batch-size", "100"]
    command += ["--data", str(folder), "--out", str(tmp_path)]
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
