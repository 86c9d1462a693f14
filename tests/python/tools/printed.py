"""Runs commands in this process, and reads what they printed."""

from __future__ import annotations

import pytest
from knapformer.tools.cli import main

MIXED = ["--data", "mixed", "--ranks", "32"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """The exit status, standard output, and standard error."""
    status = main(args)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def check_tables(text: str) -> None:
    """Checks that tables fit 80 columns, and that their abbreviations are explained."""
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert len(table) >= 5
    assert max(map(len, table)) <= 80
    meanings = {"WIR": "highest over lowest work", "FBL": "orward and backward", "TPS": "okens per second"}
    for word, meaning in meanings.items():
        assert word not in "".join(table) or meaning in " ".join(text.split()), word
