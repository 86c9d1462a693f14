"""The command: what it prints, what it writes, and that wrong input ends in one line and status 2."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from knapformer.tools.cli import main
from printed import MIXED, check_tables, run

import knapformer
from knapformer import Plan, _core

PLAN_TWO = ["plan", "--topology", "g2n1", "--data", "g2b1i256f1s0", "--ranks", "2"]
PLAN_EMPTY = ["plan", "--topology", "g2n1", "--lengths", "empty.json"]
PLAN_G8 = ["plan", "--topology", "g8n4"]
SIMULATE = ["simulate", "--topology", "g2n1"]
DOCTOR = ["doctor", "--ranks", "4", "--mode", "lora"]
TWO = ["--data", "g2b1i256f1s0", "--ranks", "2"]
REPLAY = ["replay", "--model", "flux-tiny", "--data", "g1b2i256f1s0,g1b1i512f1s0,g2b1i128f1s0"]
REPLAY_G4 = [*REPLAY, "--topology", "g4n1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "required: COMMAND"),
        (PLAN_G8, "one of the arguments --data --lengths is required"),
        (["plan", *MIXED], "--topology: got none, expected bags of ranks such as g8n4, or auto"),
        ([*PLAN_G8, *MIXED, "--json", "-", "--predictions", "-"], "--predictions: got '-', expected another file"),
        ([*PLAN_G8, "--lengths", "x", "--seed", "1"], "--seed: got one beside --lengths"),
        ([*SIMULATE, *TWO, "--batch-size", "2"], "--batch-size: got one beside --data"),
        (["doctor", *MIXED, "--batch-size", "2"], "--batch-size: got 2, expected none: --data states"),
        ([*PLAN_G8, "--data", "mixd", "--ranks", "32"], "data: got 'mixd'"),
        ([*PLAN_G8, "--data", "mixed", "--ranks", "33"], "ranks: got 33, expected a positive multiple of the 32"),
        ([*PLAN_G8, *MIXED, "--gamma", "nan"], "--gamma: got 'nan'"),
        ([*PLAN_G8, *MIXED, "--gamma", "1e308"], "gamma: got 1e+308, expected a number from 0 to 1e+30"),
        (["plan", "--topology", "g8/4n4", *MIXED, "--solver", "greedy"], "solver: got 'greedy' for topology g8/4n4"),
        ([*PLAN_G8, *MIXED, "--effort", "best"], "--effort: invalid choice: 'best'"),
        ([*PLAN_G8, *MIXED, "--mask", "star"], "mask: got 'star'"),
        ([*PLAN_G8, *MIXED, "--cluster", "nowhere"], "--cluster: got 'nowhere'"),
        ([*PLAN_G8, *MIXED, "--max-tokens-per-rank", "100"], "max_tokens_per_rank: got 100, expected at least"),
        (["doctor", "--ranks", "32"], "one of the arguments LENGTHS --lengths --data is required"),
        ([*DOCTOR, "a.csv", "--columns", "length=c"], "--columns: got length='c', expected one of 'a', 'b'"),
        ([*DOCTOR, "bad.csv"], "1 of 1 rows (100.0%) cannot be read, the first of them row 1: "),
        ([*DOCTOR, "a.xls"], "expected a file that ends in .json"),
        ([*DOCTOR, "a.parquet"], "a.parquet"),
        ([*DOCTOR, "a.txt", "--model", "gpt"], "argument --model: invalid choice: 'gpt' (choose from "),
        (
            [*DOCTOR, "a.txt", "--memory-gib", "1"],
            "does not fit in memory: parameters, gradients and optimizer of flux",
        ),
        ([*DOCTOR, "a.txt", "--ranks", "4097"], "argument --ranks: got '4097', expected an integer from 1 to 4096"),
        ([*DOCTOR, "a.txt", "--now", "static_8"], "--now: got static_8, expected an alternative that 4 ranks allow"),
        ([*DOCTOR, "steps.json"], "--ranks: got 4, expected 2"),
        (
            ["doctor", "steps.json", "--mode", "lora", "--steps", "2"],
            "--steps: got 2, expected at most 1: steps.json has 1 batches",
        ),
        ([*DOCTOR, "a.txt", "--scale", "2"], "--scale: got one beside --lengths"),
        ([*DOCTOR[:1], "steps.json", "--batch-size", "9"], "steps.json states what each rank draws"),
        ([*PLAN_G8, *MIXED, "--sol", "greedy"], "unrecognized arguments: --sol"),
        ([*PLAN_G8, *MIXED, "--json", "nowhere/plan.json"], "--json: got 'nowhere/plan.json'"),
        ([*PLAN_G8, "--lengths", "."], ".: got no log, expected what knapformer.record wrote"),
        ([*PLAN_G8, "--lengths", ""], "--lengths: got '', expected a text that is not empty"),
        (["plan", "--topology", "g2\udcff", *MIXED], r"--topology: got 'g2\udcff', expected printable UTF-8"),
        (["plan", "--data", "\udcff", "--topology", "g8n4"], "--data: got"),
        (["plan", "--topology", "g" + "1" * 100_000, *MIXED], "topology: got 'g111"),
        ([*PLAN_G8, *MIXED, "--gamma", "1" * 100_000 + "x"], "expected a finite number >= 0"),
        ([*SIMULATE, *TWO, "--model", "flux-huge"], "model: got 'flux-huge'"),
        ([*SIMULATE, *TWO, "--model", "wan-tiny", "--max-text-tokens", "513"], "--max-text-tokens: got 513"),
        ([*SIMULATE, *TWO, "--keep-exchanges", "--no-checkpoint"], "--keep-exchanges: got it with --no-checkpoint"),
        ([*SIMULATE, "--data", "g2b1i256f1s0"], "--ranks: got none"),
        ([*SIMULATE, "--data", "g2b1i256f1s0", "--ranks", "3"], "ranks: got 3, expected a positive multiple of the 2"),
        (["calibrate", "--lengths", "64,64"], "--lengths: got 1 lengths"),
        (["calibrate", "--lengths", "64,-1"], "--lengths: got '64,-1', expected counts"),
        (["plan", "--topology", "g8n*", "--data", "mixed", "--ranks", "32,"], "--ranks: got '32,', expected counts"),
        (
            ["plan", "--topology", "g8n*", "--data", "mixed", "--ranks", "32,8.0"],
            "--ranks: got '32,8.0', expected counts",
        ),
        (["calibrate", "--device", "cuda", "--ranks", "2"], "device: got 'cuda'"),
        (REPLAY, "--topology: got none"),
        ([*REPLAY, "--topology", "g3n1"], "topology: got 'g3n1'"),
        ([*REPLAY_G4, "--max-tokens-per-rank", "1"], "max_tokens_per_rank: got 1, expected at least"),
        ([*REPLAY_G4, "--gamma", "1", "--calibration", "x"], "not allowed with argument --gamma"),
        ([*REPLAY_G4, "--device", "cuda"], "device: got 'cuda'"),
        ([*REPLAY[:3], "--lengths", "empty.json", "--topology", "g2n1"], "without sequences"),
        (PLAN_EMPTY, "empty.json: got a first step without sequences, expected at least one"),
        ([*PLAN_EMPTY, "--micro-batches", "2"], "--micro-batches: got 2, expected at most 1: empty.json has 1 batches"),
        (["plan", "--topology", "g2n1", "--lengths", "missing.json"], "missing.json: No such file or directory"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    contents = {
        "empty.json": "[[], []]",
        "a.csv": "a,b\n1,2\n", "bad.csv": "tokens\nx\n", "a.xls": "", "a.parquet": "no table", "a.txt": "5\n",
        "steps.json": "[[[5], [70]]]",
    }  # fmt: skip
    for name, content in contents.items():
        Path(name).write_text(content)
    status, out, err = run(capsys, *args)
    assert status == 2 and out == "" and sorted(os.listdir(tmp_path)) == sorted(contents)
    assert err.startswith("knapformer") and err.count("\n") == 1 and message in err and len(err) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[[1, 2], [3", "not readable as JSON"),
        (b"[" * 200_000, "not readable as JSON"),
        (b"[[" + b"9" * 5000 + b"], []]", "not readable as JSON"),
        (b"{}", "got dict, expected a list"),
        (b"[1, 2]", "got lengths without ranks, expected a list for each rank, or a list of such batches"),
        (b"[[1], [0]]", "rank 1: length: got 0, expected an integer, at least 1"),
        (b'[[1], ["' + b"x" * 100_000 + b'"]]', "', expected an integer"),
        (b"[[1], [2.5]]", "rank 1: length: got 2.5, expected an integer"),
        (b"[[NaN], [1]]", "rank 0: length: got nan"),
        (b"[[[1], [2]], [[3]]]", "got 1 ranks, expected 2, as the first batch has"),
        (b"[[1], [1], [1]]", "topology: got 'g2n1'"),
    ],
)
def test_wrong_lengths(content: bytes, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_bytes(content)
    status, out, err = run(capsys, "plan", "--topology", "g2n1", "--lengths", str(path))
    assert status == 2 and out == "" and err.count("\n") == 1 and message in err and len(err) < 1000


def test_what_was_assumed_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    topology = ["--topology", "g8n4"]
    for command in (["plan", *topology, *MIXED], ["plan", *topology, "--topology", "g1n*", *MIXED[:2]]):
        for options, words in (
            ([], ("gamma 0.41 (the default)", "cluster h100, the default: 298 TFLOP/s a rank, 120 and 25 GB/s in a "
                  "node of 8 and between", "57 blocks, 1.2e+10 parameters, heads that divide evenly",
                  "no limit of tokens",
                  "0.525 s more in each micro-batch, whatever its load (fitted to the published cluster)")),
            (["--gamma", "0.5", "--cluster", "cpu", "--max-tokens-per-rank", "90000"],
             ("gamma 0.5 (as given)", "cluster cpu: 0.05 TFLOP/s", "at most 90,000 tokens on a rank",
              "no fixed time")),
        ):  # fmt: skip
            status, out, _ = run(capsys, *command, *options)
            (line,) = [line for line in out.splitlines() if line.startswith("Assumed: ")]
            assert status == 0 and all(word in line for word in words), (command, line)


def test_planning_imports_no_torch_and_simulate_says_that_it_does() -> None:
    """In an interpreter where importing torch or numpy fails."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from knapformer.tools.cli import main\n"
        "assert main(['plan', '--topology', 'g8n4', '--data', 'joint', '--ranks', '32']) == 0\n"
        "sys.exit(main(['simulate', '--topology', 'g2n1', '--data', 'g2b1i256f1s0', '--ranks', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs torch" in done.stderr
    assert "32 ranks" in done.stdout


