"""`knapformer replay`: what a cluster would do, measured on one device.

Every rank's share of every step is run for real, one after another: its chunks through the per-token layers, its heads
of whole sequences through attention; forward, recompute, backward. Communication between ranks is modelled.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import knapformer
from knapformer import ArgumentError, Cluster, Plan, StepPlan, Topology, TrainedModel, plan_home
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import OF_DRAW, refuse, remember_defaults
from knapformer.tools.files import check_outputs, show, table_of, text_or, write_json
from knapformer.tools.report import NO_BALANCER, write_report

if TYPE_CHECKING:
    from knapformer.models.config import BaseConfig

_FORMAT = "knapformer.replay"
_DEFAULT_MODELS = {"cuda": "flux", "cpu": "flux-narrow"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="every rank's share of a plan, measured on one device",
        description=__doc__,
        epilog=cli_args.DATA_CODES,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    cli_args.add_plan(source)
    cli_args.add_data(source)
    cli_args.add_lengths_file(source)
    parser.add_argument("--topology", action="append", metavar="T", help="may be given several times")
    cli_args.add_ranks(parser, "with --data (default: those of the mix)")
    cli_args.add_solver(parser)
    cost_args.add_gamma(parser)
    cli_args.add_draw(parser)
    cli_args.add_count(parser, "--steps", 1, "of --data or --lengths")
    cli_args.add_micro_batches(parser)
    cli_args.add_max_tokens(parser, cli_args.UNPLANNED_PEAK)
    cli_args.add_count(parser, "--repeats", 3, "of each measurement; medians")
    cli_args.add_count(parser, "--warmup", 1, "before them")
    parser.add_argument(
        "--model", metavar="NAME|JSON",
        help="one block of each kind is run; default flux on CUDA, flux-narrow, an eighth as wide, on the CPU",
    )  # fmt: skip
    cli_args.add_device(parser)
    cost_args.add_cluster_options(parser.add_argument_group("the cluster that communication is modelled for"))
    cli_args.add_results(parser, device="the device")
    parser.set_defaults(run=run)
    remember_defaults(parser, (*OF_DRAW, "ranks", "steps"))


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    check_outputs({"--json": args.json, "--report": args.report})
    if args.plan is not None:
        refuse(args, (*OF_DRAW, "ranks", "steps"), "--from")
    elif args.lengths is not None:
        refuse(args, OF_DRAW, "--lengths")
    from knapformer.adapters.named import load_config
    from knapformer.models.parallel import DTYPES
    from knapformer.tools.measure.device import default_dtype, use_device
    from knapformer.tools.measure.environment import environment

    device = use_device(args.device, args.threads)
    model_name = args.model or _DEFAULT_MODELS[device.type]
    config = load_config(model_name)
    gamma, cluster, model = cost_args.costs(args).values()
    # Costs that do not follow from a plan are either measured here or not known.
    cluster = cluster.replace(fixed_s=0.0, host_s_per_piece=0.0)
    dtype = args.dtype or default_dtype(device)
    model = cost_args.trained_model(config, DTYPES[dtype], args.recomputes, of=model)
    ways = _ways(args, config, gamma, cluster, model)

    on, lens = environment(device), [plan.seq_lens for way in ways for plans in way.plans for plan in plans]
    name = str(on["accelerator"] or on["processor"])
    cost_args.warn_if_far(args, config.d_model, max(map(cli_args.longest_of, lens)), name)

    from knapformer.tools.measure.progress import Progress
    from knapformer.tools.replay.device import Replayer
    from knapformer.tools.replay.results import Variant
    from knapformer.tools.replay.shares import shares_of

    mode = cli_args.mode_of(args, model.mode)
    replayer = Replayer(config, device, DTYPES[dtype], args.recomputes, mode)
    model = model.replace(num_parameters=replayer.num_parameters, mode=mode)
    shares = [
        share
        for way in ways
        for plans, texts in zip(way.plans, way.text_tokens, strict=True)
        for plan, of_plan in zip(plans, texts, strict=True)
        for share in shares_of(plan, config.num_heads, config.num_kv_heads, of_plan, config.text_beside)
    ]
    with Progress(replayer.num_measurements(shares) * (args.repeats + args.warmup)) as progress:
        progress.describe("replaying")
        measured, noise = replayer.run(shares, args.repeats, args.warmup, progress.advance)
    of_share = iter(measured)
    variants = [
        Variant(
            way.topology,
            way.plans,
            [[list(islice(of_share, plan.num_ranks)) for plan in plans] for plans in way.plans],
            way.planned_whole,
        )
        for way in ways
    ]
    figures = [variant.figures(cluster, model, config.mask, args.peak_tflops) for variant in variants]
    result = {
        "format": _FORMAT,
        "version": 2,
        "model": config.to_dict(),
        "dtype": dtype,
        "num_ranks": variants[0].plans[0][0].num_ranks,
        "micro_batches": len(variants[0].plans[0]) if variants[-1].planned_whole else None,
        "gamma": variants[0].plans[0][0].workload.gamma,
        "peak_tflops": args.peak_tflops,
        "noise": noise,
        "cluster": cost_args.settings_dict(cluster, model),
        "variants": figures,
        "environment": environment(device),
    }
    write_json(args.json, result)
    if args.report is not None:
        measured_s = {of["name"] or NO_BALANCER: of["fbl_per_step_s"] for of in figures}
        # Not predicted: the cluster's compute is not this device's.
        plan = variants[-1].plans[0][0].on(cluster, model)
        write_report(args.report, plan, measured_s=measured_s, predicts=False)
    print_results(model_name, result)
    show(cost_args.assumed(args, result["gamma"], cluster, model))


@dataclass(frozen=True)
class _Way:
    """One way to place the sequences of each step: a plan for each of its micro-batches."""

    topology: str | None  # None: every sequence at home
    plans: list[list[Plan]]
    text_tokens: list[list[list[int]]]  # of each sequence of each plan
    planned_whole: bool = False


def _ways(
    args: argparse.Namespace, config: BaseConfig, gamma: float, cluster: Cluster, model: TrainedModel
) -> list[_Way]:
    """The ways to replay; the first leaves every sequence at home. Raises ArgumentError, OSError."""
    if args.plan is not None:
        plan = _read_plan(args, config)
        if isinstance(plan, StepPlan):
            return _ways_of_step(plan, config)
        text_tokens = [[_some_text(config, plan.seq_lens)]]
        ways = [_Way(str(plan.topology), [[plan]], text_tokens)]
    else:
        if args.topology is None:
            raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
        seq_lens, text_tokens = _drawn(args, config)
        topologies = {str(Topology(text, len(seq_lens[0][0]))): text for text in args.topology}
        # With --micro-batches the limit is that of steps planned whole.
        limit = args.max_tokens_per_rank if args.micro_batches is None else 0
        options: dict[str, Any] = {
            "masks": config.mask, "cluster": cluster, "model": model, "max_tokens_per_rank": limit
        }  # fmt: skip
        ways = [
            _Way(
                name,
                [
                    [knapformer.plan(lens, text, config.d_model, gamma, args.solver, **options) for lens in of_step]
                    for of_step in seq_lens
                ],
                text_tokens,
            )
            for name, text in topologies.items()
        ]
        if args.micro_batches is not None:
            options["model"] = model.replace(routed=False)
            ways += [_planned_whole(args, config, gamma, way, options) for way in ways]
    if any(plan.num_tokens == 0 for plans in ways[0].plans for plan in plans):
        raise ArgumentError(_NOTHING)
    return [_Way(None, [[plan_home(plan) for plan in plans] for plans in ways[0].plans], text_tokens), *ways]


_NOTHING = "plan: got a step without sequences, expected at least one sequence to replay"


def _ways_of_step(step: StepPlan, config: BaseConfig) -> list[_Way]:
    """The step as planned, and before it with every sequence at home, in micro-batches cut from each rank's list."""
    if step.num_tokens == 0:
        raise ArgumentError(_NOTHING)
    if step.sync != "micro_batch":
        raise ArgumentError(
            f"plan: sync: got {step.sync!r}, expected 'micro_batch': ranks wait for each other in each one here"
        )
    first = step.plans[0]
    alone = f"g1n{first.num_ranks}"
    home = [
        plan_home(
            knapformer.plan(
                lens, alone, first.d_model, first.workload.gamma, masks=config.mask, cluster=first.cluster,
                model=first.model,
            )
        )
        for lens in cli_args.micro_batches_of_step(_lengths_of(step), step.num_micro_batches)
    ]  # fmt: skip
    return [
        _Way(None, [home], [[_some_text(config, plan.seq_lens) for plan in home]]),
        _Way(
            str(first.topology),
            [step.plans],
            [[_some_text(config, plan.seq_lens) for plan in step.plans]],
            planned_whole=True,
        ),
    ]


