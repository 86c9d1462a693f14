"""What `knapformer plan` prints: every rank of a plan, every micro-batch of a step, predictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from knapformer import Plan, StepPlan
from knapformer.tools.files import show, table_of, text_or
from knapformer.tools.ways import PLANNED_STEP

_MAX_TABLE_RANKS = 64  # of more no table is printed


def print_step_plan(step: StepPlan, took: str) -> None:
    first = step.plans[0]
    over_ideal, gap = step.predicted_time / step.ideal_time - 1, max(step.gap, 0)
    parts = [
        _cells_of_part(
            str(k), plan, [plan], predicted_s, plan.num_sequences,
            plan.attention_tokens_moved / max(plan.num_tokens, 1),
        )
        for k, (plan, predicted_s) in enumerate(zip(step.plans, step.predicted_times, strict=True))
    ]  # fmt: skip
    sequences, exchanged = len(step.micro_batches), step.exchanged_fraction
    whole = _cells_of_part("step", step, step.plans, step.predicted_time, sequences, exchanged)
    show(
        f"{first.topology}, {first.num_ranks} ranks, {step.num_micro_batches} micro-batches, "
        f"{len(step.micro_batches):,} sequences, {step.num_tokens:,} tokens, {took}",
        table_of([*parts, whole], keys=("part",)),
        "Part: a micro-batch, or the whole step. Longest, fullest: work and tokens of a rank over the mean rank of a "
        "micro-batch. Exchanged: of the tokens, in each all-to-all of attention. Moved: held by another rank than drew "
        "it.",
        f"Predicted: {step.predicted_time:.4g} s a step, {over_ideal:.2%} over ideal and at most {gap:.2%} over the "
        f"best plan of this topology. Ranks wait for each other "
        f"{'in every micro-batch' if step.sync == 'micro_batch' else 'once a step'}.",
    )


def _cells_of_part(
    part: str, of: Plan | StepPlan, plans: Sequence[Plan], predicted_s: float, num_sequences: int, exchanged: float
) -> dict[str, str]:
    """plans: of the part, whose work and tokens are over those of the mean rank of a micro-batch."""
    num_ranks, tokens = plans[0].num_ranks, max(of.num_tokens, 1)
    highest = math.fsum(max(plan.workload_after) for plan in plans)
    mean = math.fsum(math.fsum(plan.workload_after) for plan in plans) / num_ranks
    return {
        "part": part,
        "predicted s": f"{predicted_s:.4g}",
        "longest": f"{highest / mean:.4f}" if mean else "-",
        "fullest": f"{of.max_tokens * num_ranks * len(plans) / tokens:.2f}",
        "max tokens": f"{of.max_tokens:,}",
        "sequences": f"{num_sequences:,}",
        "tokens": f"{of.num_tokens:,}",
        "exchanged": f"{exchanged:.1%}",
        "moved": f"{of.tokens_moved / tokens:.1%}",
    }


def print_plan(plan: Plan, took: str) -> None:
    whole = f"{plan.topology}, {plan.num_ranks} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens"
    work = "Work: of a rank over the mean; ->: after balancing. A chunk: what a rank holds of a sequence."
    ranks: list[str | Group] = [_rank_table(plan), work] if plan.num_ranks <= _MAX_TABLE_RANKS else []
    show(f"{whole}, {took}", *ranks, _plan_sentence(plan))


def _rank_table(plan: Plan) -> Group:
    columns = _columns(plan)
    return table_of(
        (
            {"rank": str(rank), "bag": str(bag), **{name: _cell(values[rank]) for name, values in columns.items()}}
            for bag, ranks in enumerate(plan.topology.bags)
            for rank in ranks
        ),
        keys=("rank", "bag"),
    )


def _columns(plan: Plan) -> dict[str, Sequence[float]]:
    """Values of all ranks, by heading."""
    mean = statistics.fmean(plan.workload_before) or 1.0
    return {
        "sequences": [len(lens) for lens in plan.seq_lens],
        "tokens": plan.tokens_before,
        "work": [work / mean for work in plan.workload_before],
        "-> chunks": [len(lens) for lens in plan.chunk_lens],
        "-> tokens": plan.tokens_after,
        "-> work": [work / mean for work in plan.workload_after],
    }


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _plan_sentence(plan: Plan) -> str:
    if plan.num_tokens == 0:
        return "No sequences: nothing to balance."
    gain = plan.max_over_mean_before / plan.max_over_mean_after
    over_ideal, fullest = plan.predicted_time / plan.ideal_time - 1, plan.max_tokens * plan.num_ranks / plan.num_tokens
    return (
        f"Highest over lowest work of a rank: {plan.wir_before:.2f} before, {plan.wir_after:.2f} after. The slowest "
        f"rank has {gain:.2f} times less to compute; {plan.tokens_moved / plan.num_tokens:.1%} of the tokens move.\n"
        f"Predicted: {plan.predicted_time:.4g} s a step, {over_ideal:.1%} over ideal and at most "
        f"{max(plan.gap, 0):.1%} over the best plan of this topology. In attention "
        f"{plan.attention_tokens_moved / plan.num_tokens:.1%} of the tokens are exchanged; the fullest rank "
        f"holds {plan.max_tokens:,}, {fullest:.2f} times the mean."
    )


def print_points(points: Sequence[Mapping[str, Any]], num_steps: int) -> None:
    unbalanced_s = {point["num_ranks"]: point["total_s"] for point in points if point["topology"] == "none"}
    different = {(point["num_ranks"], point["topology"]): point for point in points}.values()
    mean = f", means over {num_steps} steps" if num_steps > 1 else ""
    groups = {
        f"Predicted seconds of a step{mean}: forward and backward pass (docs/cluster_model.md).": _seconds_cells,
        "Efficiency: the work alone over all of the step. HFU (hardware FLOPs utilization): FLOPs computed, recomputed "
        "ones too, over the device's peak. WIR (workload imbalance ratio): highest over lowest work of a rank. Peak: "
        "tokens of the fullest rank.": _use_cells,
        "GB that a rank sends in a step; off node: of route and attention. Plan ms: on this machine.": _sent_cells,
    }
    tables = [
        table_of(
            ({**_keys(point), **cells(point, unbalanced_s[point["num_ranks"]])} for point in different),
            left="topology",
            keys=("ranks", "topology"),
            caption=caption,
        )
        for caption, cells in groups.items()
    ]
    whole = any(point["topology"].startswith(PLANNED_STEP) for point in different)
    title = PLANNED_STEP.capitalize()
    text = f"{title}: all micro-batches at once, of the topology above, without route: ranks load what they compute."
    show(*tables, *([text] if whole else []))


def _keys(point: Mapping[str, Any]) -> dict[str, str]:
    # The row of steps planned whole stands below that of their topology.
    topology = f"  {PLANNED_STEP}" if point["topology"].startswith(PLANNED_STEP) else point["topology"]
    return {"ranks": f"{point['num_ranks']:,}", "topology": topology}


def _seconds_cells(point: Mapping[str, Any], unbalanced_s: float) -> dict[str, str]:
    rest_s = point["route_s"] + point["fsdp_s"] + point["host_s"] + point["fixed_s"]
    return {
        "step s": f"{point['total_s']:.3f}",
        "speed-up": f"{unbalanced_s / point['total_s']:.2f}",
        "compute": f"{point['token_s'] + point['attention_s']:.3f}",
        "exchange": f"{point['exchange_s']:.3f}",
        "rest": f"{rest_s:.3f}",
    }


def _use_cells(point: Mapping[str, Any], unbalanced_s: float) -> dict[str, str]:
    return {
        "efficiency": f"{point['efficiency']:.1%}",
        "HFU": text_or(point["hfu"], ".1%", "-"),
        "WIR": f"{point['wir']:.2f}",
        "M tok/s": f"{point['tokens_per_s'] / 1e6:.3f}",
        "peak": f"{point['max_tokens_per_rank']:,.0f}",
    }


def milliseconds(seconds: float) -> str:
    """Three digits, and none of an exponent."""
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}"


def _sent_cells(point: Mapping[str, Any], unbalanced_s: float) -> dict[str, str]:
    gb_of_all_ranks = point["num_ranks"] * 1e9
    between_bytes = point["route_bytes_between_nodes"] + point["attention_bytes_between_nodes"]
    return {
        "route": f"{point['route_bytes'] / gb_of_all_ranks:.2f}",
        "attention": f"{point['attention_bytes'] / gb_of_all_ranks:.2f}",
        "off node": f"{between_bytes / gb_of_all_ranks:.2f}",
        "FSDP": f"{point['fsdp_bytes'] / gb_of_all_ranks:.1f}",
        "plan ms": milliseconds(point["plan_s"]),
    }
