"""Lengths from standard input, whose format its beginning tells, and integers that are written as floats."""

import io

import pytest
from knapformer.tools.sample_files import read_samples

import knapformer as kf


@pytest.mark.parametrize(
    ("text", "lengths", "steps"),
    [
        ("[40,7,64]", [40, 7, 64], 0),
        ("[\n  40,\n  7,\n  64\n]\n", [40, 7, 64], 0),
        ('[\n  {"num_tokens": 40},\n  {"num_tokens": 7}\n]\n', [40, 7], 0),
        ('{"num_tokens": 40}\n{"num_tokens": 7}\n', [40, 7], 0),
        ("[[40], [7, 64]]", [40, 7, 64], 1),
        ("[\n[[40], [7]],\n[[64], [1]]\n]", [40, 7, 64, 1], 2),
        ("[[40], [7]]\n[[64], [1]]\n", [40, 7, 64, 1], 2),
        ("\n\n40\n7\n", [40, 7], 0),
        ('"num_tokens"\n40\n7\n', [40, 7], 0),
        ('"num_tokens","caption"\n40,"a"\n7,"b"\n', [40, 7], 0),
    ],
)
def test_standard_input_is_recognised_by_its_beginning(monkeypatch, text, lengths, steps):
    monkeypatch.setattr("sys.stdin", io.StringIO(text, newline=""))
    samples = read_samples("-", None)
    assert (list(samples.lengths), len(samples.steps), samples.bad_rows) == (lengths, steps, 0)


@pytest.mark.parametrize("text", ["[40,\n 7,\n", '{\n  "num_tokens": 40\n}'])
def test_standard_input_that_begins_as_json_is_refused_as_json(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(kf.ArgumentError, match=r"^LENGTHS: -: (not readable as JSON|got dict, expected a list)"):
        read_samples("-", None)


def test_integers_may_be_written_as_floats(tmp_path):
    """As pandas writes a column with a missing cell."""
    path = tmp_path / "a.csv"
    path.write_text("num_tokens\n256.0\n\n1e3\n256.5\nnan\ninf\n-4.0\n 7 \n2_0\n")
    samples = read_samples(str(path), None)
    assert (list(samples.lengths), samples.bad_rows) == ([256, 1000, 7, 20], 4)
    assert samples.first_bad == "row 3: length: got '256.5', expected an integer"
    path = tmp_path / "a.txt"
    path.write_text("256.0\n256.5\n")
    samples = read_samples(str(path), None)
    assert (list(samples.lengths), samples.bad_rows) == ([256], 1)
