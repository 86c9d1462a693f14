"""`knapformer simulate`: fake training steps on real ranks, without and with the balancer, and planned whole."""

from __future__ import annotations

import argparse
from typing import Any

from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import refuse, remember_defaults
from knapformer.tools.files import check_outputs
from knapformer.tools.launch import check_ranks, run_on_ranks


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="fake training steps on real ranks, beside what others do",
        description=__doc__,
        epilog=cli_args.DATA_CODES,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add_data(source)
    cli_args.add_lengths_file(source, "lengths of samples, as knapformer doctor reads them; batches are drawn of them")
    cli_args.add_count(parser, "--batch-size", 4, "with --lengths: of a rank and micro-batch")
    parser.add_argument(
        "--topology", action="append", default=[], metavar="T",
        help="of the balancer in the model; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--way", action="append", default=[], metavar="W",
        help="what others do, measured beside: buckets, time_budget, static_2, static_4, static_8 (sequence "
        "parallelism); may be given several times",
    )  # fmt: skip
    cli_args.add_micro_batches(parser)
    cli_args.add_max_tokens(parser, cli_args.UNPLANNED_PEAK)
    parser.add_argument(
        "--equal-lengths", action="store_true", help="measures as much work in sequences of equal length as well"
    )
    cli_args.add_ranks(parser, "local ranks to start")
    cli_args.add_model(parser)
    cli_args.add_count(parser, "--steps", 10, "timed", high=10**9)
    cli_args.add_count(parser, "--repeats", 1, "of each step, the best counts")
    cli_args.add_count(parser, "--warmup", 2, "before them", low=0, high=10**9)
    cli_args.add_solver(parser)
    cost_args.add_gamma(parser)
    cli_args.add_draw(parser)
    cli_args.add_device(parser)
    cost_args.add_cluster_options(parser.add_argument_group("the cluster that is planned, and then predicted, for"))
    parser.add_argument(
        "--keep-exchanges", action="store_true", help="keeps what attention's exchanges brought: none is repeated"
    )
    cli_args.add_results(parser, device="a rank's device")
    parser.set_defaults(run=run)
    remember_defaults(parser, ("batch_size", "scale", "max_text_tokens"))


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.tools.sample_files import lengths_of
    from knapformer.tools.simulate.settings import SimulationSettings

    num_ranks = check_ranks(args.ranks)
    check_outputs({"--json": args.json, "--report": args.report})
    if args.lengths is None:
        refuse(args, ("batch_size",), "--data")
    else:
        refuse(args, ("scale", "max_text_tokens"), "--lengths")
    gamma, cluster, model = cost_args.costs(args, own_fixed=True).values()
    settings = SimulationSettings(
        data=args.data or args.lengths,
        lengths=() if args.lengths is None else tuple(lengths_of(args.lengths)),
        batch_size=args.batch_size,
        ways=tuple(args.way),
        topologies=tuple(args.topology),
        micro_batches=args.micro_batches,
        max_tokens_per_rank=args.max_tokens_per_rank,
        equal_lengths=args.equal_lengths,
        num_ranks=num_ranks,
        scale=args.scale,
        max_text_tokens=args.max_text_tokens,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
        num_repeats=args.repeats,
        solver=args.solver,
        gamma=gamma,
        cluster=cluster,
        shard_ranks=model.shard_ranks,
        predicts=args.calibration is not None or args.cluster is not None,
        seed=args.seed,
        keep_exchanges=args.keep_exchanges,
        peak_tflops=args.peak_tflops,
        report_path=args.report,
        mode=cli_args.mode_of(args, model.mode),
        **cli_args.run_settings(args),
    )
    cost_args.warn_if_far(args, settings.model.d_model, cli_args.longest_of(settings.draw(0).seq_lens_of_step()))
    run_on_ranks(args.argv, "knapformer.tools.simulate.worker", settings)
