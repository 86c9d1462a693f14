"""`knapformer tune`: which topology to train with, by predicted time, with the reasons."""

from __future__ import annotations

import argparse
import math
from typing import Any

from knapformer import ArgumentError, TopologyOption, rank_topologies
from knapformer.tools import cli_args, cost_args
from knapformer.tools.files import check_outputs, show, table_of, write_json

_FORMAT = "knapformer.tuning"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="topologies for a mix or given lengths, best first", description=__doc__
    )
    cli_args.add_lengths(parser)
    cli_args.add_count(parser, "--steps", 3, "of --data")
    cost_args.add_workload(parser)
    cost_args.add_limits(parser)
    parser.add_argument("--json", metavar="FILE|-", help="writes the ranking as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json})
    keep_to = cost_args.limits(args)
    sample = list(cli_args.batches(args, range(args.steps)))
    cost_args.warn_if_far(args, args.d_model, max(map(cli_args.longest_of, sample)))
    ranking = rank_topologies(sample, args.d_model, mask=args.mask, **keep_to)
    if math.isinf(ranking[0].predicted_time):
        raise ArgumentError(f"{ranking[0].topology}: {ranking[0].reason}")
    result = {
        "format": _FORMAT,
        "version": 3,
        "ranks": len(sample[0]),
        "batches": len(sample),
        "d_model": args.d_model,
        "gamma": keep_to["gamma"],
        "mask": args.mask,
        "topologies": [_as_dict(option) for option in ranking],
    }
    write_json(args.json, result)
    if args.json != "-":
        _print_ranking(ranking, len(sample[0]), len(sample))
        show(cost_args.assumed(args, **{name: keep_to[name] for name in ("gamma", "cluster", "model")}))


def _as_dict(option: TopologyOption) -> dict[str, object]:
    figures = {
        "predicted_time_s": option.predicted_time,
        "over_ideal": option.efficiency_loss,
        "exchanged_fraction": option.exchanged_fraction,
        "max_tokens_over_mean": option.max_tokens_over_mean,
    }
    kept = math.isfinite(option.predicted_time)  # JSON has no infinity
    return {"topology": option.topology, **(figures if kept else dict.fromkeys(figures)), "reason": option.reason}


def _print_ranking(ranking: list[TopologyOption], num_ranks: int, num_batches: int) -> None:
    counted = f"{num_batches} batch" if num_batches == 1 else f"{num_batches} batches"
    caption = f"{num_ranks} ranks; seconds of a step, mean over {counted}"
    table = table_of(map(_cells, ranking), left="topology", caption=caption)
    show(table, *(f"{option.topology}: {option.reason}." for option in ranking))


def _cells(option: TopologyOption) -> dict[str, str]:
    cells = {
        "predicted s": f"{option.predicted_time:.4g}",
        "over ideal": f"{option.efficiency_loss - 1:.1%}",
        "tokens exchanged": f"{option.exchanged_fraction:.1%}",
        "fullest rank": f"{option.max_tokens_over_mean:.2f} x mean",
    }
    kept = math.isfinite(option.predicted_time)
    return {"topology": option.topology, **(cells if kept else dict.fromkeys(cells, "-"))}
