"""`knapformer simulate`: fake training steps on real ranks, without and with the balancer, and planned whole."""

from __future__ import annotations

import argparse
from typing import Any

from knapformer import ArgumentError, DataMix
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import refuse, remember_defaults
from knapformer.tools.files import check_outputs
from knapformer.tools.launch import check_ranks, run_on_ranks
from knapformer.tools.ways import Planning


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="fake training steps on real ranks, beside what others do",
        description=__doc__,
        epilog=cli_args.DATA_CODES,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add(source, "--data")
    cli_args.add(
        source, "--lengths", help="lengths of samples, as knapformer doctor reads them; batches are drawn of them"
    )
    cli_args.add(parser, "--batch-size")
    parser.add_argument(
        "--topology", action="append", default=[], metavar="T",
        help="of the balancer in the model; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--way", action="append", default=[], metavar="W",
        help="what others do, measured beside: buckets, time_budget, static_2, static_4, static_8 (sequence "
        "parallelism); may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--equal-lengths", action="store_true", help="measures as much work in sequences of equal length as well"
    )
    cli_args.add(parser, "--ranks", help="local ranks to start")
    cli_args.add(parser, "--micro-batches", "--max-tokens-per-rank", "--model", "--steps", "--solver")
    cli_args.add(parser, "--repeats", default=1, help="of each step, the best counts (default 1)")
    cli_args.add(parser, "--warmup", type=cli_args.integer(0, 10**9), default=2, help="steps before them (default 2)")
    cli_args.add_gamma(parser)
    cli_args.add(parser, *cli_args.DRAW, *cli_args.RUN)
    cli_args.add(parser.add_argument_group("the cluster that is planned, and then predicted, for"), *cli_args.CLUSTER)
    parser.add_argument(
        "--keep-exchanges", action="store_true", help="keeps what attention's exchanges brought: none is repeated"
    )
    cli_args.add(parser, "--peak-tflops", "--json")
    parser.set_defaults(run=run)
    remember_defaults(parser, ("batch_size", "scale", "max_text_tokens"))


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.adapters.named import load_config
    from knapformer.tools.sample_files import lengths_of
    from knapformer.tools.simulate.steps import Simulation

    num_ranks = check_ranks(args.ranks)
    check_outputs({"--json": args.json})
    if args.lengths is None:
        refuse(args, ("batch_size",), "--data")
    else:
        refuse(args, ("scale", "max_text_tokens"), "--lengths")
    config = load_config(args.model)
    cost = cost_args.costs(args, own_fixed=True)
    trained = cost_args.trained_model(config, None, args.recomputes, of=cost["model"])
    model = trained.replace(num_parameters=0.0, mode=cli_args.mode_of(args, trained.mode))
    if config.text_limit is not None and args.max_text_tokens > config.text_limit:
        expected = f"at most {config.text_limit}, which the model takes"
        raise ArgumentError(f"--max-text-tokens: got {args.max_text_tokens}, expected {expected}")
    if args.keep_exchanges and not args.recomputes:
        raise ArgumentError("--keep-exchanges: got it with --no-checkpoint, with which no exchange is repeated")
    mix = None
    if args.data is not None:
        mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    simulation = Simulation(
        model=config,
        planning=Planning(config.d_model, **(cost | {"model": model}), mask=config.mask, solver=args.solver),
        num_ranks=num_ranks,
        mix=mix,
        lengths=() if args.lengths is None else lengths_of(args.lengths),
        batch_size=args.batch_size,
        ways=args.way,
        topologies=args.topology,
        micro_batches=args.micro_batches,
        max_tokens_per_rank=args.max_tokens_per_rank,
        equal_lengths=args.equal_lengths,
        num_steps=args.steps,
        num_warmup_steps=args.warmup,
        seed=args.seed,
    )
    cost_args.warn_if_far(args, config.d_model, max(map(cli_args.longest_of, simulation.draw(0).batches)))

    def work() -> None:
        from knapformer.tools.simulate.worker import run_rank

        run_rank(args, simulation)

    run_on_ranks(args, num_ranks, work)
