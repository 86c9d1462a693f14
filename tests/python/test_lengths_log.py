"""A log of the lengths that ranks draw: what stands in it, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from knapformer.lengths_log import read_log
from knapformer.tools.cli import main
from knapformer.tools.lengths_files import read_samples

import knapformer as kf

DRAWN = [[[100, 20], [40]], [[30], []], [[500], [7, 7]]]  # [batch][rank]


def written(folder: Path) -> Path:
    for rank in range(2):
        with kf.record(folder, rank, 2) as log:
            for batch in DRAWN:
                log(batch[rank])
    return folder


def test_the_doctor_reads_what_ranks_have_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = written(tmp_path / "lengths"), tmp_path / "out.json"
    assert list(read_log(folder)) == DRAWN and read_samples(str(folder), None).batches == DRAWN
    # In steps of their own, as the same batches from a file; two ranks are not asked for.
    file = tmp_path / "drawn.json"
    file.write_text(json.dumps(DRAWN))
    found = []
    for source in (folder, file):
        assert main(["doctor", str(source), "--memory-gib", "999", "--json", str(out)]) == 0
        found.append(json.loads(out.read_text())["alternatives"])
    assert found[0] == found[1]
    assert main(["doctor", str(folder), "--ranks", "3"]) == 2
    assert "--ranks: got 3, expected 2" in capsys.readouterr().err


def test_a_log_is_that_of_the_last_run_and_a_rank_may_have_less(tmp_path: Path) -> None:
    folder = written(written(tmp_path))
    assert list(read_log(folder)) == DRAWN
    (folder / "rank-0-of-2.jsonl").write_text("[100, 20]\n[3")  # killed as it wrote
    samples = read_samples(str(folder), None)
    assert samples.batches == [[[100, 20], [40]]] and (samples.bad_rows, samples.first_bad[:5]) == (1, "row 2")


def test_what_is_no_length_is_named_and_not_logged(tmp_path: Path) -> None:
    numpy, path = pytest.importorskip("numpy"), tmp_path / "rank-0-of-1.jsonl"
    with kf.record(tmp_path, 0, 1) as log:
        before = path.read_text()
        for wrong, came in (
            ([3.9], "3.9"), ([4, "3"], "'3'"), ([float("nan")], "nan"), ([None], "None"), ([[3]], r"\[3\]"),
            (numpy.array([3.5]), ".*3.5"),
        ):  # fmt: skip
            with pytest.raises(kf.ArgumentError, match=f"seq_len: got {came}.*, expected an integer from 1 to"):
                log(wrong)
        assert path.read_text() == before
        log(numpy.array([3, 4], numpy.uint16))
        log(range(1, 3))
    assert list(read_log(tmp_path)) == [[[3, 4]], [[1, 2]]]


def test_what_is_no_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kf.ArgumentError, match="got no log, expected what knapformer"):
        list(read_log(tmp_path))
    with kf.record(tmp_path, 0, 2), pytest.raises(kf.ArgumentError, match="got no rank-1-of-2"):
        list(read_log(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with kf.record(tmp_path) as log:
        with pytest.raises(kf.ArgumentError, match="seq_len: got 0, expected an integer from 1 to"):
            log([4, 0])
        assert (tmp_path / "rank-1-of-4.jsonl").read_text() == ""
    with pytest.raises(kf.ArgumentError, match="got logs of 2, 4 ranks, expected what"):
        list(read_log(tmp_path))
    with pytest.raises(kf.ArgumentError, match="rank: got 2, expected 0 to 1"), kf.record(tmp_path, 2, 2):
        pass


def test_masks_of_samples_are_logged_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kf.record(tmp_path, 0, 1) as log:
        log([8, 40], ["c3 f5", "causal"])
        log([7])
        for masks, message in (
            (["causal"], "masks: got 1 masks, expected one for each of the 2 samples"),
            (["c3 f5", "causal"], "mask: got 'c3 f5' for a sequence of 40 tokens"), (["x", "causal"], "mask: got 'x'"),
        ):  # fmt: skip
            with pytest.raises(kf.ArgumentError, match=message):
                log([40, 8], masks)
    samples = read_samples(str(tmp_path), None)
    assert [(int(n), getattr(n, "mask", None)) for n in samples.lengths] == [(8, "c3 f5"), (40, "causal"), (7, None)]
    assert main(["plan", "--lengths", str(tmp_path), "--topology", "g1n1", "--json", "-"]) == 0
    assert kf.Plan.from_json(capsys.readouterr().out).masks == ["c3 f5", "causal"]
