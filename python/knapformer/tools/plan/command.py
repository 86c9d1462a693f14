"""`knapformer plan`: plans of steps, their predicted times over topologies and numbers of ranks, and their pictures.

Needs no ranks, and no torch.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, StepPlan, plan_home
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import OF_DRAW, refuse, remember_defaults
from knapformer.tools.files import check_outputs, show, write_atomically, write_json
from knapformer.tools.measure.figures import PEAK_TFLOPS
from knapformer.tools.plan.predictions import as_dict, print_points
from knapformer.tools.plan.scaling import (
    NO_BALANCER,
    PlannedStep,
    Workload,
    check_scaling,
    parse_ranks,
    plan_micro_batches,
    predict_scaling,
    summary,
    topology_for,
)
from knapformer.tools.plan.tables import print_plan, print_step_plan
from knapformer.tools.report import write_report
from knapformer.tools.report.points import Point

# Options that a plan from a file has fixed already.
_OF_PLANNING = (
    "topology", "ranks", "micro_batches", "sync", "step", "steps", "seed", "scale", "max_text_tokens", "solver",
    "effort", "gamma", "d_model", "mask", "max_tokens_per_rank", "rank_speed",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan", help="plans of steps, their predicted times, and pictures of them", description=__doc__,
        epilog=cli_args.DATA_CODES,
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add_plan(source)
    cli_args.add_data(source)
    cli_args.add_lengths_file(source)
    parser.add_argument(
        "--topology", action="append", metavar="T",
        help="bags of ranks, such as g8n4, g1n2+g2n1 or g8/4/2/1n4, which repeat over the ranks; g8n*: all ranks "
        "together; auto: the best for these lengths; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", metavar="N,N,...",
        help="such as 32,128,...,16384; dots go on by the same factor (default: those of --data or --lengths)",
    )  # fmt: skip
    cli_args.add_micro_batches(parser)
    parser.add_argument(
        "--sync", choices=("micro_batch", "step"), default="micro_batch",
        help="with --micro-batches: ranks wait for each other in each (FSDP2; default), or once a step (DDP)",
    )  # fmt: skip
    parser.add_argument("--step", type=cli_args.integer(0, 2**62), default=0, help="the first (default 0)")
    cli_args.add_count(parser, "--steps", 1, "whose predicted times are averaged")
    cli_args.add_draw(parser)
    cli_args.add_solver(parser)
    parser.add_argument(
        "--effort", type=cli_args.effort, default="default", metavar="E",
        help="of the balanced solver: low, default, high, or a number of moves",
    )  # fmt: skip
    cost_args.add_gamma(parser)
    cli_args.add_d_model(parser)
    cost_args.add_mask(parser)
    cli_args.add_max_tokens(parser, cli_args.UNPLANNED_PEAK)
    cost_args.add_rank_speed(parser)
    cost_args.add_model_options(parser)
    parser.add_argument(
        "--peak-tflops", type=cli_args.number(0, inclusive=False), metavar="F",
        help="of a rank's device, for HFU (default: the data sheet's of a named --cluster)",
    )  # fmt: skip
    files = parser.add_argument_group(
        "files", "Of several topologies or numbers of ranks, the plan is that of the last topology on the first number."
    )
    files.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    files.add_argument("--predictions", metavar="FILE|-", help="writes the predicted steps as JSON")
    files.add_argument("--report", metavar="FILE", help="writes the plan as an HTML file that opens offline")
    files.add_argument(
        "--measured", metavar="FILE", help="step times that --report shows: what simulate or replay --json wrote"
    )
    files.add_argument("--timeline", metavar="FILE", help="the plan's predicted step as a trace for ui.perfetto.dev")
    parser.set_defaults(run=run)
    remember_defaults(parser, _OF_PLANNING)


def run(args: argparse.Namespace) -> None:
    written = {
        option: getattr(args, option[2:])
        for option in ("--json", "--predictions", "--report", "--timeline")
        if getattr(args, option[2:]) != "-"
    }
    check_outputs(written)
    if args.json == args.predictions == "-":
        raise ArgumentError("--predictions: got '-', expected another file than --json writes")
    if args.measured is not None and args.report is None:
        raise ArgumentError("--measured: got one without --report, which shows it, expected none")
    if args.plan is not None:
        _show_file(args)
    else:
        _plan_and_predict(args)


def _show_file(args: argparse.Namespace) -> None:
    for name in _OF_PLANNING:
        if getattr(args, name) != args.defaults[name]:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option}: got one beside a plan, which has its own, expected none")
    plan = cli_args.read_plan(args.plan)
    first = plan.plans[0] if isinstance(plan, StepPlan) else plan
    cost = cost_args.costs(args, of=first)
    if isinstance(plan, Plan):
        plan = plan.on(cost["cluster"], cost["model"])
    elif (cost["cluster"], cost["model"]) != (first.cluster, first.model):
        raise ArgumentError("--cluster: got one beside the plan of a step, which keeps its own, expected none")
    points = []
    if isinstance(plan, StepPlan):
        _check_predicts(args, "the plan of a step of micro-batches")
    elif not plan.num_tokens:
        _check_predicts(args, "a plan without sequences")
    else:
        mask, peak = args.mask, _peak_tflops(args)
        points = [
            summary([PlannedStep([of], 0.0)], name, mask, peak)
            for of, name in ((plan_home(plan), NO_BALANCER), (plan, str(plan.topology)))
        ]
    workload = Workload(
        first.d_model,
        first.workload.gamma,
        first.solver,
        cost["cluster"],
        cost["model"],
        peak_tflops=_peak_tflops(args),
    )
    _write(args, workload, plan, points, 0.0)
    if "-" not in (args.json, args.predictions):
        _print(plan, f"{first.solver}, from {args.plan}", points, 1)
        show(cost_args.assumed(args, first.workload.gamma, cost["cluster"], cost["model"], of=args.plan))


def _plan_and_predict(args: argparse.Namespace) -> None:
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4, or auto")
    if args.sync == "step" and args.micro_batches is None:
        raise ArgumentError("--sync: got 'step' without --micro-batches, expected both or neither")
    if args.lengths is not None:
        refuse(args, OF_DRAW, "--lengths")
    workload, ranks = _workload(args, cost_args.costs(args))
    is_one = len(ranks) == len(args.topology) == args.steps == 1
    # Predictions add up micro-batches. Where ranks wait once a step, its time is not that sum.
    predicts = args.sync == "micro_batch"
    if not predicts and (not is_one or args.predictions is not None):
        raise ArgumentError(
            "--sync: got 'step' with several topologies, ranks or steps, or with predictions, expected 'micro_batch'"
        )
    check_scaling(workload, ranks, args.topology)
    first = next(workload.steps(ranks[0]))
    if args.calibration is not None:
        cost_args.warn_if_far(args, args.d_model, max(map(cli_args.longest_of, first)))
    has_tokens = any(lens for of_ranks in first for lens in of_ranks)
    if not has_tokens:
        _check_predicts(args, "lengths without sequences")
    plan, elapsed_s = _first_plan(workload, first, args.topology[-1], ranks[0])
    points = predict_scaling(workload, ranks, args.topology) if predicts and has_tokens else []
    _write(args, workload, plan, points, elapsed_s)
    if "-" not in (args.json, args.predictions):
        planner = "" if isinstance(plan, StepPlan) else f"{plan.solver} "
        _print(plan if is_one else None, f"{planner}in {elapsed_s * 1e3:.3g} ms", points, workload.num_steps)
        show(cost_args.assumed(args, workload.gamma, workload.cluster, workload.model))


def _check_predicts(args: argparse.Namespace, what: str) -> None:
    if args.predictions is not None:
        raise ArgumentError(f"--predictions: got one with {what}, of which nothing is predicted, expected none")


def _workload(args: argparse.Namespace, cost: dict[str, Any]) -> tuple[Workload, list[int]]:
    common = {
        "d_model": args.d_model, "solver": args.solver, "effort": args.effort, "mask": args.mask,
        "rank_speed": args.rank_speed, "micro_batches": args.micro_batches, "sync": args.sync,
        "max_tokens_per_rank": args.max_tokens_per_rank, "first_step": args.step, "num_steps": args.steps,
        "peak_tflops": _peak_tflops(args), **cost,
    }  # fmt: skip
    ranks = None if args.ranks is None else parse_ranks(args.ranks)
    if args.lengths is not None:
        steps = cli_args.steps_from(args, None, args.step, args.steps)
        if ranks not in (None, [len(steps[0])]):
            raise ArgumentError(f"--ranks: got {args.ranks!r}, expected {len(steps[0])}, as --lengths has, or none")
        return Workload(given=steps, **common), [len(steps[0])]
    mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    return Workload(mix=mix, seed=args.seed, **common), ranks or [mix.num_ranks]


def _peak_tflops(args: argparse.Namespace) -> float | None:
    # A calibrated device has no name here, so its peak is unknown.
    named = None if args.calibration is not None else PEAK_TFLOPS.get(args.cluster or Cluster.names()[0])
    return args.peak_tflops or named


def _first_plan(
    workload: Workload, first: list[cli_args.Lengths], asked: str, num_ranks: int
) -> tuple[Plan | StepPlan, float]:
    """The plan of the first step, and the seconds that planning took."""
    topology = asked if asked == "auto" else topology_for(asked, num_ranks)
    start = time.perf_counter()
    if workload.micro_batches is None:
        return workload.plan(first[0], topology), time.perf_counter() - start
    limit = 0
    if not workload.max_tokens_per_rank:
        topology = workload.topology(asked, num_ranks)
        limit = plan_micro_batches(replace(workload, num_steps=1), topology, num_ranks)[0].max_tokens
        start = time.perf_counter()
    return workload.plan_step(first, topology, limit, routed=True), time.perf_counter() - start


def _write(
    args: argparse.Namespace, workload: Workload, plan: Plan | StepPlan, points: list[Point], plan_s: float
) -> None:
    from knapformer.tools.report.page import measured_of
    from knapformer.tools.report.timeline import predicted_timeline, write_timeline

    if args.report is not None:
        measured_s = None if args.measured is None else measured_of(args.measured)
        scaling = points if len({point.num_ranks for point in points}) > 1 else []
        write_report(args.report, plan, measured_s=measured_s, points=scaling)
    if args.json == "-":
        print(plan.to_json())
    elif args.json is not None:
        write_atomically(args.json, plan.to_json() + "\n")
    write_json(args.predictions, as_dict(workload, points))
    if args.timeline is not None:
        shown = plan if isinstance(plan, Plan) else max(plan.plans, key=lambda of: of.predicted_time)
        write_timeline(args.timeline, predicted_timeline(shown, plan_s))


def _print(plan: Plan | StepPlan | None, took: str, points: list[Point], num_steps: int) -> None:
    if isinstance(plan, StepPlan):
        print_step_plan(plan, took)
    elif plan is not None:
        print_plan(plan, took)
    if points:
        print_points(points, num_steps)