def _lengths_of(step: StepPlan) -> cli_args.Lengths:
    """For each rank the lengths of its sequences, in the order in which it drew them."""
    length_of = dict(
        pair
        for k, plan in enumerate(step.plans)
        for pair in zip(step.sequences_of(k), (n for lens in plan.seq_lens for n in lens), strict=True)
    )
    counts = [sum(len(plan.seq_lens[rank]) for plan in step.plans) for rank in range(step.plans[0].num_ranks)]
    ids = iter(range(len(length_of)))
    return [[length_of[next(ids)] for _ in range(count)] for count in counts]


def _planned_whole(
    args: argparse.Namespace, config: BaseConfig, gamma: float, way: _Way, options: dict[str, Any]
) -> _Way:
    """The steps of `way`, each planned whole."""
    assert way.topology is not None
    plans, texts = [], []
    for of_step, text_tokens in zip(way.plans, way.text_tokens, strict=True):
        limit = args.max_tokens_per_rank or max(plan.max_tokens for plan in of_step)
        step: StepPlan = knapformer.plan(
            cli_args.lengths_of_step([plan.seq_lens for plan in of_step]), way.topology, config.d_model, gamma,
            args.solver, micro_batches=len(of_step), **(options | {"max_tokens_per_rank": limit}),
        )  # fmt: skip
        # A step's sequences are numbered rank by rank and, within a rank, micro-batch by micro-batch.
        by_micro_batch = [iter(of) for of in text_tokens]
        text_of = [
            next(by_micro_batch[k])
            for rank in range(step.plans[0].num_ranks)
            for k, plan in enumerate(of_step)
            for _ in plan.seq_lens[rank]
        ]
        plans.append(step.plans)
        texts.append([[text_of[s] for s in step.sequences_of(k)] for k in range(step.num_micro_batches)])
    return _Way(way.topology, plans, texts, planned_whole=True)


