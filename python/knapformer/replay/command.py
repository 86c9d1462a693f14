"""`knapformer replay`: what a cluster would do, measured on one device.

Every rank's share of every step is run for real, one after another: its chunks through the per-token layers, its heads
of whole sequences through attention; forward, recompute, backward. Communication between ranks is modelled.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import knapformer
from knapformer import ArgumentError, DataMix, Plan, Topology
from knapformer._core import HardwareModel, TrainedModel, plan_home
from knapformer.options import (
    H100_GAMMA,
    MAX_RANKS,
    add_data,
    add_device,
    add_draw,
    add_gamma,
    add_lengths_file,
    add_results,
    add_solver,
    check_torch,
    gamma_and_calibration,
    integer,
    read_lengths,
)
from knapformer.output import check_outputs, terminal_or_wide, write_atomically
from knapformer.predict.settings import add_cluster_options, models_from, planning_cluster, settings_dict
from knapformer.report import check_report, write_report

if TYPE_CHECKING:
    from knapformer.models.config import ModelConfig
    from knapformer.replay.results import Variant

_FORMAT = "knapformer.replay"
_DEFAULT_MODELS = {"cuda": "flux", "cpu": "flux-narrow"}
_TEXT_SHARE = 0.1  # of sequences that are given by their length alone


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay", help="every rank's share of a plan, measured on one device", description=__doc__
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("plan", nargs="?", metavar="PLAN.json", help="written by knapformer plan --json")
    add_data(source, required=False)
    add_lengths_file(source)
    parser.add_argument("--topology", action="append", metavar="T", help="may be given several times")
    parser.add_argument(
        "--ranks", type=integer(1, MAX_RANKS), metavar="N", help="with --data (default: those of the mix)"
    )
    add_solver(parser)
    add_gamma(parser, default=H100_GAMMA)
    add_draw(parser)
    parser.add_argument("--steps", type=integer(1, 10**6), default=1, metavar="N", help="of --data (default 1)")
    parser.add_argument(
        "--repeats", type=integer(1, 10**6), default=3, metavar="N", help="of each measurement; medians (default 3)"
    )
    parser.add_argument("--warmup", type=integer(1, 10**6), default=1, metavar="N", help="before them (default 1)")
    parser.add_argument(
        "--model", metavar="NAME|JSON",
        help="one block of each kind is run; default flux on CUDA, flux-narrow, an eighth as wide, on the CPU",
    )  # fmt: skip
    add_device(parser)
    cluster = parser.add_argument_group("the cluster that communication is modelled for")
    add_cluster_options(cluster)
    add_results(parser, device="the device")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Work:
    """What is replayed: plans of each step, by name; the first leaves every sequence at home."""

    plans: dict[str | None, list[Plan]]
    text_tokens: list[list[int]]  # for each step of each sequence


def run(args: argparse.Namespace) -> None:
    check_torch()
    check_outputs({"--json": args.json, "--report": args.report})
    check_report(args.report)
    from knapformer.measure.device import default_dtype, use_device
    from knapformer.measure.environment import environment
    from knapformer.models.config import config_to_dict, load_config
    from knapformer.models.parallel import DTYPES

    device = use_device(args.device, args.threads)
    model_name = args.model or _DEFAULT_MODELS[device.type]
    config = load_config(model_name)
    gamma, calibration = gamma_and_calibration(args)
    hardware, model = models_from(args, calibration)
    # What does not come from a plan is either measured here or not known.
    hardware.fixed_s = hardware.host_s_per_piece = 0.0
    work = _work(args, config, gamma, hardware)
    dtype = args.dtype or default_dtype(device)

    from knapformer.measure.progress import Progress
    from knapformer.replay.device import Replayer
    from knapformer.replay.results import Variant
    from knapformer.replay.shares import shares_of

    replayer = Replayer(config, device, DTYPES[dtype], not args.no_checkpoint)
    model.num_blocks, model.num_parameters = config.depth, replayer.num_parameters
    model.bytes_per_number, model.recomputes = DTYPES[dtype].itemsize, not args.no_checkpoint
    num_kv_heads = getattr(config, "num_kv_heads", config.num_heads)
    shares = [
        share
        for plans in work.plans.values()
        for plan, text_tokens in zip(plans, work.text_tokens, strict=True)
        for share in shares_of(plan, config.num_heads, num_kv_heads, text_tokens)
    ]
    with Progress(replayer.num_measurements(shares) * (args.repeats + args.warmup)) as progress:
        progress.describe("replaying")
        measured, noise = replayer.run(shares, args.repeats, args.warmup, progress.advance)
    variants, done = [], 0
    for name, plans in work.plans.items():
        of_steps = []
        for plan in plans:
            of_steps.append(measured[done : done + plan.num_ranks])
            done += plan.num_ranks
        variants.append(Variant(name, plans, of_steps))
    figures = [variant.figures(hardware, model, args.peak_tflops) for variant in variants]
    result = {
        "format": _FORMAT,
        "version": 1,
        "model": config_to_dict(config),
        "dtype": dtype,
        "num_ranks": variants[0].plans[0].num_ranks,
        "gamma": variants[0].plans[0].workload.gamma,
        "peak_tflops": args.peak_tflops,
        "noise": noise,
        "cluster": settings_dict(hardware, model),
        "variants": figures,
        "environment": environment(device),
    }
    if args.json is not None:
        write_atomically(args.json, json.dumps(result, indent=1, allow_nan=False) + "\n")
    if args.report is not None:
        _write_report(args.report, variants, figures, hardware, model)
    print_results(model_name, result)


def _work(args: argparse.Namespace, config: ModelConfig, gamma: float, hardware: HardwareModel) -> _Work:
    """Raises ArgumentError, OSError."""
    from knapformer.models.config import mask_factor

    mask = mask_factor(config)
    if args.plan is not None:
        plan = Plan.from_json(Path(args.plan).read_text(encoding="utf-8", errors="replace"))
        if args.topology is not None:
            raise ArgumentError("--topology: got one beside a plan, which has its own, expected none")
        for name, got, expected in (
            ("d_model", plan.d_model, config.d_model),
            ("mask_factor", plan.workload.mask_factor, mask),
        ):
            if got != expected:
                raise ArgumentError(f"{args.plan}: {name}: got {got}, expected {expected}, as the model has")
        if plan.attention_pairs:
            raise ArgumentError(f"{args.plan}: masks: got some of sequences, expected the model's own mask alone")
        plans: dict[str | None, list[Plan]] = {str(plan.topology): [plan]}
        text_tokens = [_some_text(plan.seq_lens)]
    else:
        if args.topology is None:
            raise ArgumentError("--topology: got none, expected bags of ranks such as g8n4")
        seq_lens, text_tokens = _drawn(args)
        topologies = {str(Topology(text, len(seq_lens[0]))): text for text in args.topology}
        plans = {
            name: [
                knapformer.plan(
                    lens, text, config.d_model, gamma, args.solver, mask_factor=mask, cluster=planning_cluster(hardware)
                )
                for lens in seq_lens
            ]
            for name, text in topologies.items()
        }
    one = next(iter(plans.values()))
    if any(plan.num_tokens == 0 for plan in one):
        raise ArgumentError("plan: got a step without sequences, expected at least one sequence to replay")
    return _Work({None: [plan_home(plan) for plan in one], **plans}, text_tokens)


def _drawn(args: argparse.Namespace) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Lengths of each step and rank, and for each step text tokens of each sequence."""
    if args.lengths is not None:
        lengths = read_lengths(args.lengths, args.ranks)
        return [lengths], [_some_text(lengths)]
    mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    num_ranks = mix.num_ranks if args.ranks is None else args.ranks
    mix.check_divides(num_ranks)
    samples = [[mix.draw(args.seed, step, rank) for rank in range(num_ranks)] for step in range(args.steps)]
    seq_lens = [[[sample.num_tokens for sample in of] for of in ranks] for ranks in samples]
    return seq_lens, [[sample.text_tokens for of in ranks for sample in of] for ranks in samples]


