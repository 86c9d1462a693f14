"""`knapformer predict`: step times of a mix, or of given lengths, before booking the cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix
from knapformer.tools import cli_args, cost_args
from knapformer.tools.files import check_outputs, show, table_of, write_json
from knapformer.tools.measure.figures import PEAK_TFLOPS
from knapformer.tools.plots import COLOURS, new_figure, save_figure
from knapformer.tools.predict.scaling import NO_BALANCER, Workload, parse_ranks, predict_scaling, topology_for
from knapformer.tools.report import write_report
from knapformer.tools.report.points import PANELS, Point, lines_of
from knapformer.tools.report.timeline import predicted_timeline, write_timeline

_FORMAT = "knapformer.prediction"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("predict", help="predicted step times as the cluster grows", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add_data(source, "--mix", "--data")
    cli_args.add_lengths_file(source)
    parser.add_argument("--ranks", metavar="N,N,...", help="such as 32,128,...,16384; dots go on by the same factor")
    parser.add_argument(
        "--topology", required=True, action="append", metavar="T",
        help="such as g8n4, which repeats over the ranks, or g8n*, all ranks together; may be given several times",
    )  # fmt: skip
    cli_args.add_whole_steps(parser)
    cli_args.add_solver(parser)
    cost_args.add_gamma(parser)
    cli_args.add_d_model(parser)
    cli_args.add_count(parser, "--steps", 3, "averaged")
    cli_args.add_seed(parser)
    cost_args.add_model_options(parser)
    parser.add_argument(
        "--peak-tflops", type=cli_args.number(0, inclusive=False), metavar="F",
        help="of a rank's device, for HFU (default: the data sheet's of a named --cluster)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE|-", help="writes the figures as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draws them: .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument(
        "--report", metavar="FILE", help="one HTML file, with the first plan of the last topology in detail"
    )
    parser.add_argument("--timeline", metavar="FILE", help="that plan's predicted step as a trace for Perfetto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    files = {"--timeline": args.timeline, "--picture": args.picture, "--report": args.report}
    check_outputs({"--json": None if args.json == "-" else args.json, **files})
    workload, ranks = _workload(args, cost_args.costs(args))
    points = predict_scaling(workload, ranks, args.topology)
    if args.calibration is not None:
        longest = max(map(cli_args.longest_of, next(workload.steps(ranks[0]))))
        cost_args.warn_if_far(args, args.d_model, longest)

    result = {
        "format": _FORMAT,
        "version": 3,
        "mix": None if workload.mix is None else str(workload.mix),
        "d_model": workload.d_model,
        "gamma": workload.gamma,
        "solver": workload.solver,
        "num_steps": workload.num_steps if workload.mix is not None else 1,
        "micro_batches": workload.micro_batches,
        "max_tokens_per_rank": workload.max_tokens_per_rank,
        "seed": workload.seed,
        "peak_tflops": workload.peak_tflops,
        **cost_args.settings_dict(workload.cluster, workload.model),
        "points": [point.as_dict() for point in points],
    }
    write_json(args.json, result)
    if args.picture is not None:
        draw_scaling(args.picture, points, title=args.mix or args.lengths)
    if args.report is not None or args.timeline is not None:
        topology = topology_for(args.topology[-1], ranks[0])
        plan = workload.plan(next(workload.steps(ranks[0]))[0], topology)
        if args.report is not None:
            write_report(args.report, plan, points=points)
        if args.timeline is not None:
            write_timeline(args.timeline, predicted_timeline(plan))
    if args.json != "-":
        print_points(points)
        show(cost_args.assumed(args, workload.gamma, workload.cluster, workload.model))


def _workload(args: argparse.Namespace, cost: dict[str, Any]) -> tuple[Workload, list[int]]:
    # A calibration is of a device that has no name here.
    named = None if args.calibration is not None else PEAK_TFLOPS.get(args.cluster or Cluster.names()[0])
    common = {"d_model": args.d_model, "solver": args.solver, "peak_tflops": args.peak_tflops or named, **cost}
    if args.lengths is not None:
        if args.micro_batches is not None:
            raise ArgumentError(
                "--micro-batches: got one beside --lengths, which are of one micro-batch, expected none"
            )
        lengths = cli_args.read_lengths(args.lengths)
        if args.ranks is not None and parse_ranks(args.ranks) != [len(lengths)]:
            raise ArgumentError(f"--ranks: got {args.ranks!r}, expected {len(lengths)}, as --lengths has, or none")
        return Workload(lengths=lengths, **common), [len(lengths)]
    mix = DataMix.parse(args.mix)
    ranks = [mix.num_ranks] if args.ranks is None else parse_ranks(args.ranks)
    of_steps = {"num_steps": args.steps, "micro_batches": args.micro_batches}
    limit = args.max_tokens_per_rank
    return Workload(mix=mix, seed=args.seed, **of_steps, max_tokens_per_rank=limit, **common), ranks


def draw_scaling(path: str, points: list[Point], title: str) -> None:
    lines = lines_of(points)
    figure, axes = new_figure(3, 13, 4)
    ticks = sorted({point.num_ranks for point in points})
    for axis, (label, value) in zip(axes, PANELS, strict=True):
        for colour, (name, line) in zip(COLOURS * len(lines), lines.items(), strict=False):
            axis.plot([p.num_ranks for p in line], [value(p) for p in line], "o-", color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45 if len(ticks) > 5 else 0)
        axis.minorticks_off()
        axis.set(xlabel="ranks", title=label, ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), frameon=False)
    save_figure(figure, path, title)


def print_points(points: list[Point]) -> None:
    unbalanced_s = {point.num_ranks: point.mean["total_s"] for point in points if point.topology == NO_BALANCER}
    different = {(point.num_ranks, point.topology): point for point in points}.values()
    show(
        table_of(
            (_cells(point, point.mean, unbalanced_s[point.num_ranks]) for point in different),
            left="topology",
            caption="seconds; peak: tokens of the fullest rank; the last four columns: GB that a rank sends in a step",
        ),
        "Predicted forward and backward time (docs/cluster_model.md); efficiency: the work alone over all. WIR: "
        "highest over lowest work of a rank. HFU: the FLOPs computed, recomputed ones too, over the devices' peak.",
    )


def _cells(point: Point, mean: Mapping[str, float], unbalanced_s: float) -> dict[str, str]:
    between_bytes = mean["route_bytes_between_nodes"] + mean["attention_bytes_between_nodes"]
    rest_s = mean["route_s"] + mean["fsdp_s"] + mean["host_s"] + mean["fixed_s"]
    gb_of_all_ranks = point.num_ranks * 1e9
    cells = {
        "ranks": f"{point.num_ranks:,}",
        "topology": point.topology,
        "step s": f"{mean['total_s']:.3f}",
        "compute": f"{mean['token_s'] + mean['attention_s']:.3f}",
        "exchange": f"{mean['exchange_s']:.3f}",
        "rest": f"{rest_s:.3f}",
        "efficiency": f"{mean['efficiency']:.1%}",
        "speed-up": f"{unbalanced_s / mean['total_s']:.2f}",
        "WIR": f"{mean['wir']:.2f}",
        "M tok/s": f"{mean['tokens_per_s'] / 1e6:.3f}",
        "peak": f"{mean['max_tokens_per_rank']:,.0f}",
        "plan ms": f"{point.plan_s * 1e3:.3g}",
        "route": f"{mean['route_bytes'] / gb_of_all_ranks:.2f}",
        "attention": f"{mean['attention_bytes'] / gb_of_all_ranks:.2f}",
        "off node": f"{between_bytes / gb_of_all_ranks:.2f}",
        "FSDP": f"{mean['fsdp_bytes'] / gb_of_all_ranks:.1f}",
    }
    return cells if point.hfu is None else {**cells, "HFU": f"{point.hfu:.1%}"}
