"""Runs a command of knapformer on forked ranks: a new interpreter would need seconds to import torch.

So this does not test how a command starts its ranks or joins those of torchrun, and how ranks end.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from distributed.ranks import run_ranks
from knapformer.tools import launch
from knapformer.tools.cli import main


def simulate(num_ranks: int, *options: str) -> str:
    """What rank 0 of `knapformer simulate` printed on this many ranks."""
    return run_ranks(_simulate, num_ranks, ["simulate", "--ranks", str(num_ranks), *options], timeout_s=240)[0]


def _simulate(rank: int, world_size: int, command: list[str]) -> str:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ["TORCHELASTIC_RUN_ID"] = "forked"
    printed = io.StringIO()
    with (
        mock.patch.object(launch, "joined_group", _this_group),
        mock.patch.object(launch, "_leave", sys.exit),
        contextlib.redirect_stdout(printed),
    ):
        try:
            status = main(command)
        except SystemExit as ended:
            status = ended.code
    assert status == 0, status
    return printed.getvalue()


@contextlib.contextmanager
def _this_group(device: str) -> Iterator[torch.device]:
    yield torch.device("cpu")
