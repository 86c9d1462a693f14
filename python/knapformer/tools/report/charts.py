"""The report's charts, as plotly figures; of several, by their captions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from knapformer import Plan, StepPlan, StepTime, predict_step
from knapformer.tools.report.html_page import rows_of
from knapformer.tools.report.placement import MAX_RANKS, Bars

# Legible on light and dark grounds, and without colour vision (Okabe and Ito).
BEFORE, AFTER = "#E69F00", "#2b8cd6"
_TERM_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#F0E442", "#009E73", "#999999")
_LINE_COLOURS = (BEFORE, AFTER, "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# Viridis without its darkest part, which is invisible on a dark ground.
_LENGTH_COLOURS = ["#3e4c8a", "#2a788e", "#22a884", "#7ad151", "#fde725"]
_BAR = {"orientation": "h", "thickness": 12}
_MAX_TICKS = 8  # more leave no room for one at each bar or cell


def work_per_rank(plan: Plan) -> go.Figure:
    """Bars in rank order; lines in descending order of work where there are too many ranks for bars."""
    mean = statistics.fmean(plan.workload_before) or 1.0
    in_order = plan.num_ranks <= MAX_RANKS
    figure = go.Figure()
    for name, work, tokens, colour in (
        ("before", plan.workload_before, plan.tokens_before, BEFORE),
        ("after", plan.workload_after, plan.tokens_after, AFTER),
    ):
        ranks = np.arange(plan.num_ranks) if in_order else np.argsort(-np.array(work), kind="stable")
        shared = {
            "x": np.arange(plan.num_ranks),
            "y": np.array(work)[ranks] / mean,
            "name": name,
            "customdata": np.stack([ranks, np.array(tokens)[ranks]], axis=1),
            "hovertemplate": "rank %{customdata[0]}: %{y:.3f} of the mean<br>%{customdata[1]:,} tokens",
        }
        if in_order:
            figure.add_bar(**shared, marker_color=colour, marker_line_width=0)
        else:
            figure.add_scatter(**shared, mode="lines", line={"shape": "hvh", "width": 1.5, "color": colour})
    figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": "#888888"})
    figure.update_layout(bargap=0.15, bargroupgap=0)
    figure.update_xaxes(title="rank" if in_order else "ranks, in descending order of work")
    figure.update_yaxes(title="work over the mean", rangemode="tozero")
    return figure


def work_per_micro_batch(step: StepPlan) -> go.Figure:
    """A cell for each rank and micro-batch."""
    work = np.array([plan.workload_after for plan in step.plans])
    figure = go.Figure()
    figure.add_heatmap(
        z=work / (work.mean() or 1.0), colorscale=_LENGTH_COLOURS, zmin=0,
        colorbar=_BAR | {"title": "over the mean"},
        hovertemplate="rank %{x}, micro-batch %{y}: %{z:.3f} of the mean<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="rank")
    figure.update_yaxes(title="micro-batch", autorange="reversed", dtick=max(1, step.num_micro_batches // 8))
    return figure


def placement(bars: Bars, plan: Plan) -> go.Figure:
    """Bars before above bars after: one for each rank, cut into its sequences, coloured by their length."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07,
        subplot_titles=("before: every sequence at home", f"after: {plan.topology}, {plan.solver}"),
    )  # fmt: skip
    lengths = [segment.seq_len for segment in bars.before] or [1]
    low, high = np.log10(min(lengths)), np.log10(max(lengths))
    high = max(high, low + 0.1)
    ticks = np.linspace(low, high, 5)
    scale, unit = scale_of(max(plan.workload_before), "FLOP")
    for row, segments in enumerate((bars.before, bars.after), start=1):
        figure.add_bar(
            x=[segment.rank for segment in segments], y=[segment.work / scale for segment in segments],
            hovertext=[s.hover for s in segments],
            text=["" if s.sequence is None else str(s.sequence) for s in segments],
            textposition="inside", insidetextanchor="middle", textangle=0,
            hovertemplate="%{hovertext}<extra>rank %{x}</extra>", width=0.8, row=row, col=1,
            marker={
                "color": np.log10([segment.seq_len for segment in segments]), "coloraxis": "coloraxis",
                "line": {"width": 0.5, "color": "rgba(255,255,255,0.4)"},
            },
        )  # fmt: skip
    for boundary in _bag_boundaries(plan):
        figure.add_vline(x=boundary - 0.5, line={"width": 1, "dash": "dot", "color": "#888888"}, row=2, col=1)
    figure.update_layout(
        barmode="stack",
        bargap=0.1,
        margin_t=24,  # for the first title
        uniformtext={"mode": "hide", "minsize": 9},  # numbers that find no room
        coloraxis={
            "colorscale": _LENGTH_COLOURS, "cmin": low, "cmax": high,
            "colorbar": _BAR | {
                "title": {"text": "tokens of the sequence", "side": "bottom"}, "y": -0.1, "yanchor": "top",
                "xpad": 30, "ticklabeloverflow": "allow", "tickvals": ticks,
                "ticktext": [f"{10**t:,.0f}" for t in ticks],
            },
        },
    )  # fmt: skip
    figure.update_yaxes(title=f"work, {unit} a block")
    figure.update_xaxes(title="rank", row=2, col=1)
    return figure