@pytest.mark.parametrize(
    ("built_for", "message"),
    [
        ("2.3.1", f"this knapformer was built for torch 2.3.1, and torch is {torch.__version__}; build it again"),
        (None, "this knapformer was built without torch and only plans; build it again"),
    ],
)
def test_built_for_another_torch_says_so(
    built_for: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _core.torch_version is not None and torch.__version__.startswith(_core.torch_version)
    monkeypatch.setattr(_core, "torch_version", built_for)
    assert main(["simulate", "--topology", "g2n1", "--data", "g2b1i256f1s0", "--ranks", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"knapformer simulate: {message}")
    with pytest.raises(ImportError, match=f"^{re.escape(f'knapformer.SequenceBalancer: {message}')}"):
        knapformer.__getattr__("SequenceBalancer")


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m knapformer plan --topology g1n64 --data low --ranks 64 --json - | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, len(done.stdout)) == ("", 10)


@pytest.mark.parametrize(
    ("redirected", "status", "message"),
    [
        ("> /dev/full", 1, "knapformer plan: No space left on device"),
        ("--json - > /dev/full", 1, "knapformer plan: No space left on device"),
        ("--topology $'g2\\xff'", 2, "knapformer plan: argument --topology: got"),
    ],
)
def test_streams_that_are_full(redirected: str, status: int, message: str) -> None:
    command = f"{sys.executable} -m knapformer plan --topology g8n4 --data mixed --ranks 32 {redirected}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_a_files_name_may_be_any_bytes(tmp_path: Path) -> None:
    lengths, made = tmp_path / "\udcff.json", tmp_path / "plan\udcff.json"
    lengths.write_text("[[8], [4]]")
    assert main(["plan", "--topology", "g2n1", "--lengths", str(lengths), "--json", str(made)]) == 0
    assert Plan.from_json(made.read_text()).num_ranks == 2


def test_result_files_hold_nothing_that_json_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An infinite ratio, of a rank without work, is no JSON number."""
    path = tmp_path / "lengths.json"
    path.write_text("[[8], []]")

    def refuse(name: str) -> float:
        raise AssertionError(name)

    for option in ("--json", "--predictions"):
        status, out, _ = run(capsys, "plan", "--topology", "g1n2", "--lengths", str(path), option, "-")
        assert status == 0
        json.loads(out, parse_constant=refuse)


def test_the_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "--help")
    lines = out.splitlines()
    assert status == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
    commands = [line.split()[0] for line in lines if re.match(r"    \w", line)]
    assert commands == ["doctor", "plan", "calibrate", "simulate", "replay"]


def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """As the tests of calibrate, simulate and replay hold for theirs."""
    for command in (
        ["plan", "--topology", "g16/8/4/2/1n*", "--topology", "g8n4", "--data", "joint", "--ranks", "32,1024",
         "--micro-batches", "2", "--effort", "low"],
        ["plan", "--topology", "g8n4", "--data", "mixed", "--ranks", "4096"],
        ["plan", "--topology", "g8/4/2/1n4", "--data", "joint", "--micro-batches", "3"],
        ["doctor", "--data", "joint", "--steps", "2"],
    ):  # fmt: skip
        status, out, err = run(capsys, *command)
        assert (status, err) == (0, "")
        check_tables(out)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that refuses its arguments."""
    assert main([*PLAN_TWO, *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def is_plan(content: bytes | str) -> bool:
    return Plan.from_json(content if isinstance(content, str) else content.decode()).num_ranks == 2


def test_a_file_is_written_behind_links_and_keeps_its_permissions(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "dangling.json"
    (tmp_path / "folder").mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("real.json")
    dangling.symlink_to("folder/new.json")
    for path in (link, dangling):
        assert main([*PLAN_TWO, "--json", str(path)]) == 0
        assert path.is_symlink() and is_plan(path.read_text())
    assert is_plan(real.read_text()) and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["dangling.json", "folder", "link.json", "real.json"]


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    assert main([*PLAN_TWO, "--json", str(fifo)]) == 0
    reader.join(30)
    assert is_plan(read[0]) and stat.S_ISFIFO(fifo.stat().st_mode)


def test_what_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    (tmp_path / "astray").symlink_to("nowhere/file")
    for path in (tmp_path, f"{tmp_path}/new/", tmp_path / "astray", kept / "below"):
        for option in ("--json", "--report"):
            message = refusal(capsys, option, str(path))
            assert f"{option}: got {str(path)!r}, expected a file that may be written, in a folder that" in message
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: path != str(kept))
        assert "expected a file that may be written" in refusal(capsys, "--json", str(kept))
    assert kept.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["astray", "kept.json"]


def test_two_outputs_to_one_file_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    for other in ("a", "./a", "link"):
        message = refusal(capsys, "--json", str(tmp_path / "a"), "--report", f"{tmp_path}/{other}")
        assert "--report: got" in message and "another file than --json writes" in message
    assert os.listdir(tmp_path) == ["link"]


def test_a_write_that_breaks_off_leaves_what_was_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link"
    kept.write_text("old")
    link.symlink_to("kept.json")

    def breaks_off(path: Path, text: str, **_: Any) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", breaks_off)
        assert main([*PLAN_TWO, "--json", str(link)]) == 1
    assert capsys.readouterr().err == f"knapformer plan: {link}: No space left on device\n"
    assert kept.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["kept.json", "link"]
    assert main([*PLAN_TWO, "--json", str(link)]) == 0
    assert is_plan(kept.read_text()) and link.is_symlink()


def test_a_write_that_fails_later_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_TWO, "--json", "/dev/full"]) == 1
    assert capsys.readouterr() == ("", "knapformer plan: /dev/full: No space left on device\n")
