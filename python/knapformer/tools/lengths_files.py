"""Reads the lengths of samples from files of many kinds, as a stream: a length a sample, or sizes that a model makes
tokens of. Rows that cannot be read are counted, and the first of them is named."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from knapformer import ArgumentError
from knapformer.json_file import line_value, parse_json
from knapformer.lengths_log import read_log
from knapformer.tools.columns import MEANING_OF, BadRowError, Columns, tokens_of
from knapformer.tools.model_presets import Preset
from knapformer.tools.rank_lengths import has_masks

FORMATS = ("json", "jsonl", "ndjson", "txt", "csv", "tsv", "parquet")
_BATCH_ROWS = 1 << 16


@dataclass
class SampleFile:
    """What a file held.

    lengths: in tokens, of each sample; a MaskedLength where the file gives it a mask. batches: lists of lengths,
    [batch][rank], where the file has batches as they were drawn. read_as: which columns are read as what. num_rows: how
    many rows the file has, of which bad_rows are not used; first_bad names the first of these.
    """

    lengths: list[int] = field(default_factory=list)
    batches: list[list[list[int]]] = field(default_factory=list)
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


def read_samples(path: str, preset: Preset | None, columns: Mapping[str, str] | None = None) -> SampleFile:
    """path: a file, or the folder of a log of knapformer.record.

    preset: turns sizes into tokens; None where samples must have lengths. columns: names of the columns to read, by
    what they hold (MEANINGS); none: those that are recognised.

    Raises ArgumentError where nothing usable is found, or columns or the preset are ambiguous; OSError where the file
    cannot be read.
    """
    samples, known = SampleFile(), dict[tuple[str, ...], Columns]()

    def length_of(value: Any) -> int:
        if not isinstance(value, dict):
            return tokens_of(value)
        if (names := tuple(filter(None, value))) not in known:
            known[names] = Columns(names, preset, columns or {})
        return known[names].tokens(value)

    for number, value in enumerate(_rows_of(path, columns or {}), 1):
        samples.num_rows = number
        try:
            if isinstance(value, list):
                samples.batches.append(_batch(value, samples, length_of))
                samples.lengths += itertools.chain.from_iterable(samples.batches[-1])
            else:
                samples.lengths.append(length_of(value))
        except BadRowError as error:
            samples.bad_rows += 1
            samples.first_bad = samples.first_bad or f"row {number}: {error}"
    if not samples.lengths and not samples.batches:
        raise ArgumentError(f"{path}: got no sample, expected at least one. {samples.left_out()}")
    if samples.batches:
        samples.read_as = f"tokens of the samples of each batch, as {len(samples.batches[0])} ranks drew it"
    elif known:
        samples.read_as = "; or ".join(dict.fromkeys(of.description() for of in known.values()))
    return samples


def _batch(batch: list[Any], samples: SampleFile, length_of: Callable[[Any], int]) -> list[list[int]]:
    """A batch as it was drawn: for each rank a list of lengths, or of objects."""
    if not batch or not all(isinstance(lens, list) for lens in batch):
        raise BadRowError("got a list, expected a list of lengths for each rank")
    if samples.batches and len(batch) != len(samples.batches[0]):
        raise BadRowError(f"got {len(batch)} ranks, expected {len(samples.batches[0])}, as the first batch has")
    checked: list[list[int]] = []
    try:
        for lens in batch:
            checked.append(list(map(length_of, lens)))
    except BadRowError as error:
        raise BadRowError(f"rank {len(checked)}: {error}") from None
    return checked


def _all_of(path: str) -> SampleFile:
    """For commands that say nothing of rows left out."""
    samples = read_samples(path, None)
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


def read_batches(path: str) -> SampleFile:
    """Of a file that has batches as they were drawn. Raises ArgumentError, OSError."""
    samples = _all_of(path)
    if not samples.batches or sum(len(lens) for batch in samples.batches for lens in batch) != len(samples.lengths):
        raise ArgumentError(
            f"--lengths: {path}: got lengths without ranks, expected a list for each rank, or a list of such batches"
        )
    return samples


def _rows_of(path: str, columns: Mapping[str, str]) -> Iterator[Any]:
    """Lengths, objects by column, or lists of lengths by rank."""
    kind = Path(path).suffix.lower().lstrip(".")
    if Path(path).is_dir():
        yield from read_log(path)
    elif kind == "parquet":
        yield from _parquet_rows(path, columns)
    elif kind in FORMATS:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            yield from _text_rows(file, path, kind)
    else:
        raise ArgumentError(f"LENGTHS: got {path!r}, expected a file that ends in .{', .'.join(FORMATS)}")


def _text_rows(file: TextIO, path: str, kind: str) -> Iterator[Any]:
    if kind in ("csv", "tsv"):
        return _csv_rows(file, path, "\t" if kind == "tsv" else ",")
    if kind != "json":
        return (line_value(line) for line in file if line.strip())
    content = parse_json(file.read().encode(), f"LENGTHS: {path}")
    if isinstance(content, dict) and content and all(isinstance(of, dict) for of in content.values()):
        content = list(content.values())  # by the name of a file, as in the metadata of sd-scripts and SimpleTuner
    if not isinstance(content, list):
        raise ArgumentError(f"LENGTHS: {path}: got {type(content).__name__}, expected a list of lengths or of samples")
    # A list of lists of numbers is one batch; a list of such lists is several batches.
    one_batch = content and all(isinstance(item, list) for item in content)
    one_batch = one_batch and not any(isinstance(lens, list) for item in content for lens in item)
    return iter([content] if one_batch else content)


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
    asked = columns.values() or [name for name in names if name.strip().lower() in MEANING_OF]
    wanted = [name for name in names if name in asked]
    batches = file.iter_batches(_BATCH_ROWS, columns=wanted or names)  # all, which an error names
    return (row for batch in batches for row in batch.to_pylist())