def _terms(times: Iterable[StepTime]) -> Iterator[tuple[list[float], dict[str, Any]]]:
    """Seconds of each term that is not nothing throughout, and how its bars look."""
    times = list(times)
    for (term, label), colour in zip(StepTime.labels().items(), itertools.cycle(_TERM_COLOURS), strict=False):
        seconds = [step.terms[term] for step in times]
        if any(seconds):
            yield seconds, {"name": label, "marker_color": colour, "marker_line_width": 0}


def step_times(predicted: Mapping[str, StepTime], measured_s: Mapping[str, Sequence[float]]) -> go.Figure:
    figure = go.Figure()
    places = rows_of(figure, [*predicted, *(f"{name}, measured" for name in measured_s)])
    for seconds, look in _terms(predicted.values()):
        figure.add_bar(
            y=places[: len(seconds)], x=seconds, orientation="h", width=20,
            hovertemplate=f"{look['name']}: %{{x:.4f}} s<extra></extra>", **look,
        )  # fmt: skip
    for place, seconds_of in zip(places[len(predicted) :], measured_s.values(), strict=True):
        figure.add_box(
            x=list(seconds_of), y0=place, orientation="h", width=20, marker_color=AFTER,
            boxpoints="all" if len(seconds_of) <= 200 else "outliers",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="seconds a step, forward and backward", rangemode="tozero")
    return figure


def micro_batch_times(step: StepPlan) -> go.Figure:
    figure = go.Figure()
    for seconds, look in _terms(predict_step(plan) for plan in step.plans):
        figure.add_bar(
            y=seconds, hovertemplate=f"micro-batch %{{x}}, {look['name']}: %{{y:.4f}} s<extra></extra>", **look
        )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_xaxes(title="micro-batch", dtick=1 if step.num_micro_batches <= _MAX_TICKS else None)
    figure.update_yaxes(title="seconds, forward and backward")
    return figure


def scaling(points: Sequence[Mapping[str, Any]]) -> dict[str, go.Figure]:
    """points: of a file of predictions; of each topology, as asked for, a line."""
    figures = {}
    ticks = sorted({point["num_ranks"] for point in points})
    for caption, value in (
        ("step, s", lambda p: p["total_s"]),
        ("efficiency, %", lambda p: 100 * p["efficiency"]),
        ("GB that a rank sends in a step", lambda p: (p["route_bytes"] + p["attention_bytes"]) / p["num_ranks"] / 1e9),
    ):
        figure = figures[caption] = go.Figure()
        names = dict.fromkeys(point["asked"] for point in points)
        for colour, name in zip(itertools.cycle(_LINE_COLOURS), names, strict=False):
            line = [point for point in points if point["asked"] == name]
            figure.add_scatter(
                x=[point["num_ranks"] for point in line], y=list(map(value, line)), name=name, mode="lines+markers",
                line={"color": colour}, hovertemplate="%{x:,} ranks: %{y:.4g}",
            )  # fmt: skip
        figure.update_xaxes(type="log", title="ranks", tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
        figure.update_yaxes(rangemode="tozero")
    return figures


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """The divisor and the unit with which to show a number: (1e9, "GB") for some billions of "B"."""
    for exponent, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return 10.0**exponent, prefix + unit
    return 1.0, unit


def _bag_boundaries(plan: Plan) -> list[int]:
    firsts = [ranks[0] for ranks in plan.topology.bags]
    return [rank for rank in sorted(firsts)[1:] if rank < MAX_RANKS] if len(firsts) < plan.num_ranks else []
