"""Files that commands write: links, pipes, what may not be written, and two at one place."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from knapformer.tools.cli import main

from knapformer import Plan

PLAN = ["plan", "--topology", "g2n1", "--data", "g2b1i256f1s0", "--ranks", "2"]


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that refuses its arguments."""
    assert main([*PLAN, *args]) == 2
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
        assert main([*PLAN, "--json", str(path)]) == 0
        assert path.is_symlink() and is_plan(path.read_text())
    assert is_plan(real.read_text()) and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["dangling.json", "folder", "link.json", "real.json"]


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    assert main([*PLAN, "--json", str(fifo)]) == 0
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


def test_a_write_that_fails_later_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "/dev/full"]) == 1
    assert capsys.readouterr() == ("", "knapformer plan: /dev/full: No space left on device\n")
