"""Options that were given beside others with which nothing reads them: they are refused, and not ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from knapformer import ArgumentError

#: How batches are drawn from data codes.
OF_DRAW = ("seed", "scale", "max_text_tokens")


def remember_defaults(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """For `refuse`: what each option of these is where it is not given. names: as in the parsed arguments."""
    parser.set_defaults(defaults={name: parser.get_default(name) for name in names})


def refuse(args: argparse.Namespace, names: Iterable[str], beside: str) -> None:
    """An option that is given its default cannot be told from one that is not given. Raises ArgumentError."""
    for name in names:
        if getattr(args, name) != args.defaults[name]:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option}: got one beside {beside}, with which nothing uses it, expected none")
