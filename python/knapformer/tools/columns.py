"""What the columns of a table of samples mean, and how a row becomes tokens.

What a column means is decided once for a table, before a row is read. Columns that may mean two things are an error.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from knapformer import ArgumentError, attention_pairs
from knapformer._core import MAX_SEQUENCE_TOKENS
from knapformer.tools.presets import DEFAULT_PRESET, PRESETS, Preset

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


class MaskedLength(int):
    """Tokens of a sample that has a mask of its own. It differs from equal lengths with other masks."""

    mask: str

    def __new__(cls, tokens: int, mask: str) -> MaskedLength:
        """Raises ArgumentError for a text that is no mask of so many tokens."""
        attention_pairs(mask, tokens)
        length = super().__new__(cls, tokens)
        length.mask = mask
        return length

    def __eq__(self, other: object) -> bool:
        return int(self) == other and self.mask == getattr(other, "mask", None)

    def __hash__(self) -> int:
        return hash((int(self), self.mask))


def has_masks(lengths: Iterable[Iterable[int]]) -> bool:
    """Whether samples have masks of their own."""
    return any(isinstance(length, MaskedLength) for lens in lengths for length in lens)


class Columns:
    """What the columns of a table hold. Raises ArgumentError where that is ambiguous, a plain ValueError where it does
    not suffice.

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
            raise ValueError(
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

        Raises a plain ValueError for a row that cannot be used, ArgumentError for videos of a model of pictures."""
        if any(row.get(None, ())):
            raise ValueError("got more values than columns: a comma in a value needs quotes")
        value = {meaning: row[name] for meaning, name in self._found.items()}
        return with_mask(self._tokens(value), value.get("mask"))

    def _tokens(self, value: Mapping[str, Any]) -> int:
        if "length" in value or self._preset is None:
            return checked_tokens(integer(value["length"], "length"))
        width, height, frames = _size_of(value)
        text = integer(value.get("text", 0), "text", least=0)
        if frames > 1 and not self._preset.is_video:
            default = ", the default" if self._preset.name == DEFAULT_PRESET else ""
            videos = ", ".join(preset.name for preset in PRESETS.values() if preset.is_video)
            raise ArgumentError(
                f"--model: got {self._preset.name}{default}, a model of pictures, for a sample of {frames} frames, "
                f"expected a model of videos: {videos}"
            )
        return checked_tokens(self._preset.num_tokens(width, height, frames, text))


def known_columns(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.strip().lower() in _MEANING_OF)


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
        width, height = (integer(value[of], of, least=1) for of in ("width", "height"))
    if "fps" in value:
        return width, height, max(1, round(_positive(value["fps"], "fps") * _positive(value["duration"], "duration")))
    return width, height, integer(value.get("frames", 1), "frames", least=1)


def _size(value: Any) -> list[int]:
    """Of '832x480', '(832, 480)' or [832, 480]; not of '832,480', which may be one number."""
    parts = value
    if isinstance(value, str):
        inner = re.fullmatch(r"\s*[(\[](.*)[)\]]\s*", value)
        parts = re.split("[xX\u00d7]", value) if inner is None else inner[1].split(",")
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError(f"size: got {value!r}, expected WIDTHxHEIGHT or [width, height]")
    return [integer(part, "size", least=1) for part in parts]


def integer(value: Any, what: str, least: int | None = None) -> int:
    """Takes integers written as floats too, as pandas writes a column of integers with a missing cell."""
    number = value
    if type(value) is not int:
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
        if isinstance(value, bool) or not isinstance(number, float) or not number.is_integer():
            raise ValueError(f"{what}: got {value!r}, expected an integer")
    if least is not None and number < least:
        raise ValueError(f"{what}: got {int(number)}, expected at least {least}")
    return int(number)


def _positive(value: Any, what: str) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)) and number > 0:
            return number
    raise ValueError(f"{what}: got {value!r}, expected a number above 0")


def with_mask(tokens: int, mask: Any) -> int:
    """mask: empty or None for none."""
    if mask in ("", None):
        return tokens
    if not isinstance(mask, str):
        raise ValueError(f"mask: got {type(mask).__name__}, expected a text")
    try:
        return MaskedLength(tokens, mask.strip())
    except ArgumentError as error:
        raise ValueError(str(error)) from None


def checked_tokens(tokens: int) -> int:
    if not 1 <= tokens <= MAX_SEQUENCE_TOKENS:
        raise ValueError(f"got {tokens} tokens, expected 1 to {MAX_SEQUENCE_TOKENS}")
    return tokens
