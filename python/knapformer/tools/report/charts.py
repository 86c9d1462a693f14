"""The charts of reports, as plotly figures."""

from __future__ import annotations

import html
import itertools
import statistics
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from knapformer import Plan

MAX_RANKS = 128  # of more no bars are drawn
_MAX_CHUNKS = 5000  # nor of more chunks

# Legible on light and dark grounds, and without colour vision (Okabe and Ito).
BEFORE, AFTER = "#E69F00", "#2b8cd6"
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#F0E442", "#009E73", "#999999", BEFORE)
# Viridis without its darkest part, which is invisible on a dark ground.
_LENGTH_COLOURS = ["#3e4c8a", "#2a788e", "#22a884", "#7ad151", "#fde725"]
_BAR = {"orientation": "h", "thickness": 12}


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


def work_per_micro_batch(step: Plan) -> go.Figure:
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


def num_drawn(plan: Plan) -> int:
    """Of how many ranks, from the first on, `placement` draws the sequences."""
    drawn = itertools.accumulate(map(len, plan.sequences_on))
    return max(1, sum(count <= _MAX_CHUNKS for count in itertools.islice(drawn, MAX_RANKS)))


def placement(plan: Plan) -> go.Figure:
    """Bars before above bars after: one for each of the first ranks, cut into its sequences, coloured by their length,
    the longest first."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07,
        subplot_titles=("before: every sequence at home", f"after: {plan.topology}, {plan.solver}"),
    )  # fmt: skip
    homes = [(home, length) for home, lens in enumerate(plan.seq_lens) for length in lens]
    whole = ((i, home, 0, length) for i, (home, length) in enumerate(homes))
    low, high = np.log10(min(length for _, length in homes)), np.log10(max(length for _, length in homes))
    high = max(high, low + 0.1)
    ticks = np.linspace(low, high, 5)
    scale, unit = scale_of(max(plan.workload_before), "FLOP")
    for row, (chunks, works) in enumerate(((whole, plan.sequence_works), (plan.chunks, plan.chunk_works)), start=1):
        bars = sorted(zip(chunks, works, strict=True), key=lambda bar: -homes[bar[0][0]][1])
        bars = [bar for bar in bars if bar[0][1] < num_drawn(plan)]
        figure.add_bar(
            x=[rank for (_, rank, _, _), _ in bars], y=[work / scale for _, work in bars],
            hovertext=[_of_chunk(plan, homes[of[0]], *of) for of, _ in bars],
            text=[str(sequence) for (sequence, _, _, _), _ in bars],
            textposition="inside", insidetextanchor="middle", textangle=0,
            hovertemplate="%{hovertext}<extra>rank %{x}</extra>", width=0.8, row=row, col=1,
            marker={
                "color": np.log10([homes[sequence][1] for (sequence, _, _, _), _ in bars]), "coloraxis": "coloraxis",
                "line": {"width": 0.5, "color": "rgba(255,255,255,0.4)"},
            },
        )  # fmt: skip
    firsts = [ranks[0] for ranks in plan.topology.bags]
    for boundary in sorted(firsts)[1:] if len(firsts) < plan.num_ranks else []:
        if boundary < num_drawn(plan):
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


def _of_chunk(plan: Plan, of: tuple[int, int], sequence: int, rank: int, first: int, count: int) -> str:
    home, length = of
    lies = f"tokens {first:,} to {first + count - 1:,} ({count:,})" if count < length else "whole"
    stays = " (stays)" if home == rank else ""
    return f"sequence {sequence}<br>{length:,} tokens<br>here: {lies}<br>home: rank {home}{stays}"


def stacked_bars(rows: Mapping[str, Mapping[str, float]], title: str) -> go.Figure:
    """Horizontal bars, each below its name, which is broken into lines and never cut; of parts that have a colour each.
    rows: parts by label, of each bar by its name. Parts that are nothing throughout are left out."""
    figure = go.Figure()
    bottom, places = 0, list[float]()
    for name in rows:
        lines = textwrap.wrap(name, 44)
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=bottom, yanchor="top", text="<br>".join(map(html.escape, lines)),
            align="left", showarrow=False,
        )  # fmt: skip
        bottom += 16 * len(lines) + 30
        places.append(bottom - 18)
    labels = dict.fromkeys(label for parts in rows.values() for label in parts)
    shown = (label for label in labels if any(parts.get(label) for parts in rows.values()))
    for label, colour in zip(shown, itertools.cycle(_COLOURS), strict=False):
        figure.add_bar(
            y=places, x=[parts.get(label, 0.0) for parts in rows.values()], orientation="h", width=20, name=label,
            marker_color=colour, marker_line_width=0, hovertemplate=f"{label}: %{{x:.4g}}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", height=bottom + 60)
    figure.update_xaxes(title=title, rangemode="tozero")
    figure.update_yaxes(range=[bottom, 0], visible=False)
    return figure


def distribution(lengths: Any, work: Any, num_bins: int = 40) -> go.Figure:
    """Shares of samples, and of their work, by length in bins of equal ratio."""
    values, work = np.asarray(lengths, dtype=np.float64), np.asarray(work)
    low, high = values.min(), max(values.max(), 1.12 * values.min())
    edges = np.geomspace(low, high, num_bins + 1)
    edges[0], edges[-1] = low, high  # exactly, so that no sample is outside
    figure = go.Figure()
    for name, weights, colour in (("samples", None, BEFORE), ("work", work, AFTER)):
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


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """The divisor and the unit with which to show a number: (1e9, "GB") for some billions of "B"."""
    for exponent, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return 10.0**exponent, prefix + unit
    return 1.0, unit
