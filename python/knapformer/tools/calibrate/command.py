"""`knapformer calibrate`: measures a model's blocks and the group's exchanges, and fits the workload model to them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from knapformer.tools.cli_args import (
    add_count,
    add_device,
    add_model,
    add_ranks,
    check_torch,
    counts,
    integer,
    run_settings,
)
from knapformer.tools.files import check_outputs
from knapformer.tools.launch import check_ranks, run_on_ranks, started_ranks


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "calibrate", help="measures blocks and exchanges here, and fits k and gamma", description=__doc__
    )
    add_model(parser)
    parser.add_argument(
        "--block", metavar="MODULE:FUNCTION",
        help="measures your own block: function(device, dtype) returns it, and a function from packed lengths to the "
        "arguments of its forward pass",
    )  # fmt: skip
    parser.add_argument("--d-model", type=integer(1, 1 << 20), metavar="D", help="with --block: its width, in features")
    parser.add_argument(
        "--lengths",
        metavar="N,N,...|FILE",
        help="tokens, such as 256,512,...,16384, or samples as other commands take them, over whose range 7 lengths "
        "are measured (default: 7, by the model's width)",
    )
    add_ranks(parser, "local ranks to start: with 2 or more the all-to-all between them is measured too (default 1)")
    parser.add_argument(
        "--blocks-only", action="store_true",
        help="measures no whole steps, as it does with 2 or more ranks where the model fits: what a step takes beside "
        "its blocks is then the cluster's",
    )  # fmt: skip
    add_count(parser, "--repeats", 10, "of each length")
    add_count(parser, "--warmup", 2, "before them")
    add_device(parser)
    parser.add_argument("--json", metavar="FILE", help="writes what --calibration of other commands takes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_torch()
    from knapformer.tools.calibrate.settings import CalibrationSettings, default_lengths, lengths_over
    from knapformer.tools.sample_files import lengths_of

    num_ranks = check_ranks(args.ranks) if args.ranks is not None or started_ranks() is not None else 1
    check_outputs({"--json": args.json})
    given = run_settings(args)
    if args.block is not None:
        given["model_name"] = args.block
    if args.lengths is None:
        lengths = default_lengths(args.d_model or given["model"].d_model)
    elif Path(args.lengths).exists():
        lengths = lengths_over(lengths_of(args.lengths))
    else:
        lengths = counts(args.lengths, "--lengths", 1 << 24)
    settings = CalibrationSettings(
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        num_rounds=args.repeats,
        num_warmup_rounds=args.warmup,
        measures_steps=not args.blocks_only and args.block is None,
        block=args.block,
        block_d_model=args.d_model,
        mode=args.mode or "training",
        **given,
    )
    if num_ranks > 1:
        run_on_ranks(args.argv, "knapformer.tools.calibrate.worker", settings)
        return
    from knapformer.tools.calibrate.worker import calibrate
    from knapformer.tools.measure.device import use_device

    calibrate(settings, use_device(args.device, args.threads))
