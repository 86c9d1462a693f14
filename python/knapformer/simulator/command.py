"""`knapformer simulate`: fake training steps on real ranks, without and with the balancer."""

from __future__ import annotations

import argparse
from typing import Any

from knapformer import ClusterModel
from knapformer.launch import check_ranks, run_on_ranks
from knapformer.options import (
    MAX_RANKS,
    add_data,
    add_device,
    add_draw,
    add_gamma,
    add_results,
    add_solver,
    check_torch,
    device_settings,
    gamma_and_calibration,
    integer,
)
from knapformer.output import check_outputs
from knapformer.report import check_report


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="fake training steps on real ranks, without and with the balancer")
    add_data(parser, required=True)
    parser.add_argument("--topology", required=True, action="append", metavar="T", help="may be given several times")
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), metavar="N", help="local ranks to start")
    parser.add_argument("--model", default="flux-demo", metavar="NAME|JSON", help="named configuration or file")
    parser.add_argument("--steps", type=integer(1, 10**9), default=10, metavar="N", help="timed (default 10)")
    parser.add_argument(
        "--repeats", type=integer(1, 10**6), default=1, metavar="N", help="of each step, the best counts (default 1)"
    )
    parser.add_argument("--warmup", type=integer(0, 10**9), default=2, metavar="N", help="before them (default 2)")
    add_solver(parser, default="balanced")
    add_gamma(parser, default=1.0, can_fit=True)
    add_draw(parser)
    add_device(parser)
    parser.add_argument(
        "--keep-exchanges", action="store_true", help="keeps what attention's exchanges brought: none is repeated"
    )
    add_results(parser, device="a rank's device")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_torch()
    from knapformer.models.config import load_config
    from knapformer.simulator.settings import SimulationSettings

    num_ranks = check_ranks(args.ranks)
    check_outputs({"--json": args.json, "--report": args.report})
    check_report(args.report)
    gamma, calibration = gamma_and_calibration(args)
    settings = SimulationSettings(
        data=args.data,
        topologies=tuple(args.topology),
        num_ranks=num_ranks,
        model=load_config(args.model),
        model_name=args.model,
        scale=args.scale,
        max_text_tokens=args.max_text_tokens,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
        num_repeats=args.repeats,
        solver=args.solver,
        gamma=gamma,
        cluster=ClusterModel() if calibration is None else calibration.cluster(),
        seed=args.seed,
        keep_exchanges=args.keep_exchanges,
        **device_settings(args),
        peak_tflops=args.peak_tflops,
        json_path=args.json,
        report_path=args.report,
    )
    run_on_ranks("simulate", "knapformer.simulator.worker", settings.to_json(), num_ranks, args.device, args.threads)
