"""`knapformer doctor`: would balancing gain on these lengths, and what has to be changed for it?"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, TopologyOption
from knapformer.tools import cli_args, cost_args
from knapformer.tools.cli_args import Lengths
from knapformer.tools.doctor import topologies
from knapformer.tools.doctor.alternatives import Draw, Result, Setting, Step, alternatives, gain, simulate
from knapformer.tools.doctor.memory import DEVICE_GIB, MemoryModel
from knapformer.tools.doctor.topologies import ranked_for, sharing
from knapformer.tools.doctor.verdict import Lever, Verdict, decide, levers
from knapformer.tools.files import check_outputs, show, table_of, write_json
from knapformer.tools.measure.progress import Progress
from knapformer.tools.presets import PRESETS, preset_named
from knapformer.tools.sample_files import FORMATS, Samples, read_samples

_FORMAT = "knapformer.diagnosis"
_REPORTED_COUNTS = (1, 2, 4, 8)
_KEYS = ("as_drawn", "one_by_one", "buckets", "time_budget", "longest_first", "static_2", "static_4", "static_8")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what balancing gains on your lengths, beside what you do now",
        description=__doc__,
        epilog=cli_args.DATA_CODES,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "lengths", nargs="?", metavar="LENGTHS", default=argparse.SUPPRESS,
        help=f"tokens of each sample, or sizes that --model turns into them: .{', .'.join(FORMATS)}, or '-'; or as "
        "they were drawn: a list for each rank, or a list of such steps",
    )  # fmt: skip
    cli_args.add_lengths_file(source, "LENGTHS, as other commands take them")
    cli_args.add_data(source)
    cli_args.add_ranks(parser, "data-parallel ranks")
    parser.add_argument(
        "--columns", type=_columns, default={}, metavar="WHAT=NAME,...",
        help="of a table, where not recognised: length, or width, height, frames, text",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help=f"{', '.join(PRESETS)} (default flux)")
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
    cli_args.add_count(parser, "--steps", 20, "simulated", low=2)
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
    known = ("length", "width", "height", "frames", "text")
    if not all(pairs.values()) or not pairs.keys() <= set(known):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected WHAT=NAME,..., WHAT one of {', '.join(known)}")
    return pairs


def _measured_point(text: str) -> tuple[int, float]:
    tokens, _, gib = text.partition(":")
    return cli_args.integer(1, 2**62)(tokens), cli_args.number(0, inclusive=False)(gib)


def run(args: argparse.Namespace) -> None:
    check_outputs({"--json": None if args.json == "-" else args.json, "--report": args.report})
    source = _Source(args)
    batches = source.batches(args.micro_batches)
    setting, memory = _setting(args, source.num_ranks, _mean_batch_size(batches))
    cost_args.warn_if_far(args, setting.d_model, max(source.pool))
    draw = Draw.of_batches(setting, batches, source.pool, args.seed)
    ranking = ranked_for(draw)
    candidates = alternatives(setting, sharing(ranking))
    with Progress(len(candidates) + 2, enabled=sys.stderr.isatty()) as progress:
        results = []
        for alternative in candidates:
            progress.describe(f"simulating {alternative.name}")
            results.append(_within(simulate(alternative, draw), setting))
            progress.advance()
        now = next((result for result in results if result.alternative.key == args.now), None)
        if now is None:
            raise ArgumentError(f"--now: got {args.now}, expected an alternative that {setting.num_ranks} ranks allow")
        progress.describe("how sure")
        verdict = decide(results, now, draw)
        progress.advance()
        moved = levers(verdict, results, draw, source.batches)
        progress.advance()
    write_json(args.json, _as_dict(args, source, draw, memory, results, verdict, moved, ranking))
    if args.report is not None:
        _write_report(args, source, draw, memory, results, verdict)
    if args.json != "-":
        _print(source, draw, memory, results, verdict, moved, ranking if args.topologies else ())


class _Source:
    """The source of the lengths, and the steps drawn from it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.samples = Samples()
        self._mix: DataMix | None = None
        self.num_samples = 0  # of the data set; 0 where it has no end
        if args.data is not None:
            self._refuse_batch_size("--data")
            self._mix, self.num_ranks = cli_args.mix_and_ranks(args)
            self.pool: Sequence[int] = [length for (batch,) in self.batches(1) for lens in batch for length in lens]
            self.description = f"mix {args.data}"
            return
        preset = preset_named(args.model or "flux")
        with Progress(1, enabled=sys.stderr.isatty()) as progress:
            progress.describe(f"reading {args.lengths}")
            self.samples = read_samples(
                args.lengths, preset, args.columns, lambda rows: progress.describe(f"reading {args.lengths}: {rows:,}")
            )
        steps = self.samples.steps
        if steps:
            self._refuse_batch_size(args.lengths)
        if steps and args.ranks not in (None, len(steps[0])):
            raise ArgumentError(f"--ranks: got {args.ranks}, expected {len(steps[0])}, as {args.lengths} has, or none")
        if not steps and args.ranks is None:
            raise ArgumentError("--ranks: got none, expected the number of data-parallel ranks")
        self.num_ranks = len(steps[0]) if steps else args.ranks
        self.pool = self.samples.lengths
        self.num_samples = len(self.pool)
        self.description = f"{args.lengths}, {self.num_samples:,} samples"

    def _refuse_batch_size(self, source: str) -> None:
        if self._args.batch_size is not None:
            raise ArgumentError(
                f"--batch-size: got {self._args.batch_size}, expected none: {source} states what each rank draws"
            )

    def batches(self, micro_batches: int) -> list[list[Lengths]]:
        """Of optimizer steps, [step][micro-batch][rank]: the same ones for the same number of micro-batches."""
        args, drawn = self._args, self.samples.steps
        count = args.steps
        if self._mix is not None or drawn:
            if drawn and len(drawn) < micro_batches:
                raise ArgumentError(
                    f"--micro-batches: got {micro_batches}, expected at most the {len(drawn)} batches of {args.lengths}"
                )
            count = min(count, len(drawn) // micro_batches) if drawn else count

            def batch(i: int) -> Lengths:
                if self._mix is None:
                    return drawn[i]
                return self._mix.draw_lengths(args.seed, i, self.num_ranks)

            return [[batch(i) for i in cli_args.batches_of_step(step, micro_batches)] for step in range(count)]
        rng = random.Random(args.seed)
        size = (args.batch_size or 1) * micro_batches
        steps = ([rng.choices(self.pool, k=size) for _ in range(self.num_ranks)] for _ in range(count))
        return [cli_args.micro_batches_of_step(step, micro_batches) for step in steps]


def _mean_batch_size(batches: Sequence[Sequence[Lengths]]) -> float:
    """Samples of a rank in a micro-batch: an int where that is one."""
    mean = statistics.fmean(len(lens) for step in batches for batch in step for lens in batch)
    return int(mean) if mean.is_integer() else mean


def _setting(args: argparse.Namespace, num_ranks: int, batch_size: float) -> tuple[Setting, MemoryModel]:
    preset = preset_named(args.model or "flux")
    gamma, cluster, model = cost_args.costs(args, model=preset.trained_model(), own_fixed=True).values()
    d_model = args.d_model or preset.d_model
    memory = MemoryModel.of(model, d_model, num_ranks)
    if args.measured_memory is not None:
        tokens, gib = args.measured_memory
        if memory.gib(0) >= gib:
            raise ArgumentError(
                f"--measured-memory: got {gib:g} GiB, expected more than the {memory.gib(0):.1f} of parameters and "
                "optimizer"
            )
        memory = memory.measured(tokens, gib)
    limit_gib = args.memory_gib or DEVICE_GIB.get(args.cluster or Cluster.names()[0])
    max_tokens = 0 if limit_gib is None else memory.max_tokens(limit_gib)
    if limit_gib is not None and max_tokens == 0:
        shards = min(model.shard_ranks, num_ranks)
        raise ArgumentError(
            f"does not fit in memory: parameters, gradients and optimizer, sharded over {shards} ranks, take "
            f"{memory.gib(0):.1f} GiB of each; expected at most {limit_gib:g} (--memory-gib)"
        )
    given = args.max_tokens_per_rank
    setting = Setting(
        num_ranks, batch_size, args.micro_batches, d_model, gamma, cluster, model,
        min(filter(None, (max_tokens, given)), default=0), args.mask, args.rank_speed,
        limit_is_given=bool(given) and (not max_tokens or given <= max_tokens),
    )  # fmt: skip
    return setting, memory


def _within(result: Result, setting: Setting) -> Result:
    max_tokens = setting.max_tokens
    if result.problem is None and max_tokens and result.max_tokens > max_tokens:
        fit = "" if setting.limit_is_given else f", {max_tokens:,} fit"
        return Result(result.alternative, [], f"{result.max_tokens:,} tokens on a rank{fit}")
    return result


def _figures(result: Result, now: Result, setting: Setting, memory: MemoryModel, num_samples: int) -> dict[str, Any]:
    """Per optimizer step, in the mean."""
    if result.problem is not None:
        return {"problem": result.problem}

    def mean(of: Callable[[Step], float]) -> float:
        return result.mean(of)

    seconds, samples = mean(lambda step: step.seconds), mean(lambda step: step.samples)
    of_work = mean(lambda step: step.work_s) / result.efficiency  # seconds that the samples' work takes this way
    speedup, error = gain(result, now) if now.problem is None else (None, math.nan)
    million = num_samples or 10**6
    return {
        "step_s": seconds,
        "speedup": speedup,
        "speedup_standard_error": error if math.isfinite(error) else None,
        "samples_per_s": samples / seconds,
        "tokens_per_s": mean(lambda step: step.tokens) / seconds,
        "device_hours": million / samples * of_work * setting.num_ranks / 3600,
        "efficiency": result.efficiency,
        "waiting": result.waiting,
        "gb_in_node_per_rank": mean(lambda step: step.bytes_in_node) / setting.num_ranks / 1e9,
        "gb_between_nodes_per_rank": mean(lambda step: step.bytes_between) / setting.num_ranks / 1e9,
        "max_tokens": result.max_tokens,
        "max_gib": memory.gib(result.max_tokens),
    }


def _as_dict(
    args: argparse.Namespace, source: _Source, draw: Draw, memory: MemoryModel, results: Sequence[Result],
    verdict: Verdict, moved: Sequence[Lever], ranking: Sequence[TopologyOption],
) -> dict[str, Any]:  # fmt: skip
    setting = draw.setting
    return {
        "format": _FORMAT,
        "version": 1,
        "verdict": verdict.sentence(),
        "take": verdict.taken.alternative.key if verdict.is_worth_it else None,
        "now": verdict.now.alternative.key,
        "faster_with_other_samples": [of.alternative.key for of in verdict.faster],
        "speedup": [verdict.low, verdict.speedup, verdict.high],
        "levers": [{"of": lever.name, "speedup": [lever.low, lever.high]} for lever in moved],
        "source": source.description,
        "bad_rows": source.samples.bad_rows,
        "ranks": setting.num_ranks,
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
                **_figures(result, verdict.now, setting, memory, source.num_samples),
            }
            for result in results
        ],
        "topologies": [topologies.as_dict(option) for option in ranking],
    }


