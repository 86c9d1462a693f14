"""Predicted steps over topologies and numbers of ranks: printed, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knapformer.tools import cost_args
from knapformer.tools.files import show, table_of, text_or
from knapformer.tools.plan.scaling import NO_BALANCER, Workload
from knapformer.tools.report import PLANNED_STEP
from knapformer.tools.report.points import Point

_FORMAT = "knapformer.prediction"


def as_dict(workload: Workload, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": 3,
        "mix": None if workload.mix is None else str(workload.mix),
        "d_model": workload.d_model,
        "gamma": workload.gamma,
        "solver": workload.solver,
        "num_steps": workload.num_steps,
        "micro_batches": workload.micro_batches,
        "max_tokens_per_rank": workload.max_tokens_per_rank,
        "seed": workload.seed,
        "peak_tflops": workload.peak_tflops,
        **cost_args.settings_dict(workload.cluster, workload.model),
        "points": [point.as_dict() for point in points],
    }


def print_points(points: Sequence[Point], num_steps: int) -> None:
    unbalanced_s = {point.num_ranks: point.mean["total_s"] for point in points if point.topology == NO_BALANCER}
    different = {(point.num_ranks, point.topology): point for point in points}.values()
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
            ({**_keys(point), **cells(point, unbalanced_s[point.num_ranks])} for point in different),
            left="topology",
            keys=("ranks", "topology"),
            caption=caption,
        )
        for caption, cells in groups.items()
    ]
    whole = any(point.topology.startswith(PLANNED_STEP) for point in different)
    title = PLANNED_STEP.capitalize()
    text = f"{title}: all micro-batches at once, of the topology above, without route: ranks load what they compute."
    show(*tables, *([text] if whole else []))


def _keys(point: Point) -> dict[str, str]:
    # The row of steps planned whole stands below that of their topology.
    topology = f"  {PLANNED_STEP}" if point.topology.startswith(PLANNED_STEP) else point.topology
    return {"ranks": f"{point.num_ranks:,}", "topology": topology}


def _seconds_cells(point: Point, unbalanced_s: float) -> dict[str, str]:
    mean = point.mean
    rest_s = mean["route_s"] + mean["fsdp_s"] + mean["host_s"] + mean["fixed_s"]
    return {
        "step s": f"{mean['total_s']:.3f}",
        "speed-up": f"{unbalanced_s / mean['total_s']:.2f}",
        "compute": f"{mean['token_s'] + mean['attention_s']:.3f}",
        "exchange": f"{mean['exchange_s']:.3f}",
        "rest": f"{rest_s:.3f}",
    }


def _use_cells(point: Point, unbalanced_s: float) -> dict[str, str]:
    mean = point.mean
    return {
        "efficiency": f"{mean['efficiency']:.1%}",
        "HFU": text_or(point.hfu, ".1%", "-"),
        "WIR": f"{mean['wir']:.2f}",
        "M tok/s": f"{mean['tokens_per_s'] / 1e6:.3f}",
        "peak": f"{mean['max_tokens_per_rank']:,.0f}",
    }


def milliseconds(seconds: float) -> str:
    """Three digits, and none of an exponent."""
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}"


def _sent_cells(point: Point, unbalanced_s: float) -> dict[str, str]:
    mean, gb_of_all_ranks = point.mean, point.num_ranks * 1e9
    between_bytes = mean["route_bytes_between_nodes"] + mean["attention_bytes_between_nodes"]
    return {
        "route": f"{mean['route_bytes'] / gb_of_all_ranks:.2f}",
        "attention": f"{mean['attention_bytes'] / gb_of_all_ranks:.2f}",
        "off node": f"{between_bytes / gb_of_all_ranks:.2f}",
        "FSDP": f"{mean['fsdp_bytes'] / gb_of_all_ranks:.1f}",
        "plan ms": milliseconds(point.plan_s),
    }
