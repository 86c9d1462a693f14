"""What the columns of a table mean, and how a row becomes a length. Meanings are decided once for a table, before a row
is read; columns that may mean two things are an error."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from knapformer import ArgumentError
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.tools.model_presets import DEFAULT_PRESET, PRESETS, Preset
from knapformer.tools.rank_lengths import MaskedLength

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
MEANING_OF = {name: meaning for meaning, names in _NAMES.items() for name in names}
# What a trainer made of a sample for its model; other columns of the same meaning are of the file it was made from.
_TRAINED = ("train_resolution", "target_size", "bucket_frames")


class BadRowError(Exception):
    """Says why a row cannot be used."""


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
            return tokens_of(value["length"])
        width, height, frames = _size_of(value)
        text = _number(value.get("text", 0), "text", 0)
        if frames > 1 and not self._preset.is_video:
            default = ", the default" if self._preset.name == DEFAULT_PRESET else ""
            videos = ", ".join(preset.name for preset in PRESETS.values() if preset.is_video)
            raise ArgumentError(
                f"--model: got {self._preset.name}{default}, a model of pictures, for a sample of {frames} frames, "
                f"expected a model of videos: {videos}"
            )
        return tokens_of(self._preset.num_tokens(width, height, frames, text))


def _recognised(names: Sequence[str]) -> dict[str, str]:
    """The columns with known names, by what they hold."""
    found: dict[str, list[str]] = {}
    for name in names:
        if meaning := MEANING_OF.get(name.strip().lower()):
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


def tokens_of(length: Any) -> int:
    if (tokens := _number(length, "length", 1)) > MAX_SEQUENCE_TOKENS:
        raise BadRowError(f"length: got {tokens}, expected at most {MAX_SEQUENCE_TOKENS}")
    return int(tokens)
