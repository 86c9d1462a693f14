"""`knapformer doctor`: would balancing gain on these lengths, and what has to be changed for it?"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from knapformer import ArgumentError, Cluster, TopologyOption
from knapformer.tools import cli_args, cost_args
from knapformer.tools.columns import MEANINGS
from knapformer.tools.doctor import text, topologies
from knapformer.tools.doctor.alternatives import Case, Result, alternatives, baselines, gain, simulate
from knapformer.tools.doctor.memory import DEVICE_GIB, MemoryModel
from knapformer.tools.doctor.source import Source
from knapformer.tools.doctor.topologies import ranked, sharing
from knapformer.tools.doctor.verdict import Verdict, decide
from knapformer.tools.files import check_outputs, write_json
from knapformer.tools.measure.progress import Progress
from knapformer.tools.presets import DEFAULT_PRESET, PRESETS, Preset, preset_named
from knapformer.tools.sample_files import FORMATS
from knapformer.tools.ways import Planning

_FORMAT = "knapformer.diagnosis"
#: The exit status where findings are printed, but more than 5 % of the rows could not be read.
MANY_LEFT_OUT = 3
_KEYS = ("as_drawn", "one_by_one", "buckets", "time_budget", "longest_first", "static_2", "static_4", "static_8")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what balancing gains on your lengths, beside what you do now",
        description=__doc__,
        epilog=f"Exit status {MANY_LEFT_OUT}: the findings are printed, but of more than 5 % of the rows nothing could "
        f"be read. {cli_args.DATA_CODES}",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "lengths", nargs="?", metavar="LENGTHS", default=argparse.SUPPRESS,
        help=f"tokens of each sample, or sizes that --model turns into them: .{', .'.join(FORMATS)}, or '-'; a "
        "trainer's cache; or as they were drawn: a list for each rank, or a list of such steps",
    )  # fmt: skip
    cli_args.add(source, "--lengths", help="LENGTHS, as other commands take them")
    cli_args.add(source, "--data")
    cli_args.add(parser, "--ranks", help="data-parallel ranks")
    parser.add_argument(
        "--columns", type=_columns, default={}, metavar="WHAT=NAME,...",
        help=f"all columns to read, where they are not recognised: {', '.join(MEANINGS)}",
    )  # fmt: skip
    cli_args.add(parser, "--model", default=None, help=f"{', '.join(PRESETS)} (default {DEFAULT_PRESET})")
    cli_args.add(
        parser, "--batch-size", default=None,
        help="samples of a rank in a micro-batch, where none are drawn as --data or LENGTHS says (default 1)",
    )  # fmt: skip
    cli_args.add(parser, "--micro-batches", default=1, help="of an optimizer step (default 1)")
    parser.add_argument("--now", default="as_drawn", choices=_KEYS, help="what you do now (default as_drawn)")
    parser.add_argument(
        "--memory-gib", type=cli_args.number(0, inclusive=False), metavar="F",
        help="of an accelerator (default: of --cluster where it is named)",
    )  # fmt: skip
    parser.add_argument(
        "--measured-memory", type=_measured_point, metavar="TOKENS:GIB",
        help="one measured peak, which the memory model is put through",
    )  # fmt: skip
    cli_args.add(
        parser, "--steps", type=cli_args.integer(2, 10**6), default=None,
        help="simulated (default 20; fewer where a step has very many samples)",
    )  # fmt: skip
    cli_args.add(parser, *cli_args.DRAW)
    cli_args.add_gamma(parser)
    cli_args.add(parser, "--d-model", help="width, in features (default: the --model's)")
    limit = "that a rank may hold in a micro-batch (default: what fits in memory)"
    cli_args.add(parser, "--max-tokens-per-rank", help=limit)
    cli_args.add(parser, "--mask", "--rank-speed")
    cli_args.add_model_options(parser)
    parser.add_argument("--topologies", action="store_true", help="lists all topologies of bags, with the reasons")
    cli_args.add(parser, "--json", metavar="FILE|-")
    cli_args.add(parser, "--report")
    parser.set_defaults(run=run)


def _columns(text: str) -> dict[str, str]:
    pairs = dict(item.partition("=")[::2] for item in text.split(","))
    if not all(pairs.values()) or not pairs.keys() <= set(MEANINGS):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected WHAT=NAME,..., WHAT one of {', '.join(MEANINGS)}")
    return pairs


def _measured_point(text: str) -> tuple[int, float]:
    tokens, _, gib = text.partition(":")
    return cli_args.integer(1, 2**62)(tokens), cli_args.number(0, inclusive=False)(gib)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    check_outputs({"--json": None if args.json == "-" else args.json, "--report": args.report})
    preset = preset_named(args.model or DEFAULT_PRESET)
    gamma, cluster, model = cost_args.costs(args, model=preset.trained_model(), own_fixed=True).values()
    source = Source(args, preset, cluster.ranks_per_node)
    # Topologies, alternatives, and 12 simulations for how sure it is.
    with Progress(1 + len(baselines(source.simulated_ranks)) + 3 + 12, enabled=sys.stderr.isatty()) as progress:

        def watch(name: str) -> None:
            progress.advance()
            progress.describe(f"simulating {name}")

        progress.describe(f"drawing samples, and comparing topologies, for {source.simulated_ranks:,} ranks")
        batches, speeds = source.batches(args.micro_batches), args.rank_speed
        planning = Planning(
            args.d_model or preset.d_model, gamma, cluster, model, args.mask,
            speeds[: source.simulated_ranks] if len(speeds) == source.num_ranks else speeds, effort="low",
        )  # fmt: skip
        memory, fit = _memory(args, source, preset, planning)
        given = args.max_tokens_per_rank
        case = Case(
            planning, batches, source.pool, args.seed, min(filter(None, (fit, given)), default=0),
            limit_is_given=bool(given) and (not fit or given <= fit),
            job_ranks=source.num_ranks if source.simulated_ranks != source.num_ranks else 0, watch=watch,
        )  # fmt: skip
        cost_args.warn_if_far(args, planning.d_model, max(source.pool))
        ranking = ranked(case)
        results = [_within(simulate(of, case), case) for of in alternatives(case, sharing(ranking))]
        now = next((result for result in results if result.alternative.key == args.now), None)
        if now is None:
            raise ArgumentError(f"--now: got {args.now}, expected an alternative that {source.num_ranks} ranks allow")
        verdict = decide(results, now, case, f"{preset.name} on {source.num_ranks:,} ranks")
    figures = [_figures(result, verdict.now, case, memory, source) for result in results]
    rows = [text.cells(result, of) for result, of in zip(results, figures, strict=True)]
    if args.report is not None:
        from knapformer.tools.doctor.page import write_page

        write_page(args.report, source, preset, case, rows, results, figures, verdict)
    write_json(args.json, _as_dict(source, preset, case, results, figures, verdict, ranking))
    if args.json != "-":
        text.print_findings(source, preset, case, rows, results, verdict, ranking if args.topologies else ())
    return MANY_LEFT_OUT if source.samples.many_left_out else 0


def _memory(args: argparse.Namespace, source: Source, preset: Preset, planning: Planning) -> tuple[MemoryModel, int]:
    """What a rank's memory holds, and the tokens that fit; 0 where memory is not limited."""
    model = planning.model
    memory = MemoryModel.of(model, planning.d_model, source.num_ranks)
    if args.measured_memory is not None:
        tokens, gib = args.measured_memory
        if memory.gib(0) >= gib:
            raise ArgumentError(
                f"--measured-memory: got {gib:g} GiB, expected more than the {memory.gib(0):.1f} of parameters and "
                f"optimizer of {preset.name}"
            )
        memory = memory.measured(tokens, gib)
    limit_gib = args.memory_gib or DEVICE_GIB.get(args.cluster or Cluster.names()[0])
    max_tokens = 0 if limit_gib is None else memory.max_tokens(limit_gib)
    if limit_gib is not None and max_tokens == 0:
        shards = min(model.shard_ranks, source.num_ranks)
        default = " (the default of --model)" if args.model is None else ""
        raise ArgumentError(
            f"does not fit in memory: parameters, gradients and optimizer of {preset.name}{default}, with "
            f"{model.num_parameters:.3g} parameters, sharded over {shards} rank(s), take {memory.gib(0):.1f} GiB on "
            f"each, expected at most {limit_gib:g} (--memory-gib): name another --model, or --mode lora, or more ranks"
        )
    return memory, max_tokens