def _read_plan(args: argparse.Namespace, config: BaseConfig) -> Plan | StepPlan:
    plan = cli_args.read_plan(args.plan)
    for option, given in (
        ("--topology", args.topology), ("--micro-batches", args.micro_batches),
        ("--max-tokens-per-rank", args.max_tokens_per_rank or None),
    ):  # fmt: skip
        if given is not None:
            raise ArgumentError(f"{option}: got one beside a plan, which has its own, expected none")
    for of_micro_batch in plan.plans if isinstance(plan, StepPlan) else [plan]:
        _check_model(args.plan, of_micro_batch, config)
    return plan


def _check_model(path: str, plan: Plan, config: BaseConfig) -> None:
    if plan.d_model != config.d_model:
        expected = f"expected {config.d_model}, as the model has"
        raise ArgumentError(f"{path}: d_model: got {plan.d_model}, {expected}")
    lens = [length for of in plan.seq_lens for length in of]
    works = [plan.workload.work(length, plan.d_model, config.mask) for length in lens]
    if plan.sequence_works != works:
        raise ArgumentError(f"{path}: masks: got others, expected {config.mask!r} alone, as the model has")


def _drawn(args: argparse.Namespace, config: BaseConfig) -> tuple[list[list[list[list[int]]]], list[list[list[int]]]]:
    """For each step and micro-batch, the lengths of each rank and the text tokens of each sequence."""
    if args.lengths is not None:
        if args.micro_batches is not None:
            raise ArgumentError(
                "--micro-batches: got one beside --lengths, which are of one micro-batch, expected none"
            )
        steps = cli_args.steps_from(args, args.ranks, 0, args.steps)[: args.steps]
        return [[lengths] for lengths in steps], [[_some_text(config, lengths)] for lengths in steps]
    mix, num_ranks = cli_args.mix_and_ranks(args)
    samples = [
        [
            [mix.draw(args.seed, batch, rank) for rank in range(num_ranks)]
            for batch in cli_args.batches_of_step(step, args.micro_batches or 1)
        ]
        for step in range(args.steps)
    ]
    seq_lens = [[[[config.planned_tokens(s) for s in of] for of in ranks] for ranks in step] for step in samples]
    return seq_lens, [[[s.text_tokens for of in ranks for s in of] for ranks in step] for step in samples]