def _write_report(
    args: argparse.Namespace, source: _Source, draw: Draw, memory: MemoryModel, results: Sequence[Result],
    verdict: Verdict,
) -> None:  # fmt: skip
    from knapformer.tools.doctor.page import write_page

    setting = draw.setting
    figures = [_figures(result, verdict.now, setting, memory, source.num_samples) for result in results]
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
        (f"{setting.num_ranks:,}", "ranks"),
        (f"{setting.micro_batches}", "micro-batches of a step"),
    ]
    if verdict.is_worth_it and verdict.now.problem is None:
        top.insert(0, (f"{verdict.speedup:.2f} times", f"as fast as {verdict.now.alternative.name}"))
    settings = {
        "lengths": source.description, "ranks": setting.num_ranks, "samples of a micro-batch": setting.batch_size,
        "micro-batches": setting.micro_batches, "width": setting.d_model, "gamma": setting.gamma,
        **{name: value for part in cost_args.settings_dict(setting.cluster, setting.model).values()
           for name, value in part.items()},
    }  # fmt: skip
    write_page(
        args.report, verdict=" ".join(filter(None, (verdict.sentence(), verdict.aside()))),
        rows=[_cells(result, of) for result, of in zip(results, figures, strict=True)], results=results,
        figures=figures, lengths=source.pool, setting=setting,
        limit_gib=memory.gib(setting.max_tokens) if setting.max_tokens else None, efficiency_by_count=by_count,
        subtitle=f"{source.description}; {setting.num_ranks} ranks, {setting.micro_batches} micro-batches",
        top=top, settings=settings,
    )  # fmt: skip


