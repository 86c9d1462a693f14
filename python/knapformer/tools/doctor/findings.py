"""What was found: the printed text, and the JSON file."""

from __future__ import annotations

import argparse
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from knapformer.tools.doctor.alternatives import Result, gain
from knapformer.tools.doctor.code_to_write import code_of
from knapformer.tools.doctor.memory import MemoryModel
from knapformer.tools.doctor.verdict import Verdict
from knapformer.tools.draws import Source
from knapformer.tools.files import show, table_of
from knapformer.tools.model_presets import DEFAULT_PRESET, Preset
from knapformer.tools.rank_lengths import has_masks
from knapformer.tools.settings import assumed, settings_dict
from knapformer.tools.ways import DrawnSteps, heads_text

_HEADINGS = ("step s", "speed", "hours", "wait", "GB", "GiB")


@dataclass(frozen=True)
class Findings:
    args: argparse.Namespace
    source: Source
    preset: Preset
    draw: DrawnSteps
    memory: MemoryModel
    results: Sequence[Result]
    verdict: Verdict

    @cached_property
    def verdict_text(self) -> str:
        """One paragraph. What makes it doubtful comes first."""
        samples = self.source.samples
        caution = f"Caution: {samples.left_out()} What follows is of the others alone. "
        return caution + self.verdict.text if samples.many_left_out else self.verdict.text

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        """Of each result, per optimizer step, in the mean."""
        return [self._figures_of(result) for result in self.results]

    def _figures_of(self, result: Result) -> dict[str, Any]:
        if result.problem is not None:
            return {"problem": result.problem}
        seconds, samples, num_ranks = result.mean("total_s"), result.mean("samples"), self.draw.num_ranks
        speed_up, error = gain(result, self.verdict.now) if self.verdict.now.problem is None else (None, math.nan)
        between = result.mean("route_bytes_between_nodes", "attention_bytes_between_nodes")
        return {
            "step_s": seconds,
            "speed_up": speed_up,
            "speed_up_standard_error": error if math.isfinite(error) else None,
            "samples_per_s": samples / seconds,
            "tokens_per_s": result.mean("tokens") / seconds,
            "device_hours": (self.source.num_samples or 10**6) / samples * seconds * num_ranks / 3600,
            "efficiency": result.efficiency,
            "waiting": result.waiting,
            "gb_in_node_per_rank": (result.mean("route_bytes", "attention_bytes") - between) / num_ranks / 1e9,
            "gb_between_nodes_per_rank": between / num_ranks / 1e9,
            "max_tokens": result.max_tokens,
            "max_gib": self.memory.gib(result.max_tokens),
        }

    def to_dict(self) -> dict[str, Any]:
        source, draw, verdict, planning = self.source, self.draw, self.verdict, self.draw.planning
        return {
            "format": "knapformer.diagnosis",
            "version": 3,
            "verdict": self.verdict_text,
            "take": verdict.taken.alternative.key if verdict.is_worth_it else None,
            "now": verdict.now.alternative.key,
            "speed_up": [verdict.low, verdict.speed_up, verdict.high],
            "source": source.description,
            "rows": source.samples.num_rows,
            "bad_rows": source.samples.bad_rows,
            "model_name": self.preset.name,
            "ranks": source.num_ranks,
            "batch_size": draw.batch_size,
            "micro_batches": draw.micro_batches,
            "steps": len(draw.batches),
            "seed": draw.seed,
            "d_model": planning.d_model,
            "gamma": planning.gamma,
            "mask": planning.mask,
            "max_tokens_per_rank": draw.max_tokens_per_rank or None,
            **settings_dict(planning),
            "alternatives": [
                {"key": of.alternative.key, "change": of.alternative.change, "effect": of.alternative.effect, **row}
                for of, row in zip(self.results, self.figures, strict=True)
            ],
        }

    def print(self) -> None:
        source, verdict, lens = self.source, self.verdict, self.source.pool
        samples = f"the {source.num_samples:,} samples" if source.num_samples else "a million samples"
        names = (result.alternative.name for result in self.results)
        rows = ({"alternative": name, **_cells(of)} for name, of in zip(names, self.figures, strict=True))
        parts: list[Any] = [self.verdict_text]
        taken = verdict.taken.alternative
        if verdict.is_worth_it:
            parts.append(f"What to change: {taken.change}.")
            parts += filter(None, [textwrap.indent(code_of(taken, self.draw, self.preset), "    ")])
        heads = heads_text(self.draw, next(taken.steps(self.draw)).plan) if taken.topology else ""
        parts += filter(None, [heads, "" if source.samples.many_left_out else source.samples.left_out()])
        parts += [
            f"Samples: {source.description}, median {statistics.median(lens):,.0f} tokens, longest {max(lens):,}.",
            "",
            table_of(rows, left="alternative"),
            f"speed: times as fast as {verdict.now.alternative.name}, for equal work, and the standard error over the "
            "drawn steps.\n"
            f"hours: what {samples} take on one accelerator.\n"
            "wait: the share of its time in which a rank waits for the slowest one, or computes padding.\n"
            "GB: what a rank sends in a step, inside its node / to other nodes. GiB: memory of the fullest rank.\n"
            "sequence parallel N, static ring N, Ulysses x ring N: groups of N ranks share all samples that they draw, "
            "by heads, by queries, or by both.\n"
            "BalancedBatchSampler: samples stay whole; all micro-batches of a step are planned at once, and nothing is "
            "sent.\n"
            "balancer, 1-N ranks: in the model, up to N ranks share a long sample. balancer, N ranks: N ranks share "
            "every sample.",
        ]
        parts += [f"{r.alternative.name} does not fit: {r.problem}." for r in self.results if r.problem is not None]
        fitting = [result.alternative for result in self.results if result.problem is None]
        parts += [f"{of.name}: {of.effect}." for of in fitting if of.effect]
        show(*parts, "", *self._assumed())

    def _assumed(self) -> list[str]:
        source, draw, preset = self.source, self.draw, self.preset
        default = ", the default of --model" if preset.name == DEFAULT_PRESET else ""
        masks = f"{draw.planning.mask}, where samples have none" if has_masks([source.pool]) else draw.planning.mask
        return [
            assumed(self.args, draw.planning, draw.max_tokens_per_rank),
            f"Model: {preset.name}{default}, of width {draw.planning.d_model}, mask {masks}. {len(draw.batches)} steps "
            f"of {source.num_ranks:,} ranks are simulated, of {draw.micro_batches} micro-batches of "
            f"{digits(draw.batch_size)} samples a rank; ranks wait for each other in every one, as under FSDP2.",
        ]


def _cells(figures: Mapping[str, Any]) -> dict[str, str]:
    if "problem" in figures:
        return dict.fromkeys(_HEADINGS, "-")
    speed = "-" if figures["speed_up"] is None else f"{figures['speed_up']:.2f}"
    if figures["speed_up_standard_error"]:
        speed += f" ± {figures['speed_up_standard_error']:.2f}"
    sent = (figures[f"gb_{where}_per_rank"] for where in ("in_node", "between_nodes"))
    values = (
        digits(figures["step_s"]), speed, digits(figures["device_hours"]), f"{figures['waiting']:.0%}",
        "/".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in sent), f"{figures['max_gib']:.0f}",
    )  # fmt: skip
    return dict(zip(_HEADINGS, values, strict=True))


def digits(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