def _some_text(config: BaseConfig, seq_lens: list[list[int]]) -> list[int]:
    from knapformer.tools.measure.blocks import typical_text_tokens

    return [typical_text_tokens(config, length) for lens in seq_lens for length in lens]


def print_results(model_name: str, result: dict[str, Any]) -> None:
    environment, baseline_s = result["environment"], result["variants"][0]["fbl_s"]
    text = "Corr. and spread: of ranks' measured seconds with their planned work (- where that is even), and per FLOP."
    if result["noise"] is not None:
        text += f" Repeats of a measurement spread by {result['noise']:.1%}."
    show(
        f"{model_name} in {result['dtype']} on {environment['accelerator'] or environment['processor']}, shares of "
        f"{result['num_ranks']:,} ranks, gamma {result['gamma']:.3g}",
        table_of(
            (_cells(row, baseline_s) for row in result["variants"]),
            left="balancer",
            caption="FBL (forward and backward latency): what the slowest ranks compute, measured, then what the "
            "cluster model adds. Seconds. WIR (workload imbalance ratio): highest over lowest work of a rank, planned "
            "and measured. Peak: tokens of the fullest rank. GB: exchanged, and FSDP's, by all ranks in a step. TPS: "
            "tokens per second.",
        ),
        text,
    )


def _cells(row: dict[str, Any], baseline_s: float) -> dict[str, str]:
    cells = {
        "balancer": row["name"] or "none",
        "WIR": text_or(row["wir"], ".2f", "inf"),
        "measured": text_or(row["measured_wir"], ".2f", "inf"),
        "FBL": f"{row['fbl_s']:.3f}",
        "compute": f"{row['token_s'] + row['attention_s']:.3f}",
        "exchange": f"{row['exchange_s']:.3f}",
        "route": f"{row['route_s']:.3f}",
        "FSDP": f"{row['fsdp_s']:.3f}",
        "peak": f"{row['max_tokens_per_rank']:,}",
        "GB": f"{row['exchanged_bytes'] / 1e9:.2f}",
        "FSDP GB": f"{row['fsdp_bytes'] / 1e9:.1f}",
        "TPS": f"{row['tokens_per_s']:,.0f}",
        "speed-up": f"{baseline_s / row['fbl_s']:.2f}",
        "corr.": text_or(row["correlation"], ".3f", "-"),
        "spread": f"{row['spread']:.1%}",
    }
    return cells if row["hfu"] is None else {**cells, "HFU": f"{row['hfu']:.1%}"}
