"""`knapformer plan`: plans of steps, their predicted times over topologies and numbers of ranks, and their pictures.

Needs no ranks, and no torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, StepPlan, Topology, plan_home
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import OF_DRAW, refuse, remember_defaults
from knapformer.tools.files import check_outputs, show, write_atomically, write_json
from knapformer.tools.plan.tables import print_plan, print_points, print_step_plan
from knapformer.tools.report import write_report
from knapformer.tools.ways import (
    PEAK_TFLOPS,
    PLANNED_STEP,
    Draw,
    Lengths,
    Planning,
    Step,
    at_home,
    batches_of_mix,
    by_micro_batch,
    lengths_of_step,
    means,
    micro_batches_of_step,
    planned_whole,
)

_FORMAT = "knapformer.prediction"
Point = dict[str, Any]  # of a file of predictions: a topology on a number of ranks
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
    cli_args.add(source, "--from", "--data", "--lengths")
    parser.add_argument(
        "--topology", action="append", metavar="T",
        help="bags of ranks, such as g8n4, g1n2+g2n1 or g8/4/2/1n4, which repeat over the ranks; g8n*: all ranks "
        "together; auto: the best for these lengths; may be given several times",
    )  # fmt: skip
    cli_args.add(
        parser, "--ranks", type=str, metavar="N,N,...",
        help="such as 32,128,...,16384; dots go on by the same factor (default: those of --data or --lengths)",
    )  # fmt: skip
    cli_args.add(parser, "--micro-batches")
    parser.add_argument(
        "--sync", choices=("micro_batch", "step"), default="micro_batch",
        help="with --micro-batches: ranks wait for each other in each (FSDP2; default), or once a step (DDP)",
    )  # fmt: skip
    parser.add_argument("--step", type=cli_args.integer(0, 2**62), default=0, help="the first (default 0)")
    cli_args.add(parser, "--steps", default=1, help="whose predicted times are averaged (default 1)")
    cli_args.add(parser, *cli_args.DRAW, "--solver")
    parser.add_argument(
        "--effort", type=cli_args.effort, default="default", metavar="E",
        help="of the balanced solver: low, default, high, or a number of moves",
    )  # fmt: skip
    cli_args.add_gamma(parser)
    cli_args.add(parser, "--d-model", default=3072, help="width, in features (default 3072)")
    cli_args.add(parser, "--mask", "--max-tokens-per-rank", "--rank-speed")
    cli_args.add_model_options(parser)
    cli_args.add(
        parser, "--peak-tflops", help="of a rank's device, for HFU (default: the data sheet's of a named --cluster)"
    )
    files = parser.add_argument_group(
        "files", "Of several topologies or numbers of ranks, the plan is that of the last topology on the first number."
    )
    files.add_argument("--json", metavar="FILE|-", help="writes the plan as JSON")
    files.add_argument("--predictions", metavar="FILE|-", help="writes the predicted steps as JSON")
    cli_args.add(files, "--report")
    files.add_argument(
        "--measured", metavar="FILE", help="step times that --report shows: what simulate or replay --json wrote"
    )
    parser.set_defaults(run=run)
    remember_defaults(parser, _OF_PLANNING)


def run(args: argparse.Namespace) -> None:
    written = {
        option: getattr(args, option[2:])
        for option in ("--json", "--predictions", "--report")
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
    refuse(args, _OF_PLANNING, "a plan", "which has its own")
    plan = cli_args.read_plan(args.plan)
    first = plan.plans[0] if isinstance(plan, StepPlan) else plan
    cost = cost_args.costs(args, of=first) | {"gamma": first.workload.gamma}
    planning = Planning(first.d_model, **cost, mask=args.mask, solver=first.solver)
    if isinstance(plan, Plan):
        plan = plan.on(planning.cluster, planning.model)
    elif (planning.cluster, planning.model) != (first.cluster, first.model):
        raise ArgumentError("--cluster: got one beside the plan of a step, which keeps its own, expected none")
    points = []
    if isinstance(plan, StepPlan):
        _check_predicts(args, "the plan of a step of micro-batches")
    elif not plan.num_tokens:
        _check_predicts(args, "a plan without sequences")
    else:
        points = [
            _point([Step([of])], name, args) for of, name in ((plan_home(plan), "none"), (plan, str(plan.topology)))
        ]
    _write(args, planning, plan, points)
    if "-" not in (args.json, args.predictions):
        _print(plan, f"{first.solver}, from {args.plan}", points, 1)
        show(cost_args.assumed(args, **cost, of=args.plan))


def _plan_and_predict(args: argparse.Namespace) -> None:
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4, or auto")
    if args.sync == "step" and args.micro_batches is None:
        raise ArgumentError("--sync: got 'step' without --micro-batches, expected both or neither")
    if args.lengths is not None:
        refuse(args, OF_DRAW, "--lengths")
    cost = cost_args.costs(args)
    planning = Planning(
        args.d_model, **cost, mask=args.mask, rank_speed=args.rank_speed, solver=args.solver, effort=args.effort
    )
    ranks, batches_on = _source(args)
    is_one = len(ranks) == len(args.topology) == args.steps == 1
    # Predictions add up micro-batches. Where ranks wait once a step, its time is not that sum.
    predicts = args.sync == "micro_batch"
    if not predicts and (not is_one or args.predictions is not None):
        raise ArgumentError(
            "--sync: got 'step' with several topologies, ranks or steps, or with predictions, expected 'micro_batch'"
        )
    for num_ranks in ranks:
        for topology in args.topology:
            if topology != "auto":
                Topology(topology_for(topology, num_ranks), num_ranks)

    def draw_on(num_ranks: int) -> Draw:
        return Draw(planning, batches_on(num_ranks), seed=args.seed, max_tokens=args.max_tokens_per_rank)

    first = draw_on(ranks[0])
    if args.calibration is not None:
        cost_args.warn_if_far(args, args.d_model, max(map(cli_args.longest_of, first.batches[0])))
    has_tokens = any(lens for of_ranks in first.batches[0] for lens in of_ranks)
    if not has_tokens:
        _check_predicts(args, "lengths without sequences")
    plan, elapsed_s = _first_plan(args, replace(first, batches=first.batches[:1]))
    points = []
    for num_ranks in ranks if predicts and has_tokens else []:
        points += _points(args, first if num_ranks == ranks[0] else draw_on(num_ranks))
    _write(args, planning, plan, points)
    if "-" not in (args.json, args.predictions):
        planner = "" if isinstance(plan, StepPlan) else f"{plan.solver} "
        _print(plan if is_one else None, f"{planner}in {elapsed_s * 1e3:.3g} ms", points, args.steps)
        show(cost_args.assumed(args, **cost))


def _check_predicts(args: argparse.Namespace, what: str) -> None:
    if args.predictions is not None:
        raise ArgumentError(f"--predictions: got one with {what}, of which nothing is predicted, expected none")


def _source(args: argparse.Namespace) -> tuple[list[int], Callable[[int], list[list[Lengths]]]]:
    """The numbers of ranks, and the batches of the steps on such a number, [step][micro-batch][rank]."""
    ranks = None if args.ranks is None else cli_args.counts(args.ranks, "--ranks", cli_args.MAX_RANKS)
    numbers, count = range(args.step, args.step + args.steps), args.micro_batches or 1
    if args.lengths is not None:
        steps = cli_args.steps_from(args, None, args.step, args.steps)
        if ranks not in (None, [len(steps[0])]):
            raise ArgumentError(f"--ranks: got {args.ranks!r}, expected {len(steps[0])}, as --lengths has, or none")
        cut = [micro_batches_of_step(steps[number], count) for number in numbers]
        return [len(steps[0])], lambda _: cut
    mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    ranks = ranks or [mix.num_ranks]
    for num_ranks in ranks:
        mix.check_divides(num_ranks)
    return ranks, lambda num_ranks: batches_of_mix(mix, args.seed, numbers, count, num_ranks)


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


def _topology(args: argparse.Namespace, draw: Draw, asked: str) -> str:
    """'auto' is the best of the first step."""
    if asked != "auto":
        return topology_for(asked, draw.num_ranks)
    given: dict[str, Any] = {"max_tokens_per_rank": draw.max_tokens}
    if args.micro_batches is None:
        return str(draw.planning.plan(draw.batches[0][0], asked, **given).topology)
    step = draw.planning.plan(lengths_of_step(draw.batches[0]), asked, micro_batches=args.micro_batches, **given)
    return str(step.plans[0].topology)


def _peak_tflops(args: argparse.Namespace) -> float | None:
    # A calibrated device has no name here, so its peak is unknown.
    named = None if args.calibration is not None else PEAK_TFLOPS.get(args.cluster or Cluster.names()[0])
    return args.peak_tflops or named


def _first_plan(args: argparse.Namespace, draw: Draw) -> tuple[Plan | StepPlan, float]:
    """The plan of the draw's step, and the seconds that planning took."""
    topology, limit = _topology(args, draw, args.topology[-1]), draw.max_tokens
    if args.micro_batches is None:
        (step,) = by_micro_batch(topology, limit)(draw)
        return step.plans[0], step.plan_s
    if not limit:
        (step,) = by_micro_batch(topology)(draw)
        limit = step.max_tokens
    start = time.perf_counter()
    plan: StepPlan = draw.planning.plan(
        lengths_of_step(draw.batches[0]), topology, sync=args.sync, micro_batches=args.micro_batches,
        max_tokens_per_rank=limit,
    )  # fmt: skip
    return plan, time.perf_counter() - start


