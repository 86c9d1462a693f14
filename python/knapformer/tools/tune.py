"""`knapformer tune`: which topology to train with, by predicted time, with the reasons."""

from __future__ import annotations

import argparse
import math
from typing import Any

from knapformer import ArgumentError, TopologyOption, rank_topologies
from knapformer.tools import cli_args
from knapformer.tools.files import check_outputs, terminal_or_wide, write_json

_FORMAT = "knapformer.tuning"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="topologies for a mix or given lengths, best first", description=__doc__
    )
    cli_args.add_lengths(parser)
    parser.add_argument(
        "--steps", type=cli_args.integer(1, 10**6), default=3, metavar="N", help="of --data (default 3)"
    )
    cli_args.add_workload(parser)
    cli_args.add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the ranking as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json})
    gamma, calibration = cli_args.gamma_and_calibration(args)
    keep_to = cli_args.limits(args, calibration)
    sample = list(cli_args.batches(args, range(args.steps)))
    ranking = rank_topologies(sample, args.d_model, gamma, mask=args.mask, **keep_to)
    if math.isinf(ranking[0].predicted_time):
        raise ArgumentError(f"{ranking[0].topology}: {ranking[0].reason}")
    result = {
        "format": _FORMAT,
        "version": 3,
        "ranks": len(sample[0]),
        "batches": len(sample),
        "d_model": args.d_model,
        "gamma": gamma,
        "mask": args.mask,
        "topologies": [_as_dict(option) for option in ranking],
    }
    write_json(args.json, result)
    if args.json != "-":
        _print_ranking(ranking, len(sample[0]), len(sample))


def _as_dict(option: TopologyOption) -> dict[str, object]:
    kept = math.isfinite(option.predicted_time)  # JSON has no infinity
    return {
        "topology": option.topology,
        "predicted_time_s": option.predicted_time if kept else None,
        "over_ideal": option.efficiency_loss if kept else None,
        "exchanged_fraction": option.exchanged_fraction if kept else None,
        "max_tokens_over_mean": option.max_tokens_over_mean if kept else None,
        "reason": option.reason,
    }


def _print_ranking(ranking: list[TopologyOption], num_ranks: int, num_batches: int) -> None:
    from rich.table import Table

    counted = f"{num_batches} batch" if num_batches == 1 else f"{num_batches} batches"
    table = Table(caption=f"{num_ranks} ranks; seconds of a step, mean over {counted}", caption_justify="left")
    for heading in ("topology", "predicted s", "over ideal", "tokens exchanged", "fullest rank"):
        table.add_column(heading, justify="left" if heading == "topology" else "right", no_wrap=True)
    for option in ranking:
        cells = ("-",) * 4
        if math.isfinite(option.predicted_time):
            cells = (
                f"{option.predicted_time:.4g}",
                f"{option.efficiency_loss - 1:.1%}",
                f"{option.exchanged_fraction:.1%}",
                f"{option.max_tokens_over_mean:.2f} x mean",
            )
        table.add_row(option.topology, *cells)
    console = terminal_or_wide()
    console.print(table)
    for option in ranking:
        console.print(f"{option.topology}: {option.reason}.", soft_wrap=True, highlight=False)
