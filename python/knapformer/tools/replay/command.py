"""`knapformer replay`: what a cluster would do, measured on one device.

Every rank's share of every step is run for real, one after another: its chunks through the per-token layers, its heads
of whole sequences through attention; forward, recompute, backward. Communication between ranks is modelled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, Plan, StepPlan, Topology, plan_home
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import OF_DRAW, refuse, remember_defaults
from knapformer.tools.files import check_outputs, show, table_of, text_or, write_json
from knapformer.tools.ways import (
    Draw,
    Lengths,
    Planning,
    Step,
    at_home,
    batches_of_step,
    by_micro_batch,
    lengths_of_step,
    micro_batches_of_step,
    planned_whole,
)

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
    cli_args.add(source, "--from", "--data", "--lengths")
    parser.add_argument("--topology", action="append", metavar="T", help="may be given several times")
    cli_args.add(parser, "--ranks", help="with --data (default: those of the mix)")
    cli_args.add(parser, "--steps", default=1, help="of --data or --lengths (default 1)")
    cli_args.add(
        parser, "--solver", *cli_args.DRAW, "--micro-batches", "--max-tokens-per-rank", "--repeats", "--warmup"
    )
    cli_args.add_gamma(parser)
    cli_args.add(
        parser, "--model", default=None,
        help="one block of each kind is run; default flux on CUDA, flux-narrow, an eighth as wide, on the CPU",
    )  # fmt: skip
    cli_args.add(parser, *cli_args.RUN, "--peak-tflops", "--json")
    cli_args.add(parser.add_argument_group("the cluster that communication is modelled for"), *cli_args.CLUSTER)
    parser.set_defaults(run=run)
    remember_defaults(parser, (*OF_DRAW, "ranks", "steps"))


def run(args: argparse.Namespace) -> None:
    cli_args.check_torch()
    check_outputs({"--json": args.json})
    if args.plan is not None:
        refuse(args, (*OF_DRAW, "ranks", "steps"), "--from")
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
    cost = cost_args.costs(args)
    # Costs that do not follow from a plan are either measured here or not known.
    cluster = cost["cluster"].replace(fixed_s=0.0, host_s_per_piece=0.0)
    model = cost_args.trained_model(config, DTYPES[dtype], args.recomputes, of=cost["model"])
    planning = Planning(config.d_model, cost["gamma"], cluster, model, mask=config.mask, solver=args.solver)
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
            [[list(islice(of_share, plan.num_ranks)) for plan in step.plans] for step in way.steps], way.planned_whole,
        ).figures(cluster, model, config.mask, args.peak_tflops)
        for way in ways
    ]  # fmt: skip
    first = ways[0].steps[0].plans
    result = {
        "format": _FORMAT,
        "version": 2,
        "model": config.to_dict(),
        "dtype": dtype,
        "num_ranks": first[0].num_ranks,
        "micro_batches": len(first) if ways[-1].planned_whole else None,
        "gamma": first[0].workload.gamma,
        "peak_tflops": args.peak_tflops,
        "noise": noise,
        "cluster": cost_args.settings_dict(cluster, model),
        "variants": variants,
        "environment": environment(device),
    }
    write_json(args.json, result)
    print_results(args.model, device_name(device), result)
    show(cost_args.assumed(args, result["gamma"], cluster, model))


@dataclass(frozen=True)
class _Way:
    """One way to place the sequences of each step. text_tokens: [step][micro-batch], of each sequence of the plan."""

    topology: str | None  # None: every sequence at home
    steps: Sequence[Step]
    text_tokens: list[list[list[int]]]
    planned_whole: bool = False


def _ways(args: argparse.Namespace, config: BaseConfig, planning: Planning) -> list[_Way]:
    """The ways to replay; the first leaves every sequence at home. Raises ArgumentError, OSError."""
    texts: list[list[Lengths]] | None = None  # of the samples, in the places of their lengths
    if args.plan is not None:
        topology, steps, home = _from_file(args, config)
        found: list[tuple[str | None, list[Step]]] = [(None, home), (topology, steps)]
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
    # A step planned whole may leave micro-batches empty, and so may one cut from its lists.
    if not all(step.num_tokens if args.plan is not None else all(plan.num_tokens for plan in step.plans)
               for step in found[0][1]):  # fmt: skip
        raise ArgumentError("plan: got a step without sequences, expected at least one sequence to replay")

    def texts_of(number: int, step: Step) -> list[list[int]]:
        if texts is None:
            return [_some_text(config, plan.seq_lens) for plan in step.plans]
        if step.whole is None:
            return [[text for of in batch for text in of] for batch in texts[number]]
        # A step's sequences are numbered rank by rank and, within a rank, micro-batch by micro-batch.
        flat = [text for of in lengths_of_step(texts[number]) for text in of]
        return [[flat[s] for s in step.whole.sequences_of(k)] for k in range(step.whole.num_micro_batches)]

    return [
        _Way(name, steps, list(map(texts_of, range(len(steps)), steps)), steps[0].whole is not None)
        for name, steps in found
    ]


def _from_file(args: argparse.Namespace, config: BaseConfig) -> tuple[str, list[Step], list[Step]]:
    """The topology of the plan, its step, and that step with every sequence at home; of a step plan in micro-batches
    cut from each rank's list."""
    plan = cli_args.read_plan(args.plan)
    for option, given in (
        ("--topology", args.topology), ("--micro-batches", args.micro_batches),
        ("--max-tokens-per-rank", args.max_tokens_per_rank or None),
    ):  # fmt: skip
        if given is not None:
            raise ArgumentError(f"{option}: got one beside a plan, which has its own, expected none")
    for of_micro_batch in plan.plans if isinstance(plan, StepPlan) else [plan]:
        _check_model(args.plan, of_micro_batch, config)
    if isinstance(plan, Plan):
        return str(plan.topology), [Step([plan])], [Step([plan_home(plan)])]
    if plan.sync != "micro_batch":
        raise ArgumentError(
            f"plan: sync: got {plan.sync!r}, expected 'micro_batch': ranks wait for each other in each one here"
        )
    first = plan.plans[0]
    planning = Planning(first.d_model, first.workload.gamma, first.cluster, first.model, mask=config.mask)
    batches = micro_batches_of_step(_lengths_of(plan), plan.num_micro_batches)
    return str(first.topology), [Step(plan.plans, whole=plan)], [Step([planning.home(batch) for batch in batches])]


