"""`knapformer doctor`: would balancing gain on these lengths, and what has to be changed for it?"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from knapformer import ArgumentError, Cluster, TopologyOption, TrainedModel
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import Lengths
from knapformer.tools.columns import MEANINGS
from knapformer.tools.doctor import text, topologies
from knapformer.tools.doctor.alternatives import Draw, Result, Setting, Step, alternatives, baselines, gain, simulate
from knapformer.tools.doctor.memory import DEVICE_GIB, MemoryModel
from knapformer.tools.doctor.source import Source
from knapformer.tools.doctor.topologies import ranked_for, sharing
from knapformer.tools.doctor.verdict import Lever, Verdict, decide, levers
from knapformer.tools.files import check_outputs, write_json
from knapformer.tools.measure.progress import Progress
from knapformer.tools.presets import DEFAULT_PRESET, PRESETS, Preset, preset_named
from knapformer.tools.sample_files import FORMATS

_FORMAT = "knapformer.diagnosis"
#: The exit status where findings are printed, but more than 5 % of the rows could not be read.
MANY_LEFT_OUT = 3
_REPORTED_COUNTS = (1, 2, 4, 8)
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
    cli_args.add_lengths_file(source, "LENGTHS, as other commands take them")
    cli_args.add_data(source)
    cli_args.add_ranks(parser, "data-parallel ranks")
    parser.add_argument(
        "--columns", type=_columns, default={}, metavar="WHAT=NAME,...",
        help=f"all columns to read, where they are not recognised: {', '.join(MEANINGS)}",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help=f"{', '.join(PRESETS)} (default {DEFAULT_PRESET})")
    parser.add_argument(
        "--batch-size", type=cli_args.integer(1, 1 << 16), metavar="N",
        help="samples of a rank in a micro-batch, where none are drawn as --data or LENGTHS says (default 1)",
    )  # fmt: skip
    cli_args.add_count(parser, "--micro-batches", 1, "of an optimizer step", high=1 << 12)
    parser.add_argument("--now", default="as_drawn", choices=_KEYS, help="what you do now (default as_drawn)")
    parser.add_argument(
        "--memory-gib", type=cli_args.number(0, inclusive=False), metavar="F",
        help="of an accelerator (default: of --cluster where it is named)",
    )  # fmt: skip
    parser.add_argument(
        "--measured-memory", type=_measured_point, metavar="TOKENS:GIB",
        help="one measured peak, which the memory model is put through",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=cli_args.integer(2, 10**6), metavar="N",
        help="simulated (default 20; fewer where a step has very many samples)",
    )  # fmt: skip
    cli_args.add_draw(parser)
    cost_args.add_gamma(parser)
    cli_args.add_d_model(parser, "the --model's")
    cost_args.add_mask(parser)
    cli_args.add_max_tokens(parser, "what fits in memory")
    cost_args.add_rank_speed(parser)
    cost_args.add_model_options(parser)
    parser.add_argument("--topologies", action="store_true", help="lists all topologies of bags, with the reasons")
    parser.add_argument("--json", metavar="FILE|-", help="writes the figures as JSON")
    parser.add_argument("--report", metavar="FILE", help="writes an HTML file that opens offline, with pictures")
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
    # Topologies, alternatives, and 12 simulations each for how sure it is and for the levers.
    total = 1 + len(baselines(source.simulated_ranks)) + 3 + 24 + (4 * len(_REPORTED_COUNTS) if args.report else 0)
    with Progress(total, enabled=sys.stderr.isatty()) as progress:

        def watch(name: str) -> None:
            progress.advance()
            progress.describe(f"simulating {name}")

        progress.describe(f"drawing samples, and comparing topologies, for {source.simulated_ranks:,} ranks")
        batches = source.batches(args.micro_batches)
        setting, memory = _setting(args, source, preset, _mean_batch_size(batches), gamma, cluster, model)
        cost_args.warn_if_far(args, setting.d_model, max(source.pool))
        draw = Draw.of_batches(setting, batches, source.pool, args.seed, watch)
        ranking = ranked_for(draw)
        results = [_within(simulate(of, draw), setting) for of in alternatives(setting, sharing(ranking))]
        now = next((result for result in results if result.alternative.key == args.now), None)
        if now is None:
            raise ArgumentError(f"--now: got {args.now}, expected an alternative that {source.num_ranks} ranks allow")
        verdict = decide(results, now, draw)
        moved = levers(verdict, results, draw, source.batches)
        figures = [_figures(result, verdict.now, setting, memory, source) for result in results]
        if args.report is not None:
            _write_report(args, source, preset, draw, memory, results, figures, verdict)
    write_json(args.json, _as_dict(args, source, preset, draw, results, figures, verdict, moved, ranking))
    if args.json != "-":
        rows = [text.cells(result, of) for result, of in zip(results, figures, strict=True)]
        listed = ranking if args.topologies else ()
        text.print_findings(source, preset, draw, rows, results, verdict, moved, listed)
    return MANY_LEFT_OUT if source.samples.many_left_out else 0


def _mean_batch_size(batches: Sequence[Sequence[Lengths]]) -> float:
    """Samples of a rank in a micro-batch: an int where that is one."""
    mean = statistics.fmean(len(lens) for step in batches for batch in step for lens in batch)
    return int(mean) if mean.is_integer() else mean


def _setting(
    args: argparse.Namespace, source: Source, preset: Preset, batch_size: float, gamma: float, cluster: Cluster,
    model: TrainedModel,
) -> tuple[Setting, MemoryModel]:  # fmt: skip
    d_model = args.d_model or preset.d_model
    memory = MemoryModel.of(model, d_model, source.num_ranks)
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
    given, speeds = args.max_tokens_per_rank, args.rank_speed
    sampled = source.simulated_ranks != source.num_ranks
    setting = Setting(
        source.simulated_ranks, batch_size, args.micro_batches, d_model, gamma, cluster, model,
        min(filter(None, (max_tokens, given)), default=0), args.mask,
        speeds[: source.simulated_ranks] if len(speeds) == source.num_ranks else speeds,
        limit_is_given=bool(given) and (not max_tokens or given <= max_tokens),
        job_ranks=source.num_ranks if sampled else 0,
    )  # fmt: skip
    return setting, memory


def _within(result: Result, setting: Setting) -> Result:
    max_tokens = setting.max_tokens
    if result.problem is None and max_tokens and result.max_tokens > max_tokens:
        fit = "" if setting.limit_is_given else f", {max_tokens:,} fit"
        return Result(result.alternative, [], f"{result.max_tokens:,} tokens on a rank{fit}")
    return result


def _figures(result: Result, now: Result, setting: Setting, memory: MemoryModel, source: Source) -> dict[str, Any]:
    """Per optimizer step, in the mean."""
    if result.problem is not None:
        return {"problem": result.problem}

    def mean(of: Callable[[Step], float]) -> float:
        return result.mean(of)

    seconds, samples = mean(lambda step: step.seconds), mean(lambda step: step.samples)
    of_work = mean(lambda step: step.work_s) / result.efficiency  # seconds that the samples' work takes this way
    speedup, error = gain(result, now) if now.problem is None else (None, math.nan)
    million = source.num_samples or 10**6
    all_ranks = source.num_ranks / setting.num_ranks
    return {
        "step_s": seconds,
        "speedup": speedup,
        "speedup_standard_error": error if math.isfinite(error) else None,
        "samples_per_s": all_ranks * samples / seconds,
        "tokens_per_s": all_ranks * mean(lambda step: step.tokens) / seconds,
        "device_hours": million / samples * of_work * setting.num_ranks / 3600,
        "efficiency": result.efficiency,
        "waiting": result.waiting,
        "gb_in_node_per_rank": mean(lambda step: step.bytes_in_node) / setting.num_ranks / 1e9,
        "gb_between_nodes_per_rank": mean(lambda step: step.bytes_between) / setting.num_ranks / 1e9,
        "max_tokens": result.max_tokens,
        "max_gib": memory.gib(result.max_tokens),
    }


def _as_dict(
    args: argparse.Namespace, source: Source, preset: Preset, draw: Draw, results: Sequence[Result],
    figures: Sequence[Mapping[str, Any]], verdict: Verdict, moved: Sequence[Lever], ranking: Sequence[TopologyOption],
) -> dict[str, Any]:  # fmt: skip
    setting = draw.setting
    return {
        "format": _FORMAT,
        "version": 1,
        "verdict": text.verdict_text(verdict, source, preset),
        "take": verdict.taken.alternative.key if verdict.is_worth_it else None,
        "now": verdict.now.alternative.key,
        "faster_with_other_samples": [of.alternative.key for of in verdict.faster],
        "speedup": [verdict.low, verdict.speedup, verdict.high],
        "levers": [{"of": lever.name, "speedup": [lever.low, lever.high]} for lever in moved],
        "source": source.description,
        "rows": source.samples.num_rows,
        "bad_rows": source.samples.bad_rows,
        "model_name": preset.name,
        "ranks": source.num_ranks,
        "simulated_ranks": setting.num_ranks,
        "batch_size": setting.batch_size,
        "micro_batches": setting.micro_batches,
        "steps": len(draw.steps),
        "seed": args.seed,
        "d_model": setting.d_model,
        "gamma": setting.gamma,
        "max_tokens_that_fit": setting.max_tokens or None,
        **cost_args.settings_dict(setting.cluster, setting.model),
        "alternatives": [
            {
                "key": result.alternative.key,
                "change": result.alternative.change,
                "effect": result.alternative.effect,
                **of,
            }
            for result, of in zip(results, figures, strict=True)
        ],
        "topologies": [topologies.as_dict(option, setting) for option in ranking],
    }


def _write_report(
    args: argparse.Namespace, source: Source, preset: Preset, draw: Draw, memory: MemoryModel,
    results: Sequence[Result], figures: Sequence[Mapping[str, Any]], verdict: Verdict,
) -> None:  # fmt: skip
    from knapformer.tools.doctor.page import write_page

    setting = draw.setting
    compared = [r for r in results if r.alternative.ours or r.alternative.key == "as_drawn"]
    by_count: dict[str, dict[int, float]] = {result.alternative.name: {} for result in compared}
    for count in _REPORTED_COUNTS:
        try:
            other = draw.with_micro_batches(source.batches(count))
        except ArgumentError:  # fewer batches than that were given
            continue
        for result in compared:
            found = simulate(result.alternative, other)
            if found.problem is None:
                by_count[result.alternative.name][count] = found.efficiency
    lens = source.pool
    top = [
        (f"{statistics.median(lens):,.0f} → {max(lens):,}", "tokens of the median and of the longest sample"),
        (f"{source.num_ranks:,}", "ranks"),
        (f"{setting.micro_batches}", "micro-batches of a step"),
    ]
    if verdict.is_worth_it and verdict.now.problem is None:
        top.insert(0, (f"{verdict.speedup:.2f} times", f"as fast as {verdict.now.alternative.name}"))
    settings = {
        "lengths": source.description, "model": preset.name, "ranks": source.num_ranks,
        "ranks that are simulated": setting.num_ranks, "samples of a micro-batch": setting.batch_size,
        "micro-batches": setting.micro_batches, "width": setting.d_model, "gamma": setting.gamma,
        **{name: value for part in cost_args.settings_dict(setting.cluster, setting.model).values()
           for name, value in part.items()},
    }  # fmt: skip
    write_page(
        args.report, verdict=" ".join(filter(None, (text.verdict_text(verdict, source, preset), verdict.aside()))),
        rows=[text.cells(result, of) for result, of in zip(results, figures, strict=True)], results=results,
        figures=figures, lengths=source.pool, setting=setting,
        limit_gib=memory.gib(setting.max_tokens) if setting.max_tokens else None, efficiency_by_count=by_count,
        subtitle=f"{source.description}; {source.num_ranks} ranks, {setting.micro_batches} micro-batches",
        top=top, settings=settings,
    )  # fmt: skip
