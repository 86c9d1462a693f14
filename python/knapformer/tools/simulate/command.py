"""`knapformer simulate`: fake training steps on real ranks, without and with the balancer."""

from __future__ import annotations

import argparse
from typing import Any

from knapformer import Cluster
from knapformer.tools import cli_args
from knapformer.tools.files import check_outputs
from knapformer.tools.launch import check_ranks, run_on_ranks


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="fake training steps on real ranks, without and with the balancer")
    cli_args.add_data(parser, required=True)
    parser.add_argument("--topology", required=True, action="append", metavar="T", help="may be given several times")
    cli_args.add_ranks(parser, "local ranks to start")
    cli_args.add_model(parser)
    cli_args.add_count(parser, "--steps", 10, "timed", high=10**9)
    cli_args.add_count(parser, "--repeats", 1, "of each step, the best counts")
    cli_args.add_count(parser, "--warmup", 2, "before them", low=0, high=10**9)
    cli_args.add_solver(parser)
    cli_args.add_gamma(parser, can_fit=True)
    cli_args.add_draw(parser)
    cli_args.add_device(parser)
    parser.add_argument(
        "--keep-exchanges", action="store_true", help="keeps what attention's exchanges brought: none is repeated"
    )
    cli_args.add_results(parser, device="a rank's device")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.tools.simulate.settings import SimulationSettings

    num_ranks = check_ranks(args.ranks)
    check_outputs({"--json": args.json, "--report": args.report})
    gamma, calibration = cli_args.gamma_and_calibration(args)
    settings = SimulationSettings(
        data=args.data,
        topologies=tuple(args.topology),
        num_ranks=num_ranks,
        scale=args.scale,
        max_text_tokens=args.max_text_tokens,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
        num_repeats=args.repeats,
        solver=args.solver,
        gamma=gamma,
        cluster=Cluster() if calibration is None else calibration.cluster(),
        seed=args.seed,
        keep_exchanges=args.keep_exchanges,
        peak_tflops=args.peak_tflops,
        report_path=args.report,
        **cli_args.run_settings(args),
    )
    run_on_ranks(args.argv, "knapformer.tools.simulate.worker", settings)