def _points(args: argparse.Namespace, draw: Draw) -> list[Point]:
    """Without a balancer, then each topology, planned by micro-batch and, with --micro-batches, also by whole step."""
    points, planned = [_point(list(at_home(draw)), "none", args)], dict[str, list[Point]]()
    for asked in args.topology:
        text = _topology(args, draw, asked)
        if text not in planned:
            steps = list(by_micro_batch(text, draw.max_tokens if args.micro_batches is None else 0)(draw))
            planned[text] = [_point(steps, text, args)]
            if args.micro_batches is not None:
                whole = list(planned_whole(text, routed=False, beside=steps)(draw))
                planned[text].append(_point(whole, f"{PLANNED_STEP}, {text}", args))
        for point, prefix in zip(planned[text], ("", f"{PLANNED_STEP}, "), strict=False):
            points.append(point | {"asked": prefix + asked})
    return points


def _point(steps: Sequence[Step], name: str, args: argparse.Namespace) -> Point:
    """plan_s: median wall time of the planner on this machine."""
    plan_s = statistics.median(step.plan_s for step in steps)
    named = {"num_ranks": steps[0].plans[0].num_ranks, "topology": name, "asked": name, "plan_s": plan_s}
    return named | means(steps, args.mask, _peak_tflops(args))


