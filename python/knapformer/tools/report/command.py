"""`knapformer report`: a plan as one HTML file that opens offline, and as a timeline for Perfetto."""

from __future__ import annotations

import argparse
import time
from typing import Any

import knapformer
from knapformer import ArgumentError, Plan, StepPlan
from knapformer.tools import cli_args, cost_args
from knapformer.tools.files import check_outputs, check_packages


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report", help="a plan as an HTML file that opens offline, and as a timeline", description=__doc__
    )
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add_plan(source)
    cli_args.add_data(source, "--data", "--mix")
    cli_args.add_lengths_file(source)
    source.add_argument("--traces", nargs="+", metavar="FILE", help="of real ranks, one each: merged into --timeline")
    parser.add_argument("--topology", metavar="T", help="with --data or --lengths")
    cli_args.add_ranks(parser, "with --data (default: those of the mix)")
    cli_args.add_solver(parser)
    cost_args.add_gamma(parser)
    cli_args.add_d_model(parser)
    cli_args.add_seed(parser)
    cost_args.add_model_options(parser)
    parser.add_argument("--measured", metavar="FILE", help="step times to show: what simulate or replay --json wrote")
    parser.add_argument("--output", metavar="FILE", help="the HTML file (default knapformer_report.html)")
    parser.add_argument("--timeline", metavar="FILE", help="the predicted step as a trace for ui.perfetto.dev")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from knapformer.tools.report.page import measured_of, write_report
    from knapformer.tools.report.timeline import merged, predicted_timeline, write_timeline

    output = None if args.traces is not None else args.output or "knapformer_report.html"
    check_outputs({"--timeline": args.timeline, "--output": output})
    if output is None:
        if args.timeline is None:
            raise ArgumentError("--timeline: got none, expected the file to merge --traces into")
        write_timeline(args.timeline, merged(args.traces))
        print(f"wrote {args.timeline}")
        return
    check_packages("--report")
    measured = None if args.measured is None else measured_of(args.measured)
    plan, plan_s = _plan(args)
    write_report(output, plan, measured_s=measured)
    print(f"wrote {output}")
    if args.timeline is not None:
        write_timeline(args.timeline, predicted_timeline(plan, plan_s))
        print(f"wrote {args.timeline}")


def _plan(args: argparse.Namespace) -> tuple[Plan, float]:
    """And the seconds that planning took; 0 where the plan is from a file."""
    if args.plan is not None:
        plan = cli_args.read_plan(args.plan)
        if isinstance(plan, StepPlan):
            raise ArgumentError(
                f"{args.plan}: got the plan of a step, expected one of a micro-batch; knapformer plan --micro-batches "
                "--report draws a step's"
            )
        of = cost_args.costs(args, of=plan)
        return plan.on(of["cluster"], of["model"]), 0.0
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
    if args.lengths is not None:
        seq_lens = cli_args.read_lengths(args.lengths, args.ranks)
    else:
        mix, num_ranks = cli_args.mix_and_ranks(args)
        seq_lens = mix.draw_lengths(args.seed, 0, num_ranks)
    of = cost_args.costs(args)
    start = time.perf_counter()
    plan = knapformer.plan(seq_lens, args.topology, args.d_model, solver=args.solver, **of)
    return plan, time.perf_counter() - start
