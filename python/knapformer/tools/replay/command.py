"""`knapformer replay`: what a cluster would do, measured on one device.

Every rank's share of every step is run for real, one after another: its chunks through the per-token layers, its heads
of whole sequences through attention; forward, recompute, backward. Communication between ranks is modelled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, StepPlan, Topology, plan_home
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import OF_DRAW, add, refuse
from knapformer.tools.files import cells_of, show, table_of, write_json
from knapformer.tools.ways import (
    Draw,
    Lengths,
    Planning,
    Step,
    at_home,
    batches_of_step,
    by_micro_batch,
    lengths_of_step,
    planned_whole,
)

if TYPE_CHECKING:
    from knapformer.models.config import BaseConfig

_DEFAULT_MODELS = {"cuda": "flux", "cpu": "flux-narrow"}
# Options that a plan from a file has fixed already.
_OF_PLAN = (*OF_DRAW, "ranks", "steps", "topology", "micro_batches", "max_tokens_per_rank")
_COLUMNS = {
    "balancer": "name::none", "WIR": "wir:.2f:inf", "measured": "measured_wir:.2f:inf", "FBL": "fbl_s:.3f",
    "compute": "compute_s:.3f", "exchange": "exchange_s:.3f", "route": "route_s:.3f", "FSDP": "fsdp_s:.3f",
    "peak": "max_tokens_per_rank:,", "GB": "exchanged_gb:.2f", "FSDP GB": "fsdp_gb:.1f", "TPS": "tokens_per_s:,.0f",
    "speed-up": "speed_up:.2f", "corr.": "correlation:.3f", "spread": "spread:.1%",
}  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "replay", run, help="every rank's share of a plan, measured on one device", description=__doc__,
        epilog=cli_args.DATA_CODES,
    )  # fmt: skip
    add(parser.add_mutually_exclusive_group(required=True), "--from", "--data", "--lengths")
    add(parser, "--topology")
    add(parser, "--ranks", help="with --data (default: those of the mix)")
    add(parser, "--steps", default=1, help="of --data or --lengths (default 1)")
    add(parser, "--solver", *cli_args.DRAW, "--micro-batches", "--max-tokens-per-rank", "--repeats", "--warmup")
    cli_args.add_gamma(parser)
    add(
        parser, "--model", default=None,
        help="one block of each kind is run; default flux on CUDA, flux-narrow, an eighth as wide, on the CPU",
    )  # fmt: skip
    add(parser, *cli_args.RUN, "--peak-tflops", "--json")
    add(parser.add_argument_group("the cluster that communication is modelled for"), *cli_args.CLUSTER)


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    if args.plan is not None:
        refuse(args, _OF_PLAN, "a plan", "which has its own")
    elif args.lengths is not None:
        refuse(args, OF_DRAW, "--lengths")
    from knapformer.adapters.named import load_config
    from knapformer.models.parallel import DTYPES
    from knapformer.tools.measure.device import default_dtype, use_device
    from knapformer.tools.measure.environment import device_name, environment
    from knapformer.tools.measure.progress import Progress
    from knapformer.tools.replay.device import Replayer
    from knapformer.tools.replay.results import Variant
    from knapformer.tools.replay.shares import shares_of

    device = use_device(args.device, args.threads)
    args.model = args.model or _DEFAULT_MODELS[device.type]
    config, dtype = load_config(args.model), args.dtype or default_dtype(device)
    planning = cost_args.planning(args, d_model=config.d_model, mask=config.mask)
    # Costs that do not follow from a plan are either measured here or not known.
    cluster = planning.cluster.replace(fixed_s=0.0, host_s_per_piece=0.0)
    model = cost_args.trained_model(config, DTYPES[dtype], args.recomputes, of=planning.model)
    planning = replace(planning, cluster=cluster, model=model)
    ways = _ways(args, config, planning)
    lens = [plan.seq_lens for way in ways for step in way.steps for plan in step.plans]
    cost_args.warn_if_far(args, config.d_model, max(map(cli_args.longest_of, lens)), device_name(device))

    mode = cli_args.mode_of(args, model.mode)
    replayer = Replayer(config, device, DTYPES[dtype], args.recomputes, mode)
    model = model.replace(num_parameters=replayer.num_parameters, mode=mode)
    shares = [
        share
        for way in ways
        for step, texts in zip(way.steps, way.text_tokens, strict=True)
        for plan, of_plan in zip(step.plans, texts, strict=True)
        for share in shares_of(plan, config.num_heads, config.num_kv_heads, of_plan, config.text_beside)
    ]
    with Progress(replayer.num_measurements(shares) * (args.repeats + args.warmup)) as progress:
        progress.describe("replaying")
        seconds, noise = replayer.run(shares, args.repeats, args.warmup, progress.advance)
    of_share = iter(seconds)
    variants = [
        Variant(
            way.topology, way.steps,
            [[list(islice(of_share, plan.num_ranks)) for plan in step.plans] for step in way.steps],
        ).figures(cluster, model, config.mask, args.peak_tflops)
        for way in ways
    ]  # fmt: skip
    first, planning = ways[0].steps[0].plans[0], replace(planning, model=model)
    planning = replace(planning, gamma=first.workload.gamma)
    write_json(args.json, {
        "format": "knapformer.replay",
        "version": 2,
        "model": config.to_dict(),
        "dtype": dtype,
        "num_ranks": first.num_ranks,
        "micro_batches": args.micro_batches,
        "gamma": planning.gamma,
        "peak_tflops": args.peak_tflops,
        "noise": noise,
        "cluster": cost_args.settings_dict(planning),
        "variants": variants,
        "environment": environment(device),
    })  # fmt: skip
    noise_text = "" if noise is None else f" Repeats of a measurement spread by {noise:.1%}."
    columns = _COLUMNS | ({} if variants[0]["hfu"] is None else {"HFU": "hfu:.1%"})
    show(
        f"{args.model} in {dtype} on {device_name(device)}, shares of {first.num_ranks:,} ranks, gamma "
        f"{planning.gamma:.3g}",
        table_of(
            (cells_of(_row(of, variants[0]["fbl_s"]), columns) for of in variants),
            left="balancer",
            caption="FBL (forward and backward latency): what the slowest ranks compute, measured, then what the "
            "cluster model adds. Seconds. WIR (workload imbalance ratio): highest over lowest work of a rank, planned "
            "and measured. Peak: tokens of the fullest rank. GB: exchanged, and FSDP's, by all ranks in a step. TPS: "
            "tokens per second.",
        ),
        "Corr. and spread: of ranks' measured seconds with their planned work (- where that is even), and per FLOP."
        + noise_text,
        cost_args.assumed(args, planning, cost_args.limit_of(args), args.plan),
    )


def _row(of: dict[str, Any], baseline_s: float) -> dict[str, Any]:
    return {
        **of,
        "compute_s": of["token_s"] + of["attention_s"],
        "exchanged_gb": of["exchanged_bytes"] / 1e9,
        "fsdp_gb": of["fsdp_bytes"] / 1e9,
        "speed_up": baseline_s / of["fbl_s"],
    }


@dataclass(frozen=True)
class _Way:
    """One way to place the sequences of each step. text_tokens: [step][micro-batch], of each sequence of the plan."""

    topology: str | None  # None: every sequence at home
    steps: Sequence[Step]
    text_tokens: list[list[list[int]]]


def _ways(args: argparse.Namespace, config: BaseConfig, planning: Planning) -> list[_Way]:
    """The ways to replay; the first leaves every sequence at home. Raises ArgumentError, OSError."""
    from knapformer.tools.measure.blocks import typical_text_tokens

    texts: list[list[Lengths]] | None = None  # of the samples, in the places of their lengths
    if args.plan is not None:
        found = _from_file(args, config)
    else:
        if args.topology is None:
            raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
        batches, texts = _drawn(args, config)
        draw = Draw(planning, batches, max_tokens=args.max_tokens_per_rank)
        topologies = {str(Topology(text, draw.num_ranks)): text for text in args.topology}
        # With --micro-batches the limit is that of steps planned whole.
        limit = args.max_tokens_per_rank if args.micro_batches is None else 0
        found = [(None, list(at_home(draw)))]
        found += [(name, list(by_micro_batch(text, limit)(draw))) for name, text in topologies.items()]
        if args.micro_batches is not None:
            found += [
                (name, list(planned_whole(str(name), routed=False, beside=steps)(draw))) for name, steps in found[1:]
            ]
    if not all(plan.num_tokens for step in found[0][1] for plan in step.plans):
        raise ArgumentError("plan: got a step without sequences, expected at least one sequence to replay")

    def texts_of(number: int, step: Step) -> list[list[int]]:
        if texts is None:
            return [[typical_text_tokens(config, n) for lens in plan.seq_lens for n in lens] for plan in step.plans]
        if step.whole is None:
            return [[text for of in batch for text in of] for batch in texts[number]]
        # A step's sequences are numbered rank by rank and, within a rank, micro-batch by micro-batch.
        flat = [text for of in lengths_of_step(texts[number]) for text in of]
        return [[flat[s] for s in step.whole.sequences_of(k)] for k in range(step.whole.num_micro_batches)]

    return [_Way(name, steps, list(map(texts_of, range(len(steps)), steps))) for name, steps in found]


def _from_file(args: argparse.Namespace, config: BaseConfig) -> list[tuple[str | None, list[Step]]]:
    """Every sequence at home, and as the plan says."""
    plan = cli_args.read_plan(args.plan)
    if isinstance(plan, StepPlan):
        raise ArgumentError(f"{args.plan}: got the plan of a step of micro-batches, expected that of one micro-batch")
    if plan.d_model != config.d_model:
        raise ArgumentError(f"{args.plan}: d_model: got {plan.d_model}, expected {config.d_model}, as the model has")
    lens = [length for of in plan.seq_lens for length in of]
    if plan.sequence_works != [plan.workload.work(length, plan.d_model, config.mask) for length in lens]:
        raise ArgumentError(f"{args.plan}: masks: got others, expected {config.mask!r} alone, as the model has")
    return [(None, [Step([plan_home(plan)])]), (str(plan.topology), [Step([plan])])]


def _drawn(args: argparse.Namespace, config: BaseConfig) -> tuple[list[list[Lengths]], list[list[Lengths]] | None]:
    """[step][micro-batch][rank]: lengths, and text tokens where the samples have them."""
    if args.lengths is not None:
        if args.micro_batches is not None:
            raise ArgumentError(
                "--micro-batches: got one beside --lengths, which are of one micro-batch, expected none"
            )
        return [[step] for step in cli_args.steps_from(args, args.ranks, 0, args.steps)], None
    mix, num_ranks = cli_args.mix_and_ranks(args)
    samples = [
        [
            [mix.draw(args.seed, batch, rank) for rank in range(num_ranks)]
            for batch in batches_of_step(step, args.micro_batches or 1)
        ]
        for step in range(args.steps)
    ]
    lens = [[[[config.planned_tokens(s) for s in of] for of in ranks] for ranks in step] for step in samples]
    return lens, [[[[s.text_tokens for s in of] for of in ranks] for ranks in step] for step in samples]
