"""Reads the lengths of samples from files of many kinds: a length a sample, or sizes that a model turns into tokens.

Rows are read as a stream. Rows that cannot be read are counted, and the first of them is named.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from knapformer import ArgumentError
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.json_file import parse_json
from knapformer.lengths_log import read_log
from knapformer.tools.presets import Preset

# Names of columns in common data sets and tools, by what the columns hold.
_NAMES = {
    "length": ("length", "num_tokens", "tokens", "seq_len", "len", "sequence_length", "seq_lens"),
    "width": ("width", "image_width", "w", "original_width"),
    "height": ("height", "image_height", "h", "original_height"),
    "frames": ("frames", "num_frames", "n_frames", "frame_count"),
    "text": ("text_tokens", "caption_tokens", "text_len", "caption_length", "text_length"),
}
FORMATS = ("json", "jsonl", "ndjson", "txt", "csv", "tsv", "parquet", "npy")
_BATCH_ROWS = 1 << 16


@dataclass
class Samples:
    """What a file held.

    lengths: in tokens, of each sample. steps: lists of lengths, [step][rank], where the file has batches as they were
    drawn. bad_rows: how many rows are not used; first_bad names the first.
    """

    lengths: array[int] = field(default_factory=lambda: array("q"))
    steps: list[list[list[int]]] = field(default_factory=list)
    bad_rows: int = 0
    first_bad: str = ""

    def refuse(self, row: int, problem: str) -> None:
        self.bad_rows += 1
        self.first_bad = self.first_bad or f"row {row}: {problem}"


def read_samples(
    path: str, preset: Preset | None, columns: Mapping[str, str] | None = None, on_rows: Callable[[int], object] = int
) -> Samples:
    """path: '-' for standard input (JSON, JSON lines or CSV, recognised by its beginning), a file, or a folder that
    knapformer.record wrote.

    preset: turns sizes into tokens; None where samples must have lengths. columns: names of columns that are not
    recognised without it, by what they hold ('length', 'width', 'height', 'frames', 'text'). on_rows: called now and
    then with the number of rows read.

    Raises ArgumentError where nothing usable is found, OSError where the file cannot be read.
    """
    samples = Samples()
    with ExitStack() as stack:
        rows, names = (read_log(path), None) if path != "-" and Path(path).is_dir() else _rows_of(path, stack)
        if names is None:
            _take_values(rows, samples, preset, columns or {}, on_rows)
        else:
            _take_rows(rows, _Reader(names, preset, columns or {}), samples, on_rows)
    if not samples.lengths:
        found = f"; rows left out: {samples.bad_rows:,}; the first: {samples.first_bad}" if samples.bad_rows else ""
        raise ArgumentError(f"{path}: got no sample, expected at least one{found}")
    return samples


class _Reader:
    """Turns a row's values into tokens."""

    def __init__(self, names: Sequence[str], preset: Preset | None, columns: Mapping[str, str]) -> None:
        self._preset = preset
        at: dict[str, int] = {}
        plain = {name.strip().lower(): place for place, name in reversed(list(enumerate(names)))}
        for what, known in _NAMES.items():
            if what in columns:
                if columns[what] not in names:
                    raise ArgumentError(
                        f"--columns: got {what}={columns[what]!r}, expected one of {', '.join(map(repr, names[:50]))}"
                    )
                at[what] = list(names).index(columns[what])
            else:
                found = next((plain[name] for name in known if name in plain), None)
                if found is not None:
                    at[what] = found
        if "length" not in at and not {"width", "height"} <= at.keys():
            if len(names) == 1 and ";" in names[0]:
                raise ArgumentError(
                    f"columns: got {names[0]!r}, separated by ';', expected ',' or, in .tsv files, tabs"
                )
            raise ArgumentError(
                f"columns: got {', '.join(map(repr, names[:50]))}, expected a column of lengths in tokens, or of "
                "widths and heights in pixels; name them with --columns length=NAME or "
                "width=NAME,height=NAME,frames=NAME,text=NAME"
            )
        if "length" not in at and preset is None:
            raise ArgumentError("--model: got none, expected the model that turns widths and heights into tokens")
        self._at = at

    def tokens(self, row: Sequence[Any]) -> int:
        """Raises ValueError for a row that cannot be used."""
        if len(row) <= max(self._at.values()):
            raise ValueError(f"got {len(row)} values, expected more")
        value = {what: _integer(row[place], what) for what, place in self._at.items()}
        if "length" in value:
            return _checked(value["length"])
        assert self._preset is not None
        for what, least in (("width", 1), ("height", 1), ("frames", 1), ("text", 0)):
            if value.get(what, least) < least:
                raise ValueError(f"{what}: got {value[what]}, expected at least {least}")
        return _checked(
            self._preset.num_tokens(value["width"], value["height"], value.get("frames", 1), value.get("text", 0))
        )