def _some_text(seq_lens: list[list[int]]) -> list[int]:
    return [int(_TEXT_SHARE * length) for lens in seq_lens for length in lens]


def _write_report(
    path: str, variants: list[Variant], figures: list[dict[str, Any]], hardware: HardwareModel, model: TrainedModel
) -> None:
    measured_s = {
        variant.name or "no balancer": of["fbl_per_step_s"] for variant, of in zip(variants, figures, strict=True)
    }
    # Not predicted: the cluster's compute is not this device's.
    plan = variants[-1].plans[0]
    write_report(path, plan, hardware=hardware, model=model, measured_s=measured_s, predicts=False)


def print_results(model_name: str, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(caption="FBL: what the slowest ranks compute, measured; then what the cluster model adds. Seconds.")
    table.add_column("balancer", no_wrap=True)
    columns = ["WIR", "measured", "FBL", "compute", "exchange", "route", "FSDP", "TPS", "speed-up", "corr.", "spread"]
    for column in columns + (["HFU"] if result["peak_tflops"] is not None else []):
        table.add_column(column, justify="right", no_wrap=True)
    baseline_s = result["variants"][0]["fbl_s"]
    for row in result["variants"]:
        cells = [
            row["topology"] or "none",
            _or_dash(row["wir"], ".2f", "inf"),
            _or_dash(row["measured_wir"], ".2f", "inf"),
            f"{row['fbl_s']:.3f}",
            f"{row['token_s'] + row['attention_s']:.3f}",
            *(f"{row[term]:.3f}" for term in ("exchange_s", "route_s", "fsdp_s")),
            f"{row['tokens_per_s']:,.0f}",
            f"{baseline_s / row['fbl_s']:.2f}",
            _or_dash(row["correlation"], ".3f", "-"),
            f"{row['spread']:.1%}",
        ]
        table.add_row(*cells, *([f"{row['hfu']:.1%}"] if row["hfu"] is not None else []))
    environment = result["environment"]
    console = terminal_or_wide()
    console.print(
        f"{model_name} in {result['dtype']} on {environment['accelerator'] or environment['processor']}, shares of "
        f"{result['num_ranks']:,} ranks, gamma {result['gamma']:.3g}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(table)
    text = "Corr. and spread: of ranks' measured seconds with their planned work (- where that is even), and per FLOP."
    if result["noise"] is not None:
        text += f" Repeats of a measurement spread by {result['noise']:.1%}."
    console.print(text, soft_wrap=True, highlight=False)


def _or_dash(value: float | None, style: str, otherwise: str) -> str:
    return otherwise if value is None else format(value, style)
