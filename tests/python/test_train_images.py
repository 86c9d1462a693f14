"""examples/train_images.py on two ranks; as its users start it, by torchrun, where it is killed and resumed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from distributed.ranks import run_ranks  # noqa: E402
from picture_training import checkpoints  # noqa: E402
from picture_training import pictures as P  # noqa: E402
from picture_training.launch import finish, kill_after, start  # noqa: E402

NUM_STEPS = 6
SMALL = ("--steps", str(NUM_STEPS), "--batch-size", "8", "--micro-batches", "2", "--resolutions", "8,16,32",
         "--precision", "fp64", "--checkpoint-every", "3", "--validate-every", "3")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures of one's own: one with its caption beside it, one in a folder below, one that is grey."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    (folder / "below").mkdir()
    for name, shape in (("a_red_square.png", (40, 40, 3)), ("below/wide.jpg", (30, 90, 3)), ("grey.png", (64, 50))):
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    (folder / "grey.txt").write_text("noise in grey")
    return folder


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# Each is compared with training without a balancer.
WAYS = {"sampler": (), "float32": ("--precision", "fp32"), "balancer": ("--balancer", "g2/1n1")}


def train_each_way(rank: int, world_size: int, folder: Path, out: Path) -> None:
    import train_images

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "WORLD_SIZE": str(world_size)}
    for name, options in WAYS.items():
        sys.argv = ["train_images.py", "--out", str(out / name), "--data", str(folder), *SMALL, "--compare",
                    "--no-samples", *options]  # fmt: skip
        train_images.train(train_images.parse_arguments(), torch.device("cpu"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each way; all in one start of the ranks."""
    out = tmp_path_factory.mktemp("compared")
    run_ranks(train_each_way, 2, folder, out, timeout_s=240)
    return {name: log_of(out / name) for name in WAYS}


