"""Reads the lengths of samples from files of many kinds: a length a sample, or sizes that a model turns into tokens.

Rows are read as a stream. Rows that cannot be read are counted, and the first of them is named.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from knapformer import ArgumentError
from knapformer.json_file import parse_json
from knapformer.lengths_log import read_log
from knapformer.tools.columns import Columns, checked_tokens, has_masks, integer, known_columns, with_mask
from knapformer.tools.presets import Preset

FORMATS = ("json", "jsonl", "ndjson", "txt", "csv", "tsv", "parquet")
_BATCH_ROWS = 1 << 16


@dataclass
class Samples:
    """What a file held.

    lengths: in tokens, of each sample; a MaskedLength where the file gives it a mask. steps: lists of lengths,
    [step][rank], where the file has batches as they were drawn. read_as: which columns are read as what. num_rows: how
    many rows the file has, of which bad_rows are not used; first_bad names the first of these.
    """

    lengths: list[int] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)
    read_as: str = "tokens of a sample"
    num_rows: int = 0
    bad_rows: int = 0
    first_bad: str = ""

    @property
    def many_left_out(self) -> bool:
        """Whether what is read may not be like the whole file."""
        return self.bad_rows > 0.05 * self.num_rows

    def left_out(self) -> str:
        """A sentence, '' where all rows are used."""
        if not self.bad_rows:
            return ""
        share = f"{self.bad_rows:,} of {self.num_rows:,} rows ({self.bad_rows / self.num_rows:.1%})"
        return f"{share} cannot be read, the first of them {self.first_bad}."


def read_samples(
    path: str, preset: Preset | None, columns: Mapping[str, str] | None = None, may_be_empty: bool = False
) -> Samples:
    """path: '-' for standard input (JSON, JSON lines or CSV, recognised by its beginning), a file, or the folder of a
    log of knapformer.record.

    preset: turns sizes into tokens; None where samples must have lengths. columns: names of the columns to read, by
    what they hold (columns.MEANINGS); none: those that are recognised. may_be_empty: of batches without samples.

    Raises ArgumentError where nothing usable is found, or columns or the preset are ambiguous; OSError where the file
    cannot be read.
    """
    samples, known = Samples(), dict[tuple[str, ...], Columns]()
    with ExitStack() as stack:
        for number, value in enumerate(_rows_of(path, columns or {}, stack), 1):
            samples.num_rows = number
            try:
                if isinstance(value, dict):
                    if (names := tuple(filter(None, value))) not in known:
                        known[names] = Columns(names, preset, columns or {})
                    samples.lengths.append(known[names].tokens(value))
                elif isinstance(value, list):
                    _take_step(value, samples)
                else:
                    samples.lengths.append(checked_tokens(integer(value, "length")))
            except ArgumentError:
                raise
            except ValueError as error:
                samples.bad_rows += 1
                samples.first_bad = samples.first_bad or f"row {number}: {error}"
    if not samples.lengths and not (may_be_empty and samples.steps):
        raise ArgumentError(f"{path}: got no sample, expected at least one. {samples.left_out()}")
    if known:
        samples.read_as = "; or ".join(dict.fromkeys(of.description() for of in known.values()))
    return samples


def _all_of(path: str, may_be_empty: bool = False) -> Samples:
    """For commands that say nothing of rows left out."""
    samples = read_samples(path, None, may_be_empty=may_be_empty)
    if samples.bad_rows:
        raise ArgumentError(f"--lengths: {path}: {samples.left_out()}")
    return samples


def lengths_of(path: str) -> Sequence[int]:
    """The lengths of all samples, for commands whose model has one mask. Raises ArgumentError, OSError."""
    lengths = _all_of(path).lengths
    if has_masks([lengths]):
        raise ArgumentError(
            f"--lengths: {path}: got masks of samples, expected lengths alone: the model that is run here has one "
            "mask; doctor, plan and replay count with those of samples"
        )
    return lengths


def steps_of(path: str) -> list[list[list[int]]]:
    """The batches of a file that has them as they were drawn, [step][rank]. Raises ArgumentError, OSError."""
    samples = _all_of(path, may_be_empty=True)
    if not samples.steps or sum(len(lens) for step in samples.steps for lens in step) != len(samples.lengths):
        raise ArgumentError(
            f"--lengths: {path}: got lengths without ranks, expected a list for each rank, or a list of such steps"
        )
    return samples.steps


def _take_step(step: list[Any], samples: Samples) -> None:
    """A batch as it was drawn: a list of lengths, or of objects of a length and a mask, for each rank."""
    if not step or not all(isinstance(lens, list) for lens in step):
        raise ValueError("got a list, expected a list of lengths for each rank")
    if samples.steps and len(step) != len(samples.steps[0]):
        raise ValueError(f"got {len(step)} ranks, expected {len(samples.steps[0])}, as the first step has")
    checked = [[_length_on(rank, length) for length in lens] for rank, lens in enumerate(step)]
    samples.steps.append(checked)
    samples.lengths += itertools.chain.from_iterable(checked)
    samples.read_as = f"tokens of the samples of each batch, as {len(step)} ranks drew it"


def _length_on(rank: int, length: Any) -> int:
    try:
        if isinstance(length, dict) and length.keys() == {"length", "mask"}:
            return with_mask(checked_tokens(integer(length["length"], "length")), length["mask"])
        return checked_tokens(integer(length, "length"))
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def _rows_of(path: str, columns: Mapping[str, str], stack: ExitStack) -> Iterator[Any]:
    """Lengths, objects by column, or lists of lengths by rank."""
    if path != "-" and Path(path).is_dir():
        return read_log(path)
    kind = Path(path).suffix.lower().lstrip(".")
    if path == "-" or (not kind and Path(path).exists()):
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8", errors="replace")
        text = text.removeprefix("\ufeff")
        return _text_rows(io.StringIO(text, newline=""), path, _kind_of(text))
    if kind not in FORMATS:
        raise ArgumentError(f"LENGTHS: got {path!r}, expected '-' or a file that ends in .{', .'.join(FORMATS)}")
    if kind == "parquet":
        return _parquet_rows(path, columns)
    return _text_rows(stack.enter_context(open(path, encoding="utf-8-sig", errors="replace", newline="")), path, kind)


def _kind_of(text: str) -> str:
    """The format of a text without a name, by its beginning."""
    if not text.lstrip().startswith(("[", "{")):
        return "csv"
    first, _, others = text.strip().partition("\n")
    is_line = not isinstance(_line_value(first), str)
    return "jsonl" if is_line and (others or first.startswith("{")) else "json"


def _text_rows(file: TextIO, path: str, kind: str) -> Iterator[Any]:
    if kind in ("csv", "tsv"):
        return _csv_rows(file, path, "\t" if kind == "tsv" else ",")
    if kind != "json":
        return (_line_value(line) for line in file if line.strip())
    content = parse_json(file.read().encode(), f"LENGTHS: {path}")
    if isinstance(content, dict) and content and all(isinstance(of, dict) for of in content.values()):
        content = list(content.values())  # by the name of a file, as in the metadata of sd-scripts and SimpleTuner
    if not isinstance(content, list):
        raise ArgumentError(f"LENGTHS: {path}: got {type(content).__name__}, expected a list of lengths or of samples")
    # A list of lists of numbers is one step; a list of such lists is several steps.
    one_step = content and all(isinstance(item, list) for item in content)
    one_step = one_step and not any(isinstance(lens, list) for item in content for lens in item)
    return iter([content] if one_step else content)


def _csv_rows(file: TextIO, path: str, delimiter: str) -> Iterator[Any]:
    reader = csv.DictReader(filter(str.strip, file), delimiter=delimiter)
    try:
        names = list(reader.fieldnames or ())
        if any(name.strip().replace(".", "").isdecimal() for name in names):
            if len(names) > 1:
                raise ArgumentError(
                    f"LENGTHS: {path}: got no header: the first line is {','.join(names)!r}, expected the names of the "
                    "columns, such as 'width,height,frames' or 'num_tokens'"
                )
            yield names[0]
            reader.fieldnames = ["length"]
        yield from reader
    except csv.Error as error:
        raise ArgumentError(
            f"LENGTHS: {path}: line {reader.line_num}: {error}; expected every quote to be closed"
        ) from None


def _line_value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.strip()  # is refused as a length, and named


def _parquet_rows(path: str, columns: Mapping[str, str]) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ArgumentError(
            "LENGTHS: Parquet needs pyarrow: pip install 'knapformer[parquet]', or write CSV or JSON"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise ArgumentError(f"LENGTHS: {path}: {error}") from None
    names = file.schema_arrow.names
    # Only the columns that are asked for are read, not the captions and pictures of wide tables.
    wanted = [name for name in names if name in columns.values()] if columns else known_columns(names)
    batches = file.iter_batches(_BATCH_ROWS, columns=wanted or names)  # all, which an error names
    return (row for batch in batches for row in batch.to_pylist())