def _within(result: Result, case: Case) -> Result:
    max_tokens = case.max_tokens
    if result.problem is None and max_tokens and result.max_tokens > max_tokens:
        fit = "" if case.limit_is_given else f", {max_tokens:,} fit"
        return Result(result.alternative, [], f"{result.max_tokens:,} tokens on a rank{fit}")
    return result


def _figures(result: Result, now: Result, case: Case, memory: MemoryModel, source: Source) -> dict[str, Any]:
    """Per optimizer step, in the mean."""
    if result.problem is not None:
        return {"problem": result.problem}
    seconds, samples = result.mean("total_s"), result.mean("samples")
    of_work = result.work_s / result.efficiency  # seconds that the samples' work takes this way
    speedup, error = gain(result, now) if now.problem is None else (None, math.nan)
    between = result.mean("route_bytes_between_nodes") + result.mean("attention_bytes_between_nodes")
    sent = result.mean("route_bytes") + result.mean("attention_bytes")
    all_ranks = source.num_ranks / case.num_ranks
    return {
        "step_s": seconds,
        "speedup": speedup,
        "speedup_standard_error": error if math.isfinite(error) else None,
        "samples_per_s": all_ranks * samples / seconds,
        "tokens_per_s": all_ranks * result.mean("tokens") / seconds,
        "device_hours": (source.num_samples or 10**6) / samples * of_work * case.num_ranks / 3600,
        "efficiency": result.efficiency,
        "waiting": result.waiting,
        "gb_in_node_per_rank": (sent - between) / case.num_ranks / 1e9,
        "gb_between_nodes_per_rank": between / case.num_ranks / 1e9,
        "max_tokens": result.max_tokens,
        "max_gib": memory.gib(result.max_tokens),
    }


