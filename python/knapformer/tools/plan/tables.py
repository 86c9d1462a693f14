"""What `knapformer plan` prints: of a plan, and of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from knapformer import Plan
from knapformer.tools.files import cells_of, show, table_of
from knapformer.tools.ways import PLANNED_STEP

_KEYS = {"ranks": "num_ranks:,", "topology": "topology:"}
_POINT = {
    "step s": "total_s:.3f", "speed-up": "speed_up:.2f", "compute": "compute_s:.3f", "exchange": "exchange_s:.3f",
    "rest": "rest_s:.3f", "efficiency": "efficiency:.1%", "HFU": "hfu:.1%", "WIR": "wir:.2f:inf",
    "M tok/s": "m_tokens_per_s:.3f", "peak": "max_tokens_per_rank:,.0f", "GB": "sent_gb:.2f",
    "off node": "between_gb:.2f", "FSDP": "fsdp_gb:.1f", "plan ms": "plan_ms:,.2f",
}  # fmt: skip


def print_made(plan: Plan, took: str) -> None:
    """took: how the plan was made."""
    parts = f"{plan.num_micro_batches} micro-batches, " if plan.num_micro_batches > 1 else ""
    size = f"{plan.num_ranks} ranks, {parts}{plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens"
    show(f"{plan.topology}, {size}, {took}", _plan_text(plan))


def _plan_text(plan: Plan) -> str:
    if plan.num_tokens == 0:
        return "No sequences: nothing to balance."
    over_ideal, gap = plan.predicted_time / plan.ideal_time - 1, max(plan.gap, 0)
    moved = plan.tokens_moved / plan.num_tokens
    predicted = (
        f"Predicted: {plan.predicted_time:.4g} s a step, {over_ideal:.2%} over ideal and at most {gap:.2%} "
        f"over the best plan of this topology. In attention {plan.exchanged_fraction:.1%} of the tokens are exchanged"
    )
    if plan.num_micro_batches > 1:
        wait = "in every micro-batch" if plan.sync == "micro_batch" else "once a step"
        return f"{predicted}; {moved:.1%} are held by another rank than drew them. Ranks wait for each other {wait}."
    gain = plan.max_over_mean_before / plan.max_over_mean_after
    fullest = plan.max_tokens * plan.num_ranks / plan.num_tokens
    return (
        f"Highest over lowest work of a rank: {plan.wir_before:.2f} before, {plan.wir_after:.2f} after. The slowest "
        f"rank has {gain:.2f} times less to compute; {moved:.1%} of the tokens move.\n{predicted}; the fullest rank "
        f"holds {plan.max_tokens:,}, {fullest:.2f} times the mean."
    )


def print_points(points: Sequence[Mapping[str, Any]], num_steps: int) -> None:
    unbalanced_s = {point["num_ranks"]: point["total_s"] for point in points if point["topology"] == "none"}
    mean = f", means over {num_steps} steps" if num_steps > 1 else ""
    rows = [_row(point, unbalanced_s[point["num_ranks"]]) for point in points]
    caption = (
        f"Predicted seconds of a step{mean}: forward and backward pass (docs/cluster_model.md). Efficiency: the work "
        "alone over all of the step. HFU (hardware FLOPs utilization): FLOPs computed, recomputed ones too, over the "
        "device's peak. WIR (workload imbalance ratio): highest over lowest work of a rank. Peak: tokens of the "
        "fullest rank. GB, FSDP: gigabytes that a rank sends in a step; off node: of GB. Plan ms: on this machine."
    )
    table = table_of(
        (cells_of(row, _KEYS | _POINT) for row in rows), left="topology", keys=tuple(_KEYS), caption=caption
    )
    whole = any(point["topology"].startswith(PLANNED_STEP) for point in points)
    title = PLANNED_STEP.capitalize()
    text = f"{title}: all micro-batches at once, of the topology above, without route: ranks load what they compute."
    show(table, *([text] if whole else []))


def _row(point: Mapping[str, Any], unbalanced_s: float) -> dict[str, Any]:
    # The row of steps planned whole stands below that of their topology.
    is_whole, gb_of_all_ranks = point["topology"].startswith(PLANNED_STEP), point["num_ranks"] * 1e9
    return {
        **point,
        "topology": f"  {PLANNED_STEP}" if is_whole else point["topology"],
        "speed_up": unbalanced_s / point["total_s"],
        "compute_s": point["token_s"] + point["attention_s"],
        "rest_s": point["route_s"] + point["fsdp_s"] + point["host_s"] + point["fixed_s"],
        "m_tokens_per_s": point["tokens_per_s"] / 1e6,
        "sent_gb": (point["route_bytes"] + point["attention_bytes"]) / gb_of_all_ranks,
        "between_gb": (point["route_bytes_between_nodes"] + point["attention_bytes_between_nodes"]) / gb_of_all_ranks,
        "fsdp_gb": point["fsdp_bytes"] / gb_of_all_ranks,
        "plan_ms": point["plan_s"] * 1e3,
    }