def _integer(value: Any, what: str) -> int:
    """Takes integers written as floats too: pandas writes a column of integers with a missing cell so."""
    if type(value) is int:
        return value
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if number.is_integer() and not isinstance(value, bool):
            return int(number)
    raise ValueError(f"{what}: got {value!r}, expected an integer")


def _checked(tokens: int) -> int:
    if not 1 <= tokens <= MAX_SEQUENCE_TOKENS:
        raise ValueError(f"got {tokens} tokens, expected 1 to {MAX_SEQUENCE_TOKENS}")
    return tokens


def _take_rows(
    rows: Iterator[Sequence[Any]], reader: _Reader, samples: Samples, on_rows: Callable[[int], object]
) -> None:
    append = samples.lengths.append
    for number, row in enumerate(rows, 1):
        try:
            append(reader.tokens(row))
        except ValueError as error:
            samples.refuse(number, str(error))
        if number % _BATCH_ROWS == 0:
            on_rows(number)


def _take_values(
    values: Iterator[Any], samples: Samples, preset: Preset | None, columns: Mapping[str, str],
    on_rows: Callable[[int], object],
) -> None:  # fmt: skip
    """Takes JSON values: numbers, objects, and lists with a list of numbers for each rank (a batch as it was drawn)."""
    readers: dict[tuple[str, ...], _Reader] = {}
    for number, value in enumerate(values, 1):
        try:
            if isinstance(value, dict):
                names = tuple(value)
                if names not in readers:
                    try:
                        readers[names] = _Reader(names, preset, columns)
                    except ArgumentError:
                        if not samples.lengths and not samples.bad_rows:
                            raise  # most likely no row can be used
                        raise ValueError(f"got the fields {', '.join(map(repr, names[:20]))}") from None
                samples.lengths.append(readers[names].tokens(list(value.values())))
            elif isinstance(value, list):
                _take_step(value, samples)
            else:
                samples.lengths.append(_checked(_integer(value, "length")))
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            samples.refuse(number, str(error))
        if number % _BATCH_ROWS == 0:
            on_rows(number)


def _take_step(step: list[Any], samples: Samples) -> None:
    if not step or not all(isinstance(lens, list) for lens in step):
        raise ValueError("got a list, expected a list of lengths for each rank")
    if samples.steps and len(step) != len(samples.steps[0]):
        raise ValueError(f"got {len(step)} ranks, expected {len(samples.steps[0])}, as the first step has")
    checked = [[_checked(_integer(length, "length")) for length in lens] for lens in step]
    samples.steps.append(checked)
    samples.lengths.extend(itertools.chain.from_iterable(checked))


def _rows_of(path: str, stack: ExitStack) -> tuple[Iterator[Any], Sequence[str] | None]:
    """The rows, and the names of their values where each row has the same ones."""
    if path == "-":
        if sys.stdin is None:
            raise ArgumentError("LENGTHS: got '-', expected a standard input that is open")
        text = sys.stdin.read().removeprefix("\ufeff")
        return _text_rows(io.StringIO(text, newline=""), path, _kind_of(text))
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ArgumentError(f"LENGTHS: got {path!r}, expected '-' or a file that ends in .{', .'.join(FORMATS)}")
    if kind == "parquet":
        return _parquet_rows(path)
    if kind == "npy":
        return _npy_values(path), None
    return _text_rows(stack.enter_context(open(path, encoding="utf-8-sig", errors="replace", newline="")), path, kind)


