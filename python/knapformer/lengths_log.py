"""A log of the lengths that ranks draw, which `knapformer doctor` reads. Needs no torch, and no collective.

A rank's file is lines of JSON, one for each batch, with the lengths that it drew; {"length": 40, "mask": "causal"} is
one with a mask of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from knapformer._core import ArgumentError, attention_pairs
from knapformer.json_file import line_value


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str], rank: int | None = None, num_ranks: int | None = None
) -> Iterator[Callable[..., None]]:
    """A log of what this rank draws, for `knapformer doctor FOLDER`:

        with knapformer.record("lengths") as log:
            for batch in loader:
                log(batch.seq_lens)  # with masks of samples: log(batch.seq_lens, batch.masks)

    Each rank writes a file of its own in `folder`, which all ranks may share. The log of an earlier run is replaced.
    rank, num_ranks: None: RANK and WORLD_SIZE, as torchrun sets them; without these, one rank.

    log(seq_lens, masks=None): the next batch (with accumulation: micro-batch) of this rank. seq_lens: the tokens of
    each sample, an iterable or a tensor; empty for a batch without samples. masks: of each sample the text of its mask;
    None: those of the model.

    Both raise ArgumentError, and OSError.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    num_ranks = int(os.environ.get("WORLD_SIZE", "1")) if num_ranks is None else num_ranks
    if not 0 <= rank < num_ranks:
        raise ArgumentError(f"rank: got {rank}, expected 0 to {num_ranks - 1}, of num_ranks")
    Path(folder).mkdir(parents=True, exist_ok=True)

    def log(seq_lens: Iterable[Any], masks: Iterable[str] | None = None) -> None:
        lens = list(seq_lens)
        of_samples = ["full"] * len(lens) if masks is None else list(masks)
        if len(of_samples) != len(lens):
            raise ArgumentError(f"masks: got {len(of_samples)} masks, expected one for each of the {len(lens)} samples")
        for mask, length in zip(of_samples, lens, strict=True):
            attention_pairs(mask, length)  # an error for what is no length, or no mask of this length
        samples = [{"length": int(n), "mask": mask} for n, mask in zip(lens, of_samples, strict=True)]
        file.write(json.dumps(list(map(int, lens)) if masks is None else samples) + "\n")

    # A line at a time reaches the file, so that a run that is killed leaves whole batches.
    with open(Path(folder, log_name(rank, num_ranks)), "w", buffering=1, encoding="utf-8") as file:
        yield log


def log_name(rank: int, num_ranks: int) -> str:
    return f"rank-{rank}-of-{num_ranks}.jsonl"


def read_log(folder: str | os.PathLike[str]) -> Iterator[list[Any]]:
    """For each batch that all ranks have drawn: what each rank's line holds, unchecked; its text where it is no JSON.

    Raises ArgumentError, OSError.
    """
    names = sorted(path.name for path in Path(folder).glob("rank-*-of-*.jsonl"))
    counts = {name.removesuffix(".jsonl").rpartition("-")[2] for name in names}
    if len(counts) != 1 or not (count := counts.pop()).isdecimal():
        runs = f"logs of {', '.join(sorted(counts))} ranks" if counts else "no log"
        raise ArgumentError(f"{folder}: got {runs}, expected what knapformer.record wrote in one run")
    expected = [log_name(rank, int(count)) for rank in range(int(count))]
    if missing := sorted(set(expected) - set(names)):
        raise ArgumentError(f"{folder}: got no {missing[0]}, expected a log of each of {count} ranks")
    logs = [Path(folder, name).read_text(encoding="utf-8", errors="replace").splitlines() for name in expected]
    for lines in zip(*logs, strict=False):  # of the last batches some ranks may have nothing yet
        yield list(map(line_value, lines))
