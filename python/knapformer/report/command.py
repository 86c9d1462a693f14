"""`knapformer report`: a plan as one HTML file that opens offline, and as a timeline for Perfetto."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import knapformer
from knapformer import ArgumentError, DataMix, Plan
from knapformer._core import HardwareModel
from knapformer.options import H100_GAMMA, add_gamma, add_lengths_file, add_solver, gamma_and_calibration, read_lengths
from knapformer.output import check_outputs, write_atomically
from knapformer.predict.settings import add_model_options, models_from, planning_cluster


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="a plan as an HTML file that opens offline, and as a timeline",
        description=__doc__,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("plan", nargs="?", metavar="PLAN.json", help="written by knapformer plan --json")
    source.add_argument(
        "--data", "--mix", dest="data", metavar="CODES|MIX", help="or a mix: " + ", ".join(DataMix.names())
    )
    add_lengths_file(source)
    source.add_argument("--traces", nargs="+", metavar="FILE", help="of real ranks, one each: merged into --timeline")
    parser.add_argument("--topology", metavar="T", help="with --data or --lengths")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --data (default: those of the mix)")
    add_solver(parser)
    add_gamma(parser, default=H100_GAMMA)
    parser.add_argument("--d-model", type=int, default=3072, metavar="D", help="width, in features (default 3072)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default 0)")
    add_model_options(parser)
    parser.add_argument("--measured", metavar="FILE", help="step times to show: what simulate or replay --json wrote")
    parser.add_argument("--output", metavar="FILE", help="the HTML file (default knapformer_report.html)")
    parser.add_argument("--timeline", metavar="FILE", help="the predicted step as a trace for ui.perfetto.dev")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from knapformer.report.page import check_can_report, measured_of, write_report
    from knapformer.report.timeline import merged, predicted_timeline

    output = None if args.traces is not None else args.output or "knapformer_report.html"
    check_outputs({"--timeline": args.timeline, "--output": output})
    if output is None:
        if args.timeline is None:
            raise ArgumentError("--timeline: got none, expected the file to merge --traces into")
        write_atomically(args.timeline, json.dumps(merged(args.traces)) + "\n")
        print(f"wrote {args.timeline}")
        return
    check_can_report()
    gamma, calibration = gamma_and_calibration(args)
    hardware, model = models_from(args, calibration)
    measured = None if args.measured is None else measured_of(args.measured)
    plan, plan_s = _plan(args, gamma, hardware)
    write_report(output, plan, hardware=hardware, model=model, measured_s=measured)
    print(f"wrote {output}")
    if args.timeline is not None:
        write_atomically(args.timeline, json.dumps(predicted_timeline(plan, hardware, model, plan_s)) + "\n")
        print(f"wrote {args.timeline}")


def _plan(args: argparse.Namespace, gamma: float, hardware: HardwareModel) -> tuple[Plan, float]:
    """And the seconds that planning took; 0 where the plan is from a file."""
    if args.plan is not None:
        return Plan.from_json(Path(args.plan).read_text(encoding="utf-8", errors="replace")), 0.0
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
    if args.lengths is not None:
        seq_lens = read_lengths(args.lengths, args.ranks)
    else:
        if not 0 <= args.seed < 1 << 64:
            raise ArgumentError(f"--seed: got {args.seed}, expected 0 to 2^64 - 1")
        mix = DataMix.parse(args.data)
        num_ranks = mix.num_ranks if args.ranks is None else args.ranks
        mix.check_divides(num_ranks)
        seq_lens = mix.draw_lengths(args.seed, 0, num_ranks)
    start = time.perf_counter()
    cluster = planning_cluster(hardware)
    plan = knapformer.plan(seq_lens, args.topology, args.d_model, gamma, args.solver, cluster=cluster)
    return plan, time.perf_counter() - start
