"""The doctor's findings as an HTML file: lengths, one step of each alternative, cost against micro-batches, memory."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from knapformer import Plan, predict_step
from knapformer.tools.doctor.alternatives import Result, Setting
from knapformer.tools.report.html_page import HtmlPage

# Okabe and Ito: legible on light and dark grounds, and without colour vision.
_COLOURS = {"computing": "#2b8cd6", "exchanging": "#E69F00", "waiting": "#999999", "the rest": "#CC79A7"}
_LINES = ("#2b8cd6", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
_MAX_RANKS = 64  # only the first ranks are drawn in a step's picture
_NUM_BINS = 40
_Had = Sequence[tuple[Result, Mapping[str, Any]]]  # alternatives that are possible, and their figures


def write_page(
    path: str, *, verdict: str, rows: Sequence[Mapping[str, str]], results: Sequence[Result],
    figures: Sequence[Mapping[str, Any]], lengths: Sequence[int], setting: Setting, limit_gib: float | None,
    efficiency_by_count: Mapping[str, Mapping[int, float]], subtitle: str, top: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
) -> None:  # fmt: skip
    """rows: the printed table. figures: one for each result. efficiency_by_count: by alternative, then by number of
    micro-batches. top: (figure, label) pairs at the top of the page.

    Raises OSError.
    """
    page = HtmlPage()
    had = [(result, of) for result, of in zip(results, figures, strict=True) if result.problem is None]
    page.add_table("Alternatives", "Per optimizer step, in the mean; predicted.", rows)
    if had:
        text = "On equal work; the bars' ends: twice the standard error over the drawn steps."
        page.add("How fast each is", text, _speeds(had), 120 + 32 * len(had))
    text = "Attention's work grows with the square of the length: few long samples can hold most of it."
    page.add("Lengths and work", text, _distribution(lengths, setting), 340)
    if had:
        text = "What each rank does in the first step that was simulated, its micro-batches added up"
        text += f"; the first {_MAX_RANKS} ranks." if setting.num_ranks > _MAX_RANKS else "."
        page.add("One step", text, _steps(had), 110 + 125 * len(had))
        text = "The samples' own work over what a step takes, with other numbers of micro-batches in a step."
        page.add("Micro-batches", text, _by_count(efficiency_by_count), 360)
        text = "Of the fullest rank in any micro-batch; counted, not measured."
        page.add("Memory", text, _memory(had, limit_gib), 120 + 32 * len(had))
    page.write(path, verdict, html.escape(subtitle), top, settings)


def _names(had: _Had) -> list[str]:
    return [result.alternative.name for result, _ in had]


def _speeds(had: _Had) -> go.Figure:
    figure = go.Figure()
    values = [of["speedup"] if of["speedup"] is not None else of["efficiency"] for _, of in had]
    errors = [2 * (of["speedup_standard_error"] or 0) for _, of in had]
    figure.add_bar(
        x=values, y=_names(had), orientation="h", error_x={"array": errors},
        marker_color=["#2b8cd6" if result.alternative.ours else "#999999" for result, _ in had],
        text=[f"{value:.2f}" for value in values], textposition="inside", insidetextanchor="start",
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="times as fast as now", rangemode="tozero")
    return figure


def _distribution(lengths: Sequence[int], setting: Setting) -> go.Figure:
    """Shares of samples, and of their work, by length in bins of equal ratio."""
    values = np.asarray(lengths, dtype=np.float64)
    low, high = values.min(), max(values.max(), 1.12 * values.min())
    edges = np.geomspace(low, high, _NUM_BINS + 1)
    edges[0], edges[-1] = low, high  # exactly, so that no sample is outside
    distinct, places = np.unique(np.asarray(lengths), return_inverse=True)
    work = np.array([setting.work(int(length)) for length in distinct])[places]
    figure = go.Figure()
    for name, weights, colour in (("samples", None, "#E69F00"), ("work", work, "#2b8cd6")):
        share, _ = np.histogram(values, edges, weights=weights)
        figure.add_bar(
            x=np.sqrt(edges[:-1] * edges[1:]), y=100 * share / share.sum(), width=np.diff(edges), opacity=0.7,
            name=name, marker_color=colour, marker_line_width=0, hovertemplate="%{x:,.0f} tokens: %{y:.1f} %",
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title="tokens", type="log")
    figure.update_yaxes(title="% of all")
    return figure


def _seconds(plans: Sequence[Plan]) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each rank over all micro-batches, by what the rank does."""
    total = {name: np.zeros(plans[0].num_ranks) for name in _COLOURS}
    for plan in plans:
        step, model = predict_step(plan), plan.model
        ranks = step.ranks
        for passes, of in ((1 + (model.recomputes and model.mode != "inference"), "forward"), (1, "backward")):
            each = [getattr(rank, of) for rank in ranks]
            scale = passes * model.num_blocks
            total["computing"] += scale * np.array(
                [p.token_s + p.whole_attention_s + p.shared_attention_s for p in each]
            )
            total["exchanging"] += scale * np.array([p.pre_attn_s - p.hidden_s + p.post_attn_s for p in each])
        total["the rest"] += step.total_s - step.blocks_s
        total["waiting"] += step.total_s
    total["waiting"] = np.maximum(
        total["waiting"] - total["computing"] - total["exchanging"] - total["the rest"], 0
    )  # fmt: skip
    return total


def _steps(had: _Had) -> go.Figure:
    figure = make_subplots(rows=len(had), cols=1, shared_xaxes=True, subplot_titles=_names(had), vertical_spacing=0.02)
    for row, (result, _) in enumerate(had, start=1):
        for name, seconds in _seconds(result.steps[0].plans).items():
            figure.add_bar(
                y=seconds[:_MAX_RANKS], name=name, marker_color=_COLOURS[name], marker_line_width=0, row=row, col=1,
                showlegend=row == 1, legendgroup=name, hovertemplate="rank %{x}: %{y:.3g} s",
            )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left")
    figure.update_layout(barmode="stack", bargap=0.1)
    figure.update_yaxes(title="s", nticks=4)
    figure.update_xaxes(title="rank", row=len(had), col=1)
    return figure


def _by_count(efficiency_by_count: Mapping[str, Mapping[int, float]]) -> go.Figure:
    figure = go.Figure()
    for colour, (name, line) in zip(_LINES, efficiency_by_count.items(), strict=False):
        figure.add_scatter(
            x=list(line), y=[100 * value for value in line.values()], name=name, mode="lines+markers",
            line={"color": colour}, hovertemplate="%{x} micro-batches: %{y:.1f} %",
        )  # fmt: skip
    counts = sorted({count for line in efficiency_by_count.values() for count in line})
    figure.update_xaxes(title="micro-batches", type="log", tickvals=counts, ticktext=list(map(str, counts)))
    figure.update_yaxes(title="% of the step", rangemode="tozero")
    return figure


def _memory(had: _Had, limit_gib: float | None) -> go.Figure:
    figure = go.Figure()
    figure.add_bar(
        x=[of["max_gib"] for _, of in had], y=_names(had), orientation="h", marker_color="#009E73",
        customdata=[of["max_tokens"] for _, of in had],
        hovertemplate="%{y}: %{x:.1f} GiB, %{customdata:,} tokens<extra></extra>",
    )  # fmt: skip
    if limit_gib is not None:
        figure.add_vline(x=limit_gib, line={"dash": "dot", "width": 1, "color": "#888888"})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="GiB", rangemode="tozero")
    return figure
