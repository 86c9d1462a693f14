"""`knapformer doctor`: would balancing gain on these lengths, and what has to be changed for it?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from knapformer import ArgumentError, Cluster
from knapformer.tools import cli_args, settings
from knapformer.tools.baselines import baselines
from knapformer.tools.cli_args import add
from knapformer.tools.columns import MEANINGS
from knapformer.tools.doctor.alternatives import Result, alternatives, ranked, sharing, simulate
from knapformer.tools.doctor.findings import Findings
from knapformer.tools.doctor.memory import DEVICE_GIB, MemoryModel
from knapformer.tools.doctor.verdict import decide
from knapformer.tools.draws import Source
from knapformer.tools.files import Progress, write_json
from knapformer.tools.lengths_files import FORMATS
from knapformer.tools.model_presets import DEFAULT_PRESET, PRESETS, Preset
from knapformer.tools.ways import DrawnSteps, PlanCost

#: The exit status where findings are printed, but more than 5 % of the rows could not be read.
MANY_LEFT_OUT = 3


def add_parser(subparsers: Any) -> None:
    parser = cli_args.command(
        subparsers, "doctor", run, help="what balancing gains on your lengths, beside what you do now",
        description=__doc__,
        epilog=f"Exit status {MANY_LEFT_OUT}: the findings are printed, but of more than 5 % of the rows nothing could "
        f"be read. {cli_args.DATA_CODES}",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    add(
        source, "lengths", nargs="?", metavar="LENGTHS", default=argparse.SUPPRESS,
        help=f"tokens of each sample, or sizes that --model turns into them: .{', .'.join(FORMATS)}; or as "
        "they were drawn: a list for each rank, or a list of such batches",
    )  # fmt: skip
    add(source, "--lengths", help="the same as LENGTHS")
    add(source, "--data")
    # Each further step takes 5 s of a core at 8,192 ranks with one sample each, 1 s at 4,096.
    add(parser, "--ranks", type=cli_args.integer(1, 1 << 12), help="data-parallel ranks")
    add(
        parser, "--columns", type=_columns, default={}, metavar="WHAT=NAME,...",
        help=f"all columns to read, where they are not recognised: {', '.join(MEANINGS)}",
    )  # fmt: skip
    add(parser, "--model", default=DEFAULT_PRESET, choices=PRESETS, metavar=None, help=f"default {DEFAULT_PRESET}")
    add(
        parser, "--batch-size", default=None,
        help="samples of a rank in a micro-batch, where none are drawn as --data or LENGTHS says (default 1)",
    )  # fmt: skip
    add(parser, "--micro-batches", default=1, help="micro-batches of an optimizer step (default 1)")
    keys = [of.key for of in baselines(8)]
    add(parser, "--now", default="as_drawn", choices=keys, help="what you do now (default as_drawn)")
    add(
        parser, "--memory-gib", type=cli_args.number(), metavar="F",
        help="memory of an accelerator (default: that of a named --cluster)",
    )  # fmt: skip
    add(
        parser, "--steps", type=cli_args.integer(2, 10**6), default=None,
        help="steps that are simulated (default 20; fewer where one has very many samples)",
    )  # fmt: skip
    add(parser, *cli_args.DRAW)
    cli_args.add_gamma(parser)
    add(parser, "--d-model", help="width, in features (default: the --model's)")
    limit = "the most that a rank may hold in a micro-batch (default: what fits in memory)"
    add(parser, "--max-tokens-per-rank", help=limit)
    add(parser, "--mask")
    cli_args.add_model_options(parser)
    add(parser, "--json")


def _columns(text: str) -> dict[str, str]:
    pairs = dict(item.partition("=")[::2] for item in text.split(","))
    if not all(pairs.values()) or not pairs.keys() <= set(MEANINGS):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected WHAT=NAME,..., WHAT one of {', '.join(MEANINGS)}")
    return pairs


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    preset = PRESETS[args.model]
    planning = settings.planning(
        args, model=preset.trained_model(), own_fixed=True, d_model=args.d_model or preset.d_model, effort="low"
    )
    source = Source(args, args.ranks, preset, args.columns)
    if (args.data is not None or source.samples.batches) and args.batch_size is not None:
        stating = args.lengths if args.data is None else "--data"
        raise ArgumentError(
            f"--batch-size: got {args.batch_size}, expected none: {stating} states what each rank draws"
        )
    if not source.pool:
        raise ArgumentError(f"{args.lengths}: got no sample, expected at least one")
    num_ranks = source.num_ranks
    if args.now not in (of.key for of in baselines(num_ranks)):
        raise ArgumentError(f"--now: got {args.now}, expected an alternative that {num_ranks} ranks allow")
    with Progress(len(baselines(num_ranks)) + 3, enabled=sys.stderr.isatty()) as progress:
        progress.describe(f"drawing samples, and comparing topologies, for {num_ranks:,} ranks")
        memory, fit = _memory(args, source, preset, planning)
        limit = min(filter(None, (fit, args.max_tokens_per_rank)), default=0)
        draw = DrawnSteps(planning, source.batches(args.micro_batches), source.pool, args.seed, limit)
        settings.warn_if_far(args, planning, [[list(source.pool)]])
        results = list[Result]()
        for alternative in alternatives(draw, sharing(ranked(draw))):
            progress.describe(f"simulating {alternative.name}")
            results.append(simulate(alternative, draw))
            progress.count()
        now = next(result for result in results if result.alternative.key == args.now)
        verdict = decide(results, now, draw, f"{preset.name} on {num_ranks:,} ranks")
    found = Findings(args, source, preset, draw, memory, results, verdict)
    write_json(args.json, found.to_dict())
    if args.json != "-":
        found.print()
    return MANY_LEFT_OUT if source.samples.many_left_out else 0


def _memory(args: argparse.Namespace, source: Source, preset: Preset, planning: PlanCost) -> tuple[MemoryModel, int]:
    """What a rank's memory holds, and the tokens that fit; 0 where memory is not limited."""
    model = planning.model
    memory = MemoryModel.of(model, planning.d_model, source.num_ranks, cross_attends=preset.text_beside)
    limit_gib = args.memory_gib or DEVICE_GIB.get(args.cluster or Cluster.names()[0])
    fit = 0 if limit_gib is None else memory.tokens_within(limit_gib)
    if limit_gib is not None and fit == 0:
        shards = min(model.shard_ranks, source.num_ranks)
        default = " (the default of --model)" if args.model == DEFAULT_PRESET else ""
        raise ArgumentError(
            f"does not fit in memory: parameters, gradients and optimizer of {preset.name}{default}, with "
            f"{model.num_parameters:.3g} parameters, sharded over {shards} rank(s), take {memory.gib(0):.1f} GiB on "
            f"each, expected at most {limit_gib:g} (--memory-gib): name another --model, or --mode lora, or more ranks"
        )
    return memory, fit
