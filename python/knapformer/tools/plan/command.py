"""`knapformer plan`: plans of steps, their predicted times over topologies and numbers of ranks, and their pictures.

Needs no ranks, and no torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, Topology
from knapformer.tools import cli_args, settings
from knapformer.tools.cli_args import DRAW, add
from knapformer.tools.draws import Source
from knapformer.tools.files import cells_of, show, table_of, write, write_json
from knapformer.tools.model_presets import PRESETS
from knapformer.tools.ways import (
    NO_BALANCER,
    PEAK_TFLOPS,
    PLANNED_STEP,
    DrawnSteps,
    OptimizerStep,
    heads_text,
    means,
    planned_whole,
    usual_ways,
)

_D_MODEL = 3072
Point = dict[str, Any]  # of a file of predictions: a topology on a number of ranks
_KEYS = {"ranks": "num_ranks:,", "topology": "topology:"}
_POINT = {
    "step s": "total_s:.3f", "speed-up": "speed_up:.2f", "compute": "compute_s:.3f", "exchange": "exchange_s:.3f",
    "rest": "rest_s:.3f", "efficiency": "efficiency:.1%", "HFU": "hfu:.1%", "WIR": "wir:.2f:inf",
    "peak": "max_tokens:,.0f", "GB": "sent_gb:",
}  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "plan", run, help="plans of steps, their predicted times, and pictures of them",
        description=__doc__, epilog=cli_args.DATA_CODES,
    )  # fmt: skip
    add(parser.add_mutually_exclusive_group(required=True), "--data", "--lengths")
    add(
        parser, "--topology",
        help="bags of ranks, such as g8n4, g1n2+g2n1 or g8/4/2/1n4, which repeat over the ranks; g8n*: all ranks "
        "together; auto: the best for these lengths; may be given several times",
    )  # fmt: skip
    add(
        parser, "--ranks", type=cli_args.counts(cli_args.MAX_RANKS), default=[None], metavar="N,N,...",
        help="numbers of ranks, such as 32,128,512 (default: that of --data or --lengths)",
    )  # fmt: skip
    add(parser, "--micro-batches")
    add(parser, "--steps", default=1, help="steps whose predicted times are averaged (default 1)")
    add(parser, *DRAW, "--solver", "--effort")
    cli_args.add_gamma(parser)
    add(
        parser, "--model", default=None, choices=PRESETS, metavar=None,
        help="the model whose width, blocks and heads count (default: FLUX's, with heads that always divide)",
    )  # fmt: skip
    add(parser, "--d-model", help="width, in features (default: the --model's, or 3072)")
    add(parser, "--mask", "--max-tokens-per-rank")
    cli_args.add_model_options(parser)
    add(parser, "--peak-tflops", help="peak of a rank's device, for HFU (default: of a named --cluster)")
    files = parser.add_argument_group(
        "files", "Of several topologies or numbers of ranks, the plan is that of the last topology on the first number."
    )
    add(files, "--json", help="writes the plan as JSON")
    add(files, "--predictions", metavar="FILE|-", help="writes the predicted steps as JSON")
    add(files, "--report")


def run(args: argparse.Namespace) -> None:
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4, or auto")
    preset = PRESETS.get(args.model)
    model = None if preset is None else preset.trained_model().replace(routed=True)
    planning = settings.planning(args, model=model, d_model=args.d_model or (preset.d_model if preset else _D_MODEL))
    limit, count = args.max_tokens_per_rank, args.micro_batches or 1
    draws = [
        DrawnSteps(planning, Source(args, ranks).batches(count), max_tokens_per_rank=limit) for ranks in args.ranks
    ]
    for draw in draws:
        for topology in args.topology:
            if topology != "auto":
                Topology(topology_for(topology, draw.num_ranks), draw.num_ranks)
    lengths = draws[0].batches[0]
    settings.warn_if_far(args, planning, lengths)
    if not any(lens for of_ranks in lengths for lens in of_ranks):
        raise ArgumentError(f"{args.lengths}: got a first step without sequences, expected at least one sequence")
    # A calibrated device has no name here, so its peak is unknown.
    named = None if args.calibration is not None else PEAK_TFLOPS.get(args.cluster or Cluster.names()[0])
    peak_tflops = args.peak_tflops or named
    made, points = list[OptimizerStep](), list[Point]()
    for draw in draws:
        topologies = dict.fromkeys(_topology(draw, asked) for asked in args.topology)
        ways = usual_ways(draw, topologies, args.micro_batches is not None)
        made += [steps[0] for steps in ways.values()][-1:]  # the first step of the last topology
        points += [_point(steps, name, peak_tflops) for name, steps in ways.items()]
    plan, heads = made[0].plan, heads_text(draws[0], made[0].plan)
    if args.report is not None:
        from knapformer.tools.plan.report import write_report

        write_report(args.report, plan, _plan_text(plan), heads)
    write(args.json, plan.to_json())
    if args.predictions is not None:
        options = ("micro_batches", "max_tokens_per_rank", "seed")
        write_json(args.predictions, {
            "format": "knapformer.prediction",
            "version": 4,
            "mix": None if args.data is None else str(DataMix.parse(args.data)),
            "d_model": planning.d_model,
            "gamma": planning.gamma,
            "solver": planning.solver,
            "num_steps": args.steps,
            **{name: getattr(args, name) for name in options},
            "peak_tflops": peak_tflops,
            **settings.settings_dict(planning),
            "points": points,
        })  # fmt: skip
    if "-" in (args.json, args.predictions):
        return
    if len(draws) == len(args.topology) == args.steps == 1:
        parts = f"{plan.num_micro_batches} micro-batches, " if plan.num_micro_batches > 1 else ""
        size = f"{plan.num_ranks} ranks, {parts}{plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens"
        show(f"{plan.topology}, {size}, {plan.solver} in {made[0].plan_s * 1e3:.3g} ms", _plan_text(plan))
    show(*filter(None, [heads]))
    _print_points(points, args.steps)
    show(settings.assumed(args, planning))


def topology_for(text: str, num_ranks: int) -> str:
    """'g8n*' is as many bags of 8 as the ranks make; any other text stays. Raises ArgumentError."""
    if not text.endswith("n*"):
        return text
    num_ranks_per_bag = Topology(text[:-1] + "1").num_ranks
    if "+" in text or num_ranks % num_ranks_per_bag:
        raise ArgumentError(
            f"topology: got {text!r} for {num_ranks} ranks, expected one term, with bags whose size divides the ranks"
        )
    return f"{text[:-1]}{num_ranks // num_ranks_per_bag}"


def _topology(draw: DrawnSteps, asked: str) -> str:
    """'auto' is the best of the first step."""
    if asked != "auto":
        return topology_for(asked, draw.num_ranks)
    return str(next(planned_whole(draw, asked)).plans[0].topology)


def _point(steps: Sequence[OptimizerStep], name: str, peak_tflops: float | None) -> Point:
    """plan_s: median wall time of the planner on this machine."""
    plan_s, topology = statistics.median(step.plan_s for step in steps), "none" if name == NO_BALANCER else name
    named = {"num_ranks": steps[0].plans[0].num_ranks, "topology": topology, "plan_s": plan_s}
    return named | means(steps, peak_tflops)


def _plan_text(plan: Plan) -> str:
    of_mean = f"{plan.max_tokens * plan.num_ranks * plan.num_micro_batches / plan.num_tokens:.2f} times the mean"
    if plan.num_micro_batches > 1:
        of_mean += " of a micro-batch"
        waits = "Ranks wait for each other in every micro-batch."
    else:
        gain = plan.max_over_mean_before / plan.max_over_mean_after
        waits = f"Without balancing the slowest rank computes {gain:.2f} times as much."
    more = f"{plan.predicted_time / plan.ideal_time - 1:.2%}"
    return (
        f"Predicted: {plan.predicted_time:.4g} s a step, {more} more than with equal work on all ranks and nothing "
        f"sent, and at most {max(plan.gap, 0):.2%} more than the best plan of this topology. {waits}\n"
        f"{plan.tokens_moved / plan.num_tokens:.1%} of the tokens change ranks, and {plan.exchanged_fraction:.1%} are "
        f"exchanged in attention; the fullest rank holds {plan.max_tokens:,} tokens, {of_mean}."
    )


def _print_points(points: Sequence[Mapping[str, Any]], num_steps: int) -> None:
    unbalanced_s = {point["num_ranks"]: point["total_s"] for point in points if point["topology"] == "none"}
    mean = f", means over {num_steps} steps" if num_steps > 1 else ""
    rows = [_row_of(point, unbalanced_s[point["num_ranks"]]) for point in points]
    caption = (
        f"Predicted seconds of a step{mean}, forward and backward pass. Compute: of the slowest rank. Rest: route, "
        "what FSDP and the host add, the fixed time. Efficiency: the work alone, spread evenly, over the step. HFU "
        "(hardware FLOPs utilization): FLOPs computed, recomputed ones too, over the device's peak. WIR (workload "
        "imbalance ratio): highest over lowest work of a rank. Peak: tokens of the fullest rank. GB: what a rank sends "
        "in a step, inside its node / to other nodes, without FSDP's."
    )
    table = table_of(
        (cells_of(row, _KEYS | _POINT) for row in rows), left="topology", keys=tuple(_KEYS), caption=caption
    )
    whole = any(point["topology"].startswith(PLANNED_STEP) for point in points)
    title = PLANNED_STEP.capitalize()
    text = f"{title}: all micro-batches at once, of the topology above, without route: ranks load what they compute."
    show(table, *([text] if whole else []))


def _row_of(point: Mapping[str, Any], unbalanced_s: float) -> dict[str, Any]:
    # The row of steps planned whole stands below that of their topology.
    is_whole, gb_of_all_ranks = point["topology"].startswith(PLANNED_STEP), point["num_ranks"] * 1e9
    sent, between = (point[f"route_bytes{of}"] + point[f"attention_bytes{of}"] for of in ("", "_between_nodes"))
    return {
        **point,
        "topology": f"  {PLANNED_STEP}" if is_whole else point["topology"],
        "speed_up": unbalanced_s / point["total_s"],
        "rest_s": point["route_s"] + point["fsdp_s"] + point["host_s"] + point["fixed_s"],
        "sent_gb": f"{(sent - between) / gb_of_all_ranks:.2f}/{between / gb_of_all_ranks:.2f}",
    }
