"""Reads the lengths of samples from files of many kinds: a length a sample, or sizes that a model turns into tokens.

Rows are read as a stream. Rows that cannot be read are counted, and the first of them is named. What a column means is
decided once for a table, before a row is read. Columns that may mean two things are an error.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from knapformer import ArgumentError
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.json_file import line_value, parse_json
from knapformer.lengths_log import read_log
from knapformer.tools.model_presets import DEFAULT_PRESET, PRESETS, Preset
from knapformer.tools.rank_lengths import MaskedLength, has_masks

FORMATS = ("json", "jsonl", "ndjson", "txt", "csv", "tsv", "parquet")
_BATCH_ROWS = 1 << 16

# Names of columns in common data sets and tools, by what the columns hold.
_NAMES = {
    "length": ("length", "len", "tokens", "num_tokens", "seq_len", "seq_lens", "sequence_length"),
    "width": ("width", "w", "img_width", "image_width", "video_width"),
    "height": ("height", "h", "img_height", "image_height", "video_height"),
    "size": ("resolution", "img_size", "image_size", "train_resolution", "target_size"),  # 832x480 or [832, 480]
    "frames": ("frames", "num_frames", "n_frames", "nframes", "nb_frames", "frame_count", "bucket_frames"),
    "fps": ("fps", "framerate", "frame_rate"),
    "duration": ("duration", "duration_s", "seconds", "video_duration"),
    "text": ("text_tokens", "num_text_tokens", "caption_tokens", "num_caption_tokens", "prompt_tokens"),
    "mask": ("mask",),  # a text, as attention_pairs takes it
}
MEANINGS = tuple(_NAMES)
_MEANING_OF = {name: meaning for meaning, names in _NAMES.items() for name in names}
# What a trainer made of a sample for its model; other columns of the same meaning are of the file it was made from.
_TRAINED = ("train_resolution", "target_size", "bucket_frames")


class BadRowError(Exception):
    """Says why a row cannot be used."""


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


class Columns:
    """What the columns of a table hold. Raises ArgumentError where that is ambiguous, BadRowError where it does not
    suffice.

    names: of the values of a row. preset: turns sizes into tokens; None where rows must have lengths. given: the
    columns to read, by what they hold; empty: those with known names.
    """

    def __init__(self, names: Sequence[str], preset: Preset | None, given: Mapping[str, str]) -> None:
        for meaning, name in given.items():
            if name not in names:
                raise ArgumentError(f"--columns: got {meaning}={name!r}, expected one of {_quoted(names)}")
        found = dict(given) or _recognised(names)
        _check_unambiguous(found)
        has_size = preset is not None and ("size" in found or found.keys() >= {"width", "height"})
        if "length" not in found and not has_size:
            sizes = "" if preset is None else ", or of widths and heights in pixels"
            raise BadRowError(
                f"columns: got {_quoted(names)}, expected a column of lengths in tokens{sizes}; name them with "
                "--columns length=NAME or width=NAME,height=NAME,frames=NAME,text=NAME; values are separated by ',', "
                "or by tabs in .tsv files"
            )
        unused = found.keys() - {"length", "mask"} if "length" in found else set[str]()
        unused |= {"fps", "duration"} if "frames" in found else set()
        unused |= {"text"} if preset is not None and preset.text_beside else set()
        self._preset, self._found = preset, {of: name for of, name in found.items() if of not in unused}

    def description(self) -> str:
        """Which columns are read as what, and what is assumed for want of a column."""
        found = self._found
        said = [f"{'tokens' if of == 'length' else of} from {name!r}" for of, name in found.items()]
        if "length" not in found and self._preset is not None:
            if self._preset.is_video and not found.keys() & {"frames", "fps"}:
                said.append("every sample a picture of one frame, as no column holds frames")
            if not self._preset.text_beside and "text" not in found:
                said.append("captions left out, as no column holds their tokens")
        return ", ".join(said)

    def tokens(self, row: Mapping[str | None, Any]) -> int:
        """A MaskedLength where the row has a mask. row: under None, what it has beyond its columns.

        Raises BadRowError for a row that cannot be used, ArgumentError for videos of a model of pictures."""
        if any(row.get(None, ())):
            raise BadRowError("got more values than columns: a comma in a value needs quotes")
        value = {meaning: row[name] for meaning, name in self._found.items()}
        return _with_mask(self._tokens(value), value.get("mask"))

    def _tokens(self, value: Mapping[str, Any]) -> int:
        if "length" in value or self._preset is None:
            return _tokens(value["length"])
        width, height, frames = _size_of(value)
        text = _number(value.get("text", 0), "text", 0)
        if frames > 1 and not self._preset.is_video:
            default = ", the default" if self._preset.name == DEFAULT_PRESET else ""
            videos = ", ".join(preset.name for preset in PRESETS.values() if preset.is_video)
            raise ArgumentError(
                f"--model: got {self._preset.name}{default}, a model of pictures, for a sample of {frames} frames, "
                f"expected a model of videos: {videos}"
            )
        return _tokens(self._preset.num_tokens(width, height, frames, text))


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
            return _tokens(value)
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
    asked = columns.values() or [name for name in names if name.strip().lower() in _MEANING_OF]
    wanted = [name for name in names if name in asked]
    batches = file.iter_batches(_BATCH_ROWS, columns=wanted or names)  # all, which an error names
    return (row for batch in batches for row in batch.to_pylist())


def _recognised(names: Sequence[str]) -> dict[str, str]:
    """The columns with known names, by what they hold."""
    found: dict[str, list[str]] = {}
    for name in names:
        if meaning := _MEANING_OF.get(name.strip().lower()):
            found.setdefault(meaning, []).append(name)
    for meaning, columns in found.items():
        found[meaning] = [name for name in columns if name.strip().lower() in _TRAINED] or columns
        if len(found[meaning]) > 1:
            _refuse(columns, f"one for the {meaning}", found)
    return {meaning: name for meaning, (name,) in found.items()}


def _check_unambiguous(found: Mapping[str, str]) -> None:
    columns = {meaning: [name] for meaning, name in found.items()}
    if "length" in found and found.keys() - {"length", "mask", "text"}:  # of all tokens, or frames, or its caption's?
        _refuse(found.values(), "the tokens of a sample, or its size", columns)
    if found.keys() >= {"width", "height", "size"}:
        _refuse([found[of] for of in ("width", "height", "size")], "one size in pixels", columns)
    if "frames" not in found and ("fps" in found) != ("duration" in found):
        _refuse(found.values(), "both fps and duration, or frames, or pictures", columns)


def _refuse(got: Iterable[str], expected: str, found: Mapping[str, Sequence[str]]) -> NoReturn:
    choices = ", ".join(f"{meaning}={name}" for meaning, columns in found.items() for name in columns)
    raise ArgumentError(
        f"columns: got {_quoted(got)}, expected {expected}. Write the columns to read, some of: --columns {choices}"
    )


def _quoted(names: Any) -> str:
    return ", ".join(map(repr, list(names)[:50]))


def _size_of(value: Mapping[str, Any]) -> tuple[int, int, int]:
    """Width and height in pixels, and frames."""
    if "size" in value:
        width, height = _size(value["size"])
    else:
        width, height = (_number(value[of], of, 1) for of in ("width", "height"))
    if "fps" in value:
        fps, seconds = (_number(value[of], of, 0.001, whole=False) for of in ("fps", "duration"))
        return width, height, max(1, round(fps * seconds))
    return width, height, _number(value.get("frames", 1), "frames", 1)


def _size(value: Any) -> list[int]:
    """Of '832x480', '(832, 480)' or [832, 480]; not of '832,480', which may be one number."""
    parts = value
    if isinstance(value, str):
        inner = re.fullmatch(r"\s*[(\[](.*)[)\]]\s*", value)
        parts = re.split("[xX\u00d7]", value) if inner is None else inner[1].split(",")
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise BadRowError(f"size: got {value!r}, expected WIDTHxHEIGHT or [width, height]")
    return [_number(part, "size", 1) for part in parts]


def _number(value: Any, what: str, least: float, whole: bool = True) -> Any:
    """Integers may be written as floats, as pandas writes a column of integers with a missing cell."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        fits = math.isfinite(number) and number >= least and (number.is_integer() or not whole)
        if fits and not isinstance(value, bool):
            return int(number) if whole else number
    raise BadRowError(f"{what}: got {value!r}, expected {'an integer' if whole else 'a number'}, at least {least:g}")


def _with_mask(tokens: int, mask: Any) -> int:
    """mask: empty or None for none."""
    if mask in ("", None):
        return tokens
    if not isinstance(mask, str):
        raise BadRowError(f"mask: got {type(mask).__name__}, expected a text")
    try:
        return MaskedLength(tokens, mask.strip())
    except ArgumentError as error:
        raise BadRowError(str(error)) from None


def _tokens(length: Any) -> int:
    if (tokens := _number(length, "length", 1)) > MAX_SEQUENCE_TOKENS:
        raise BadRowError(f"length: got {tokens}, expected at most {MAX_SEQUENCE_TOKENS}")
    return int(tokens)