def _write(args: argparse.Namespace, planning: Planning, plan: Plan | StepPlan, points: list[Point]) -> None:
    from knapformer.tools.report.page import measured_of

    if args.report is not None:
        measured_s = None if args.measured is None else measured_of(args.measured)
        scaling = points if len({point["num_ranks"] for point in points}) > 1 else []
        write_report(args.report, plan, measured_s=measured_s, points=scaling)
    if args.json == "-":
        print(plan.to_json())
    elif args.json is not None:
        write_atomically(args.json, plan.to_json() + "\n")
    if args.predictions is not None:
        write_json(args.predictions, {
            "format": _FORMAT,
            "version": 3,
            "mix": None if args.data is None else str(DataMix.parse(args.data)),
            "d_model": planning.d_model,
            "gamma": planning.gamma,
            "solver": planning.solver,
            "num_steps": args.steps,
            "micro_batches": args.micro_batches,
            "max_tokens_per_rank": args.max_tokens_per_rank,
            "seed": args.seed,
            "peak_tflops": _peak_tflops(args),
            **cost_args.settings_dict(planning.cluster, planning.model),
            "points": points,
        })  # fmt: skip


def _print(plan: Plan | StepPlan | None, took: str, points: list[Point], num_steps: int) -> None:
    if isinstance(plan, StepPlan):
        print_step_plan(plan, took)
    elif plan is not None:
        print_plan(plan, took)
    if points:
        print_points(points, num_steps)