def _lengths_of(step: StepPlan) -> Lengths:
    """For each rank the lengths of its sequences, in the order in which it drew them."""
    length_of = dict(
        pair
        for k, plan in enumerate(step.plans)
        for pair in zip(step.sequences_of(k), (n for lens in plan.seq_lens for n in lens), strict=True)
    )
    counts = [sum(len(plan.seq_lens[rank]) for plan in step.plans) for rank in range(step.plans[0].num_ranks)]
    ids = iter(range(len(length_of)))
    return [[length_of[next(ids)] for _ in range(count)] for count in counts]


def _check_model(path: str, plan: Plan, config: BaseConfig) -> None:
    if plan.d_model != config.d_model:
        expected = f"expected {config.d_model}, as the model has"
        raise ArgumentError(f"{path}: d_model: got {plan.d_model}, {expected}")
    lens = [length for of in plan.seq_lens for length in of]
    works = [plan.workload.work(length, plan.d_model, config.mask) for length in lens]
    if plan.sequence_works != works:
        raise ArgumentError(f"{path}: masks: got others, expected {config.mask!r} alone, as the model has")


def _drawn(args: argparse.Namespace, config: BaseConfig) -> tuple[list[list[Lengths]], list[list[Lengths]] | None]:
    """[step][micro-batch][rank]: lengths, and text tokens where the samples have them."""
    if args.lengths is not None:
        if args.micro_batches is not None:
            raise ArgumentError(
                "--micro-batches: got one beside --lengths, which are of one micro-batch, expected none"
            )
        return [[step] for step in cli_args.steps_from(args, args.ranks, 0, args.steps)[: args.steps]], None
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


def _some_text(config: BaseConfig, seq_lens: Lengths) -> list[int]:
    from knapformer.tools.measure.blocks import typical_text_tokens

    return [typical_text_tokens(config, length) for lens in seq_lens for length in lens]


def print_results(model_name: str, device: str, result: dict[str, Any]) -> None:
    baseline_s = result["variants"][0]["fbl_s"]
    text = "Corr. and spread: of ranks' measured seconds with their planned work (- where that is even), and per FLOP."
    if result["noise"] is not None:
        text += f" Repeats of a measurement spread by {result['noise']:.1%}."
    show(
        f"{model_name} in {result['dtype']} on {device}, shares of "
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
