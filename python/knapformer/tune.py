"""`knapformer tune`: which topology to train with, by predicted time, with the reasons."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from knapformer import ArgumentError, TopologyOption, rank_topologies
from knapformer.options import add_lengths, add_limits, add_workload, batches, gamma_and_calibration, integer, limits
from knapformer.output import check_outputs, terminal_or_wide, write_atomically

_FORMAT = "knapformer.tuning"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="topologies for a mix or given lengths, best first", description=__doc__
    )
    add_lengths(parser)
    parser.add_argument("--steps", type=integer(1, 10**6), default=3, metavar="N", help="of --data (default 3)")
    add_workload(parser)
    add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the ranking as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json})
    gamma, calibration = gamma_and_calibration(args)
    keep_to = limits(args, calibration)
    sample = list(batches(args, range(args.steps)))
    ranking = rank_topologies(sample, args.d_model, gamma, mask=args.mask, **keep_to)
    if math.isinf(ranking[0].predicted_time):
        raise ArgumentError(f"{ranking[0].topology}: {ranking[0].reason}")
    text = json.dumps(
        {
            "format": _FORMAT,
            "version": 1,
            "ranks": len(sample[0]),
            "batches": len(sample),
            "d_model": args.d_model,
            "gamma": gamma,
            "mask": args.mask,
            "topologies": [_as_dict(option) for option in ranking],
        },
        indent=1,
    )
    if args.json == "-":
        print(text)
        return
    if args.json is not None:
        write_atomically(args.json, text + "\n")
    _print_ranking(ranking, len(sample[0]), len(sample))


def _as_dict(option: TopologyOption) -> dict[str, object]:
    kept = math.isfinite(option.predicted_time)  # JSON has no infinity
    return {
        "topology": option.topology,
        "predicted_time_s": option.predicted_time if kept else None,
        "over_ideal": option.efficiency_loss if kept else None,
        "crossing": option.crossing if kept else None,
        "max_tokens_over_mean": option.max_tokens_over_mean if kept else None,
        "reason": option.reason,
    }


def _print_ranking(ranking: list[TopologyOption], num_ranks: int, num_batches: int) -> None:
    from rich.table import Table

    counted = f"{num_batches} batch" if num_batches == 1 else f"{num_batches} batches"
    table = Table(caption=f"{num_ranks} ranks; a block, forward, mean over {counted}", caption_justify="left")
    for heading in ("topology", "predicted ms", "over ideal", "tokens crossing", "fullest rank"):
        table.add_column(heading, justify="left" if heading == "topology" else "right", no_wrap=True)
    for option in ranking:
        cells = ("-",) * 4
        if math.isfinite(option.predicted_time):
            cells = (
                f"{option.predicted_time * 1e3:.3f}",
                f"{option.efficiency_loss - 1:.1%}",
                f"{option.crossing:.1%}",
                f"{option.max_tokens_over_mean:.2f} x mean",
            )
        table.add_row(option.topology, *cells)
    console = terminal_or_wide()
    console.print(table)
    for option in ranking:
        console.print(f"{option.topology}: {option.reason}.", soft_wrap=True, highlight=False)
