"""`knapformer simulate`: fake training steps on real ranks, without and with the balancer, and planned whole."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from knapformer import ArgumentError
from knapformer.tools import cli_args, settings
from knapformer.tools.cli_args import add, refuse
from knapformer.tools.draws import mix_and_ranks
from knapformer.tools.launch import check_ranks, run_on_ranks

#: Keys of baselines().
_WAYS = ("buckets", "time_budget", "static_2", "static_4", "static_8")


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "simulate", run, help="fake training steps on real ranks, beside what others do",
        description=__doc__, epilog=cli_args.DATA_CODES,
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    add(source, "--data")
    add(source, "--lengths", help="lengths of samples, as knapformer doctor reads them; batches are drawn of them")
    add(parser, "--batch-size")
    add(parser, "--topology", default=[], help="bags of the balancer in the model; may be repeated")
    add(
        parser, "--way", action="append", default=[], choices=_WAYS,
        help="what others do, measured beside (static: sequence parallelism); may be given several times",
    )  # fmt: skip
    add(parser, "--ranks", help="local ranks to start")
    add(parser, "--micro-batches", "--max-tokens-per-rank", "--model", "--steps", "--solver")
    add(parser, "--repeats", default=1, help="repeats of each step, of which the best counts (default 1)")
    add(parser, "--warmup", type=cli_args.integer(0, 10**9), default=2, help="steps before them (default 2)")
    cli_args.add_gamma(parser)
    add(parser, *cli_args.DRAW, *cli_args.RUN)
    add(parser.add_argument_group("the cluster that is planned, and then predicted, for"), *cli_args.CLUSTER)
    add(
        parser, "--keep-exchanges", action="store_true",
        help="keeps what attention's exchanges brought: none is repeated",
    )  # fmt: skip
    add(parser, "--peak-tflops", "--json")


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.adapters.named import load_config
    from knapformer.tools.lengths_files import lengths_of
    from knapformer.tools.simulate.variants import Simulation, batches_of
    from knapformer.tools.simulate.worker import simulate

    num_ranks = check_ranks(args.ranks)
    if args.lengths is None:
        refuse(args, ("--batch-size",), "--data")
    else:
        refuse(args, ("--scale", "--max-text-tokens"), "--lengths")
    config = load_config(args.model)
    of = settings.planning(args, own_fixed=True, d_model=config.d_model, mask=config.mask)
    trained = settings.trained_model(config, None, args.recomputes, of=of.model)
    model = trained.replace(num_parameters=0.0, mode="lora" if trained.mode == "lora" else "training")
    if config.text_limit is not None and args.max_text_tokens > config.text_limit:
        expected = f"at most {config.text_limit}, which the model takes"
        raise ArgumentError(f"--max-text-tokens: got {args.max_text_tokens}, expected {expected}")
    if args.keep_exchanges and not args.recomputes:
        raise ArgumentError("--keep-exchanges: got it with --no-checkpoint, with which no exchange is repeated")
    mix = None if args.data is None else mix_and_ranks(args, num_ranks)[0]
    lengths = () if args.lengths is None else lengths_of(args.lengths)
    simulation = Simulation(args, config, replace(of, model=model), num_ranks, mix, lengths)
    settings.warn_if_far(args, simulation.planning, batches_of(simulation.draw(0)))
    run_on_ranks(args, num_ranks, partial(simulate, simulation))
