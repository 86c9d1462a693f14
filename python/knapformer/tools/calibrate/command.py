"""`knapformer calibrate`: measures a model's blocks and the group's exchanges, and fits the workload model to them."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from knapformer import ArgumentError, attention_pairs
from knapformer.tools import cli_args
from knapformer.tools.cli_args import add
from knapformer.tools.launch import check_ranks, run_on_ranks, started_ranks, use_device

_NUM_LENGTHS = 7
# Attention's FLOPs over those of the matrix products, l / 6 d, at the shortest and the longest length.
_ATTENTION_SHARES = (1 / 72, 8 / 9)


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "calibrate", run, help="measures blocks and exchanges here, and fits k and gamma",
        description=__doc__,
    )  # fmt: skip
    add(parser, "--model")
    add(
        parser, "--lengths", type=cli_args.counts(1 << 24), metavar="N,N,...",
        help="tokens, such as 256,1024,4096 (default: 7 lengths, by the model's width)",
    )  # fmt: skip
    add(parser, "--mask", default=None, help="attention's where gamma is fitted (default: the model's)")
    ranks = "local ranks to start: with 2 or more the all-to-all between them is measured too (default 1)"
    add(parser, "--ranks", help=ranks)
    add(parser, "--repeats", default=10, help="rounds that are measured (default 10)")
    add(parser, "--warmup", default=2, help="rounds before them, which do not count (default 2)")
    add(parser, *cli_args.RUN)
    add(parser, "--json", help="writes what --calibration of other commands takes")


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.adapters.named import load_config
    from knapformer.tools.calibrate.worker import calibrate

    num_ranks = check_ranks(args.ranks) if args.ranks is not None or started_ranks() is not None else 1
    config = load_config(args.model)
    lengths = args.lengths or _usual_lengths(config.d_model)
    if len(set(lengths)) < 2:
        raise ArgumentError(f"--lengths: got {len(set(lengths))} lengths, expected at least 2 distinct ones")
    for length in lengths if args.mask is not None else ():
        attention_pairs(args.mask, length)  # an error for a mask of another length
    if num_ranks > 1:
        run_on_ranks(args, num_ranks, partial(calibrate, args, config, lengths))
    else:
        calibrate(args, config, lengths, use_device(args.device))


def _usual_lengths(d_model: int) -> list[int]:
    """In equal ratios, from where attention is a seventieth of the matrix products to where it is nearly as much."""
    low, high = (6 * d_model * share for share in _ATTENTION_SHARES)
    ratio = (high / low) ** (1 / (_NUM_LENGTHS - 1))
    return [max(1, round(low * ratio**i)) for i in range(_NUM_LENGTHS)]