def _kind_of(text: str) -> str:
    """The format of a text without a name, by its beginning."""
    first = text.lstrip().split("\n", 1)[0]
    if first.startswith("[") and _is_json(text):
        return "json"
    if _is_json(first) and not first.startswith('"'):  # a quoted text is a heading of CSV
        return "jsonl"
    return "json" if first.startswith(("[", "{")) else "csv"  # a list or object that goes on, or is not closed


def _text_rows(file: TextIO, path: str, kind: str) -> tuple[Iterator[Any], Sequence[str] | None]:
    if kind == "json":
        content = parse_json(file.read().encode(), f"LENGTHS: {path}")
        if not isinstance(content, list):
            raise ArgumentError(
                f"LENGTHS: {path}: got {type(content).__name__}, expected a list of lengths or of samples"
            )
        # A list of lists of numbers is one step; a list of such lists is several steps.
        one_step = content and all(isinstance(item, list) for item in content)
        one_step = one_step and not any(isinstance(lens, list) for item in content for lens in item)
        return iter([content] if one_step else content), None
    if kind in ("jsonl", "ndjson", "txt"):
        return (_line_value(line) for line in file if line.strip()), None
    rows = _csv_rows(file, path, "\t" if kind == "tsv" else ",")
    names = next(rows, ["length"])
    if len(names) == 1 and _is_json(names[0]):  # a number: there is no heading
        return itertools.chain([names], rows), ["length"]
    return rows, names


def _csv_rows(file: TextIO, path: str, delimiter: str) -> Iterator[Sequence[Any]]:
    reader = csv.reader(file, delimiter=delimiter)
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise ArgumentError(
            f"LENGTHS: {path}: line {reader.line_num}: {error}; expected every quote to be closed"
        ) from None


def _line_value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.strip()  # is refused as a length, and named


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parquet_rows(path: str) -> tuple[Iterator[Sequence[Any]], Sequence[str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ArgumentError(
            "LENGTHS: Parquet needs pyarrow: pip install 'knapformer[parquet]', or write CSV, JSON or NPY"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise ArgumentError(f"LENGTHS: {path}: {error}") from None
    # Only columns of numbers are read, not the captions and pictures of wide tables.
    names = [field.name for field in file.schema_arrow if field.type.id in _arrow_numbers()]
    batches = file.iter_batches(_BATCH_ROWS, columns=names)
    return (row for batch in batches for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)), names


def _arrow_numbers() -> set[int]:
    import pyarrow

    kinds = (pyarrow.int8, pyarrow.int16, pyarrow.int32, pyarrow.int64, pyarrow.uint8, pyarrow.uint16, pyarrow.uint32,
             pyarrow.uint64, pyarrow.float32, pyarrow.float64)  # fmt: skip
    return {kind().id for kind in kinds}


def _npy_values(path: str) -> Iterator[int]:
    try:
        import numpy
    except ImportError:
        raise ArgumentError("LENGTHS: NPY needs numpy: pip install numpy, or write CSV or JSON") from None
    try:
        values = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):  # their words tell how to load what may run code
        raise ArgumentError(
            f"LENGTHS: {path}: got what is no array of numbers, expected a file of numpy.save"
        ) from None
    if not isinstance(values, numpy.ndarray):
        raise ArgumentError(f"LENGTHS: {path}: got several arrays, expected one of integers, (samples,)")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ArgumentError(
            f"LENGTHS: {path}: got {values.dtype} of shape {values.shape}, expected integers, (samples,)"
        )
    for start in range(0, len(values), _BATCH_ROWS):
        yield from values[start : start + _BATCH_ROWS].tolist()
