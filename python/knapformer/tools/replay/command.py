"""`knapformer replay`: what a cluster would do, measured on one device.

Every rank's share of every step is run for real, one after another: its chunks through the per-token layers, its heads
of whole sequences through attention; forward, recompute, backward. Communication between ranks is modelled.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, Topology
from knapformer.tools import cli_args, settings
from knapformer.tools.cli_args import DRAW, add
from knapformer.tools.draws import Source
from knapformer.tools.files import Progress, cells_of, show, table_of, write_json
from knapformer.tools.launch import use_device
from knapformer.tools.ways import NO_BALANCER, DrawnSteps, OptimizerStep, PlanCost, usual_ways

if TYPE_CHECKING:
    from knapformer.adapters.named import ModelConfig

_DEFAULT_MODELS = {"cuda": "flux", "cpu": "flux-narrow"}
_COLUMNS = {
    "balancer": "name::none", "WIR": "wir:.2f:inf", "measured": "measured_wir:.2f:inf", "FBL": "fbl_s:.3f",
    "compute": "compute_s:.3f", "exchange": "exchange_s:.3f", "route": "route_s:.3f", "FSDP": "fsdp_s:.3f",
    "peak": "max_tokens:,", "GB": "exchanged_gb:.2f", "FSDP GB": "fsdp_gb:.1f", "TPS": "tokens_per_s:,.0f",
    "speed-up": "speed_up:.2f", "corr.": "correlation:.3f", "spread": "spread:.1%",
}  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "replay", run, help="every rank's share of a plan, measured on one device", description=__doc__,
        epilog=cli_args.DATA_CODES,
    )  # fmt: skip
    add(parser.add_mutually_exclusive_group(required=True), "--data", "--lengths")
    add(parser, "--topology")
    add(parser, "--ranks", help="number of ranks, with --data (default: that of the mix)")
    add(parser, "--steps", default=1, help="steps of --data or --lengths (default 1)")
    add(parser, "--solver", *DRAW, "--micro-batches", "--max-tokens-per-rank", "--repeats", "--warmup")
    cli_args.add_gamma(parser)
    add(
        parser, "--model", default=None,
        help="one block of each kind is run; default flux on CUDA, flux-narrow, an eighth as wide, on the CPU",
    )  # fmt: skip
    add(parser, *cli_args.RUN, "--peak-tflops", "--json")
    add(parser.add_argument_group("the cluster that communication is modelled for"), *cli_args.CLUSTER)


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    from knapformer.adapters.named import load_config
    from knapformer.models.training import DTYPES
    from knapformer.tools.measure.environment import default_dtype, device_name, environment
    from knapformer.tools.replay.shares import Replayer, figures, shares_of

    device = use_device(args.device)
    args.model = args.model or _DEFAULT_MODELS[device.type]
    config, dtype = load_config(args.model), args.dtype or default_dtype(device)
    planning = settings.planning(args, d_model=config.d_model, mask=config.mask)
    # Costs that do not follow from a plan are either measured here or not known.
    cluster = planning.cluster.replace(fixed_s=0.0, host_s_per_piece=0.0)
    model = settings.trained_model(config, DTYPES[dtype], args.recomputes, of=planning.model)
    planning = replace(planning, cluster=cluster, model=model)
    ways = _ways(args, config, planning)
    plans = [plan for steps in ways.values() for step in steps for plan in step.plans]
    settings.warn_if_far(args, planning, [plan.seq_lens for plan in plans], device_name(device))

    mode = "lora" if model.mode == "lora" else "training"
    replayer = Replayer(config, device, DTYPES[dtype], args.recomputes, mode)
    model = model.replace(num_parameters=replayer.num_parameters, mode=mode)
    shares = []
    for plan in plans:
        text_tokens = [config.text_tokens(length) for lens in plan.seq_lens for length in lens]
        shares += shares_of(plan, config.num_heads, config.num_kv_heads, text_tokens, config.text_beside)
    pieces = replayer.pieces_of(shares)
    with Progress(len(pieces) * (args.repeats + args.warmup)) as progress:
        progress.describe("replaying")
        of_share = iter(replayer.run(pieces, len(shares), args.repeats, args.warmup, progress.count))
    variants = [
        figures(
            None if name == NO_BALANCER else name, steps,
            [[list(islice(of_share, plan.num_ranks)) for plan in step.plans] for step in steps],
            cluster, model, args.peak_tflops,
        )
        for name, steps in ways.items()
    ]  # fmt: skip
    num_ranks, planning = plans[0].num_ranks, replace(planning, model=model)
    write_json(args.json, {
        "format": "knapformer.replay",
        "version": 3,
        "model": config.to_dict(),
        "dtype": dtype,
        "num_ranks": num_ranks,
        "micro_batches": args.micro_batches,
        "gamma": planning.gamma,
        "peak_tflops": args.peak_tflops,
        "cluster": settings.settings_dict(planning),
        "variants": variants,
        "environment": environment(device),
    })  # fmt: skip
    rows = [
        of | {"exchanged_gb": of["exchanged_bytes"] / 1e9, "fsdp_gb": of["fsdp_bytes"] / 1e9,
              "speed_up": variants[0]["fbl_s"] / of["fbl_s"]}
        for of in variants
    ]  # fmt: skip
    columns = _COLUMNS | ({} if variants[0]["hfu"] is None else {"HFU": "hfu:.1%"})
    show(
        f"{args.model} in {dtype} on {device_name(device)}, shares of {num_ranks:,} ranks, gamma {planning.gamma:.3g}",
        table_of(
            (cells_of(row, columns) for row in rows),
            left="balancer",
            caption="FBL (forward and backward latency): what the slowest ranks compute, measured, then what the "
            "cluster model adds. Seconds. WIR (workload imbalance ratio): highest over lowest work of a rank, planned "
            "and measured. Peak: tokens of the fullest rank. GB: exchanged, and FSDP's, by all ranks in a step. TPS: "
            "tokens per second.",
        ),
        "Corr.: correlation of ranks' measured seconds with their planned work (- where the work is even). Spread: "
        "standard deviation of the seconds per planned FLOP, over their mean.",
        settings.assumed(args, planning),
    )


def _ways(args: argparse.Namespace, config: ModelConfig, planning: PlanCost) -> dict[str, list[OptimizerStep]]:
    """The ways to replay; the first leaves every sequence at home. Raises ArgumentError, OSError."""
    if args.topology is None:
        raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
    batches = Source(args, args.ranks).batches(args.micro_batches or 1, config.planned_tokens)
    draw = DrawnSteps(planning, batches, max_tokens_per_rank=args.max_tokens_per_rank)
    topologies = dict.fromkeys(str(Topology(text, draw.num_ranks)) for text in args.topology)
    ways = usual_ways(draw, topologies, args.micro_batches is not None)
    if not all(plan.num_tokens for step in ways[NO_BALANCER] for plan in step.plans):
        raise ArgumentError("plan: got a step without sequences, expected at least one sequence to replay")
    return ways