def _print(
    source: _Source, draw: Draw, memory: MemoryModel, results: Sequence[Result], verdict: Verdict,
    moved: Sequence[Lever], ranking: Sequence[TopologyOption],
) -> None:  # fmt: skip
    lens, setting = source.pool, draw.setting
    rows = [_cells(r, _figures(r, verdict.now, setting, memory, source.num_samples)) for r in results]
    hours = f"of the {source.num_samples:,} samples" if source.num_samples else "of a million samples"
    parts: list[Any] = [verdict.sentence()]
    if verdict.is_worth_it:
        parts.append(f"What to change: {verdict.taken.alternative.change}.")
    if (aside := verdict.aside()) is not None:
        parts.append(aside)
    if source.samples.bad_rows:
        parts.append(f"Rows left out: {source.samples.bad_rows:,}; the first: {source.samples.first_bad}.")
    parts += [
        "",
        table_of(rows, left="alternative"),
        f"speed: times {verdict.now.alternative.name}, on equal work, with the standard error over draws.\n"
        f"hours: of one accelerator, {hours}.\n"
        "wait: of computing time, for the slowest rank or on padding.\n"
        "GB: that a rank sends in a step, in its node / to others. GiB: of the fullest rank.",
    ]
    parts += [f"{r.alternative.name} {setting.too_much}: {r.problem}." for r in results if r.problem is not None]
    of_drawn = statistics.fmean(sum(map(len, step)) for step in draw.steps) or 1
    for result in results:
        if result.alternative.effect and result.problem is None:
            ratio = result.mean(lambda step: step.samples) / of_drawn
            more = "" if 0.99 < ratio < 1.01 else f" (here {ratio:.2g} times as many samples)"
            parts.append(f"{result.alternative.name}: {result.alternative.effect}{more}.")
    if moved:
        parts += ["", f"What would change the gain of {moved[0].taken} most:"]
        parts += [f"  {lever.name}: {lever.low:.2f} or {lever.high:.2f} times as fast" for lever in moved]
    if ranking:
        parts += ["", *topologies.table(ranking)]
    cluster = setting.cluster
    limit = f"{setting.max_tokens:,} tokens of a rank fit" if setting.max_tokens else "memory is not limited"
    if setting.limit_is_given:
        limit = f"at most {setting.max_tokens:,} tokens of a rank (--max-tokens-per-rank)"
    parts += [
        "",
        f"Assumed: {source.description}, median {statistics.median(lens):,.0f} tokens, longest {max(lens):,}; "
        f"{setting.num_ranks} ranks in nodes of {cluster.ranks_per_node}, {_digits(setting.batch_size)} samples x "
        f"{setting.micro_batches} micro-batches each; {setting.model.num_blocks} blocks of width {setting.d_model}, "
        f"{setting.model.mode}; gamma {setting.gamma:g}, {cluster.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{cluster.node_bytes_per_s / 1e9:g} and {cluster.network_bytes_per_s / 1e9:g} GB/s, fixed {cluster.fixed_s:g} "
        f"s a micro-batch; {limit}. FSDP2: ranks wait in every micro-batch.",
    ]
    show(*parts)


def _cells(result: Result, figures: Mapping[str, Any]) -> dict[str, str]:
    headings = ("step s", "speed", "hours", "wait", "GB", "GiB")
    if result.problem is not None:
        return {"alternative": result.alternative.name, **dict.fromkeys(headings, "-")}
    speed = "-" if figures["speedup"] is None else f"{figures['speedup']:.2f}"
    if figures["speedup_standard_error"]:
        speed += f" ± {figures['speedup_standard_error']:.2f}"
    sent = "/".join(_two_digits(figures[f"gb_{where}_per_rank"]) for where in ("in_node", "between_nodes"))
    values = (
        _digits(figures["step_s"]), speed, _digits(figures["device_hours"]), f"{figures['waiting']:.0%}", sent,
        f"{figures['max_gib']:.0f}",
    )  # fmt: skip
    return {"alternative": result.alternative.name, **dict(zip(headings, values, strict=True))}


def _digits(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
