"""The doctor's findings as an HTML file: lengths, one step of each alternative."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import plotly.graph_objects as go

from knapformer import Plan, predict_step
from knapformer.tools.doctor.alternatives import Case, Result
from knapformer.tools.doctor.source import Source
from knapformer.tools.doctor.text import verdict_text
from knapformer.tools.doctor.verdict import Verdict
from knapformer.tools.presets import Preset
from knapformer.tools.report.html_page import HtmlPage, rows_of
from knapformer.tools.ways import Planning

# Okabe and Ito: legible on light and dark grounds, and without colour vision.
_COLOURS = {"computing": "#2b8cd6", "exchanging": "#E69F00", "waiting": "#999999", "the rest": "#CC79A7"}
_MAX_RANKS = 64  # only the first ranks are drawn in a step's picture
_NUM_BINS = 40
_T = TypeVar("_T")
_Had = Sequence[tuple[Result, Mapping[str, Any]]]  # alternatives that are possible, and their figures


def write_page(
    path: str, source: Source, preset: Preset, case: Case, rows: Sequence[Mapping[str, str]],
    results: Sequence[Result], figures: Sequence[Mapping[str, Any]], verdict: Verdict,
) -> None:  # fmt: skip
    """rows: the printed table. figures: one for each result. Raises OSError."""
    page = HtmlPage()
    had = [(result, of) for result, of in zip(results, figures, strict=True) if result.problem is None]
    cells = _alike(((row["alternative"], row) for row in rows), lambda row: tuple(row.values())[1:])
    alternatives = [{**row, "alternative": names} for names, row in cells.items()]
    page.add_table("Alternatives", "Per optimizer step, in the mean; predicted.", alternatives)
    if had:
        text = "On equal work; the bars' ends: twice the standard error over the drawn steps."
        page.add("How fast each is", text, _speeds(had))
    text = "Attention's work grows with the square of the length: few long samples can hold most of it."
    page.add("Lengths and work", text, _distribution(source.pool, case.planning), 300)
    if had:
        text = "What each rank does in the first step that was simulated, its micro-batches added up, in % of the step"
        text += f"; the first {_MAX_RANKS} ranks." if case.num_ranks > _MAX_RANKS else "; a bar for each rank."
        page.add("One step", text, _steps(had), 130)
    lens = source.pool
    top = [
        (f"{statistics.median(lens):,.0f} → {max(lens):,}", "tokens of the median and of the longest sample"),
        (f"{source.num_ranks:,}", "ranks"),
        (f"{case.micro_batches}", "micro-batches of a step"),
    ]
    if verdict.is_worth_it and verdict.now.problem is None:
        top.insert(0, (f"{verdict.speedup:.2f} times", f"as fast as {verdict.now.alternative.name}"))
    settings = {
        "lengths": source.description, "model": preset.name, "ranks": source.num_ranks,
        "ranks that are simulated": case.num_ranks, "samples of a micro-batch": case.batch_size,
        "micro-batches": case.micro_batches, "width": case.planning.d_model, "gamma": case.planning.gamma,
        **case.planning.cluster.to_dict(), **case.planning.model.to_dict(),
    }  # fmt: skip
    said = " ".join(filter(None, (verdict_text(verdict, source), verdict.aside())))
    subtitle = f"{source.description}; {source.num_ranks} ranks, {case.micro_batches} micro-batches"
    page.write(path, said, html.escape(subtitle), top, settings)


def _alike(items: Iterable[tuple[str, _T]], shown: Callable[[_T], Hashable]) -> dict[str, _T]:
    """Items by their names, those of which the same is shown as one."""
    groups: dict[Hashable, tuple[list[str], _T]] = {}
    for name, item in items:
        groups.setdefault(shown(item), ([], item))[0].append(name)
    return {"; ".join(names): item for names, item in groups.values()}


def _speeds(had: _Had) -> go.Figure:
    def speed(of: Mapping[str, Any]) -> tuple[float, float]:
        value = of["speedup"] if of["speedup"] is not None else of["efficiency"]
        return value, 2 * (of["speedup_standard_error"] or 0)

    bars = _alike(
        ((result.alternative.name, (*speed(of), result.alternative.ours)) for result, of in had),
        lambda bar: (f"{bar[0]:.2f} {bar[1]:.2f}", bar[2]),
    )
    values, errors, are_ours = zip(*bars.values(), strict=True)
    figure = go.Figure()
    figure.add_bar(
        x=values, y=rows_of(figure, bars), orientation="h", width=20,
        error_x={"array": errors, "thickness": 1.5, "width": 5},
        marker_color=["#2b8cd6" if ours else "#999999" for ours in are_ours],
        text=[f"{value:.2f}" for value in values], textposition="inside", insidetextanchor="start",
        textfont_color="black", customdata=list(bars), hovertemplate="%{customdata}: %{x:.3f}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="times as fast as now", rangemode="tozero")
    return figure


def _distribution(lengths: Sequence[int], planning: Planning) -> go.Figure:
    """Shares of samples, and of their work, by length in bins of equal ratio."""
    values = np.asarray(lengths, dtype=np.float64)
    low, high = values.min(), max(values.max(), 1.12 * values.min())
    edges = np.geomspace(low, high, _NUM_BINS + 1)
    edges[0], edges[-1] = low, high  # exactly, so that no sample is outside
    distinct, places = np.unique(np.asarray(lengths), return_inverse=True)
    work = np.array([planning.work(int(length)) for length in distinct])[places]
    figure = go.Figure()
    for name, weights, colour in (("samples", None, "#E69F00"), ("work", work, "#2b8cd6")):
        share, _ = np.histogram(values, edges, weights=weights)
        figure.add_bar(
            x=np.sqrt(edges[:-1] * edges[1:]), y=100 * share / share.sum(), width=np.diff(edges), opacity=0.7,
            name=name, marker_color=colour, marker_line_width=0, hovertemplate="%{x:,.0f} tokens: %{y:.1f} %",
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    dtick = "D2" if high > 10 * low else None  # 1k, 2k and 5k
    figure.update_xaxes(title="tokens", type="log", tickformat="~s", dtick=dtick)
    figure.update_yaxes(title="% of all")
    return figure


def _shares(plans: Sequence[Plan]) -> dict[str, np.ndarray[Any, Any]]:
    """What each of the first ranks does over all micro-batches, in % of the step."""
    seconds = {name: np.zeros(plans[0].num_ranks) for name in _COLOURS}
    step_s = 0.0
    for plan in plans:
        step, model = predict_step(plan), plan.model
        for passes, of in ((1 + (model.recomputes and model.mode != "inference"), "forward"), (1, "backward")):
            each = [getattr(rank, of) for rank in step.ranks]
            scale = passes * model.num_blocks
            seconds["computing"] += scale * np.array(
                [p.token_s + p.whole_attention_s + p.shared_attention_s for p in each]
            )
            seconds["exchanging"] += scale * np.array([p.pre_attn_s - p.hidden_s + p.post_attn_s for p in each])
        seconds["the rest"] += step.total_s - step.blocks_s
        step_s += step.total_s
    seconds["waiting"] = np.maximum(step_s - sum(seconds.values()), 0)
    return {name: np.round(100 * of[:_MAX_RANKS] / step_s) for name, of in seconds.items()}


def _steps(had: _Had) -> dict[str, go.Figure]:
    figures = {}
    shares = ((result.alternative.name, _shares(result.steps[0].plans)) for result, _ in had)
    for names, of in _alike(shares, lambda of: tuple(map(tuple, of.values()))).items():
        figure = figures[names] = go.Figure()
        for name, percent in of.items():
            figure.add_bar(
                y=percent, name=name, marker_color=_COLOURS[name], marker_line_width=0,
                hovertemplate="rank %{x}: %{y} %",
            )  # fmt: skip
        figure.update_layout(barmode="stack", bargap=0.1)
        figure.update_yaxes(tickvals=[0, 50, 100])
    return figures