def _as_dict(
    source: Source, preset: Preset, case: Case, results: Sequence[Result], figures: Sequence[Mapping[str, Any]],
    verdict: Verdict, ranking: Sequence[TopologyOption],
) -> dict[str, Any]:  # fmt: skip
    planning = case.planning
    return {
        "format": _FORMAT,
        "version": 1,
        "verdict": text.verdict_text(verdict, source),
        "take": verdict.taken.alternative.key if verdict.is_worth_it else None,
        "now": verdict.now.alternative.key,
        "faster_with_other_samples": [of.alternative.key for of in verdict.faster],
        "speedup": [verdict.low, verdict.speedup, verdict.high],
        "source": source.description,
        "rows": source.samples.num_rows,
        "bad_rows": source.samples.bad_rows,
        "model_name": preset.name,
        "ranks": source.num_ranks,
        "simulated_ranks": case.num_ranks,
        "batch_size": case.batch_size,
        "micro_batches": case.micro_batches,
        "steps": len(case.batches),
        "seed": case.seed,
        "d_model": planning.d_model,
        "gamma": planning.gamma,
        "max_tokens_that_fit": case.max_tokens or None,
        **cost_args.settings_dict(planning.cluster, planning.model),
        "alternatives": [
            {"key": of.alternative.key, "change": of.alternative.change, "effect": of.alternative.effect, **row}
            for of, row in zip(results, figures, strict=True)
        ],
        "topologies": [topologies.as_dict(option, case) for option in ranking],
    }