@pytest.fixture
def compared(logs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return logs["sampler"]


def check_same(log: list[dict[str, Any]], loss: float, gradient: float) -> None:
    for entry in log:
        balanced, plain = entry["balanced"], entry["not balanced"]
        assert balanced["loss"] == pytest.approx(plain["loss"], rel=loss)
        assert balanced["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=gradient)
        if entry["step"] % 3 == 2:
            assert balanced["validation_loss"] == pytest.approx(plain["validation_loss"], rel=loss)
        assert sum(map(sum, balanced["tokens"])) == sum(map(sum, plain["tokens"]))
        assert len(balanced["work"]) == len(plain["work"]) == 2, "micro-batches"


def step_work(of: dict[str, Any]) -> float:
    """Ranks wait for each other in every micro-batch."""
    return sum(max(ranks) for ranks in of["work"])


def test_the_sampler_changes_no_loss(compared: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in compared] == list(range(NUM_STEPS))
    check_same(compared, 1e-11, 1e-9)
    # It did balance.
    works = [[step_work(entry[name]) for entry in compared] for name in ("balanced", "not balanced")]
    assert all(a <= b for a, b in zip(*works, strict=True)) and 1.1 * sum(works[0]) < sum(works[1])


def test_nor_in_float32(logs: dict[str, list[dict[str, Any]]]) -> None:
    check_same(logs["float32"], 1e-6, 1e-5)


def test_nor_does_the_balancer_in_the_model(logs: dict[str, list[dict[str, Any]]]) -> None:
    check_same(logs["balancer"], 1e-11, 1e-9)
    # The same samples, in the same steps.
    for entry, with_sampler in zip(logs["balancer"], logs["sampler"], strict=True):
        assert entry["not balanced"]["loss"] == with_sampler["not balanced"]["loss"]
        assert max(entry["balanced"]["work"][0]) < 1.2 * min(entry["balanced"]["work"][0])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks to kill in /proc")
@pytest.mark.nightly
def test_resumed_after_a_kill_the_curve_goes_on(compared: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    for _ in range(5):  # on a busy machine the kill may come when all is done
        shutil.rmtree(tmp_path)
        launcher = start(tmp_path, "--data", str(folder), *SMALL)
        kill_after(launcher, tmp_path, 4, timeout_s=120)
        if len(before := log_of(tmp_path)) < NUM_STEPS:
            break
    assert launcher.returncode != 0 and 4 <= len(before) < NUM_STEPS
    saved = max(int(path.name[-6:]) for path in tmp_path.glob("step_" + "[0-9]" * 6))
    # What a kill in the middle of a checkpoint leaves is passed over.
    (tmp_path / "step_000099.partial").mkdir()

    finish(start(tmp_path, "--data", str(folder), *SMALL, "--resume"), timeout_s=180)
    after = log_of(tmp_path)
    assert [entry["step"] for entry in after] == list(range(NUM_STEPS))
    for entry, uninterrupted in zip(after, compared, strict=True):
        assert entry["balanced"]["loss"] == pytest.approx(uninterrupted["balanced"]["loss"], rel=1e-13)
    # From the checkpoint, not from the start: what was done before it has kept its line.
    seconds = [[entry["balanced"]["seconds"] for entry in log] for log in (before, after)]
    assert saved >= 3 and seconds[0][:saved] == seconds[1][:saved]
    assert all(a != b for a, b in zip(seconds[0][saved:], seconds[1][saved:], strict=False))
    with pytest.raises(SystemExit, match="which has checkpoints, expected another folder, or --resume"):
        checkpoints.check_none(tmp_path)
    with Image.open(tmp_path / "samples.png") as sheet:
        assert np.asarray(sheet).std() > 10
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_000003",
        "step_000006",
        "step_000099.partial",
    ]


def test_samples_follow_from_their_number_and_lengths_are_known(folder: Path) -> None:
    data = P.PictureData(P.load_pictures(str(folder)), (8, 16, 32), seed=7)
    samples = P.PictureSamples(data, 40)
    drawn = [samples[number] for number in range(len(samples))]
    assert samples.lengths() == [len(sample.tokens) + len(sample.words) for sample in drawn]
    assert P.pack(drawn).seq_lens == samples.lengths() and len(set(samples.lengths())) > 5
    again = P.PictureSamples(data, 9)[7]
    assert all(getattr(again, name).equal(getattr(drawn[7], name)) for name in ("tokens", "noise", "time", "words"))
    other = P.PictureSamples(dataclasses.replace(data, seed=8), 40)
    assert not P.pack([other[i] for i in range(40)]).target.equal(P.pack(drawn).target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "6", "--micro-batches", "2"), "--batch-size: got 6, expected a multiple of 4"),
        (("--compare", "--balancer", "none"), "--compare: got --balancer none"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_images

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train_images.py", "--out", "x", *options])
    with pytest.raises(SystemExit):
        train_images.parse_arguments()
    assert message in capsys.readouterr().err


def test_pictures_and_their_captions(folder: Path) -> None:
    own = {picture.caption: picture.image for picture in P.load_pictures(str(folder))}
    assert set(own) == {"a_red_square", "wide", "noise in grey"}
    assert all(image.mode == "RGB" for image in own.values())
    assert P.words_of("a_red_square").shape == (3, P.WORD_CHANNELS) and P.words_of("").shape == (0, P.WORD_CHANNELS)
    with pytest.raises(SystemExit, match="expected a folder with pictures"):
        P.load_pictures(str(folder / "nowhere"))


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("skimage", "sklearn")), reason="packages with pictures"
)
def test_pictures_inside_packages_as_samples() -> None:
    pictures = P.load_pictures(None)
    assert len({picture.caption for picture in pictures}) == len(pictures) >= 10
    samples = [P.draw_sample(P.PictureData(pictures, (32, 64)), number) for number in range(40)]
    assert len({sample.grid for sample in samples}) > 6, "mixed resolutions and aspect ratios"
    for sample in samples:
        assert sample.tokens.shape == sample.noise.shape == (sample.grid[0] * sample.grid[1], P.TOKEN_CHANNELS)
        assert sample.tokens.min() >= -1 and sample.tokens.max() <= 1
        # Each of 10 draws of a standard normal over these many numbers is well within this.
        assert abs(sample.noise.mean()) < 0.2 and abs(sample.noise.std() - 1) < 0.2
    assert any(len(sample.words) == 0 for sample in samples) and any(len(sample.words) > 2 for sample in samples)
    contrast = [sample.tokens.std() for sample in samples]
    assert sum(c > 0.1 for c in contrast) > 30, "pictures, not blanks"


def test_tokens_are_squares_of_the_picture() -> None:
    pixels = torch.arange(3 * 8 * 12).reshape(3, 8, 12).float()
    tokens = P.to_tokens(pixels)
    assert tokens.shape == (6, P.TOKEN_CHANNELS)
    assert tokens[4].reshape(3, P.PATCH, P.PATCH).equal(pixels[:, 4:8, 4:8])
    assert P.to_pixels(tokens, (2, 3)).equal(pixels)
