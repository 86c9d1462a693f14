"""The report's charts, as plotly figures. The script in page.html sets colours that must follow the page's theme."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from knapformer import Plan, StepPlan, StepTime
from knapformer.tools.measure.figures import scale_of
from knapformer.tools.report.placement import Bars
from knapformer.tools.report.points import PANELS, Point, lines_of
from knapformer.tools.report.traffic import NodeTraffic, Traffic

# Legible on light and dark grounds, and without colour vision (Okabe and Ito).
BEFORE, AFTER = "#E69F00", "#2b8cd6"
_TERM_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#F0E442", "#009E73", "#999999")
# Viridis without its darkest part, which is invisible on a dark ground.
_LENGTH_COLOURS = ["#3e4c8a", "#2a788e", "#22a884", "#7ad151", "#fde725"]
_MAX_BARS = 128  # more ranks are drawn as lines
_MAX_RANKS_IN_ORDER = 2048
_MAX_LABELLED_BARS = 16  # more leave no room for the sequences' numbers


def work_per_rank(plan: Plan) -> go.Figure:
    """In rank order; in descending order of work where there are more ranks than the picture has columns."""
    mean = statistics.fmean(plan.workload_before) or 1.0
    in_order = plan.num_ranks <= _MAX_RANKS_IN_ORDER
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
        if plan.num_ranks <= _MAX_BARS:
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
        colorbar={"title": "over<br>the mean", "thickness": 12},
        hovertemplate="rank %{x}, micro-batch %{y}: %{z:.3f} of the mean<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="rank")
    figure.update_yaxes(title="micro-batch", autorange="reversed", dtick=max(1, step.num_micro_batches // 8))
    return figure


def placement(bars: Bars, plan: Plan) -> go.Figure:
    """Bars before above bars after: one for each rank (or bag), cut into its sequences, coloured by their length."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07,
        subplot_titles=("before: every sequence at home", f"after: {plan.topology}, {plan.solver}"),
    )  # fmt: skip
    lengths = [segment.seq_len for segment in bars.before] or [1]
    low, high = np.log10(min(lengths)), np.log10(max(lengths))
    high = max(high, low + 0.1)
    ticks = np.linspace(low, high, 5)
    scale, unit = scale_of(max(plan.workload_before), "FLOP")
    measures = {
        f"work, {unit} a block": lambda segment: segment.work / scale,
        "tokens": lambda segment: segment.num_tokens,
    }
    first, _ = measures
    labelled = bars.num_bars <= _MAX_LABELLED_BARS
    for row, segments in enumerate((bars.before, bars.after), start=1):
        figure.add_bar(
            x=[segment.bar for segment in segments], y=list(map(measures[first], segments)),
            hovertext=[s.hover for s in segments],
            text=["" if s.sequence is None else str(s.sequence) for s in segments] if labelled else None,
            textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
            hovertemplate="%{hovertext}<extra>" + bars.unit + " %{x}</extra>", width=0.8, showlegend=False,
            row=row, col=1,
            marker={
                "color": np.log10([segment.seq_len for segment in segments]), "coloraxis": "coloraxis",
                "line": {"width": 0.5, "color": "rgba(255,255,255,0.4)"},
            },
        )  # fmt: skip
    for boundary in _bag_boundaries(plan) if bars.unit == "rank" else []:
        figure.add_vline(x=boundary - 0.5, line={"width": 1, "dash": "dot", "color": "#888888"}, row=2, col=1)

    buttons = []
    for title, measure in measures.items():
        heights = {"y": [list(map(measure, segments)) for segments in (bars.before, bars.after)]}
        titles = {"yaxis.title.text": title, "yaxis2.title.text": title}
        buttons.append({"label": title, "method": "update", "args": [heights, titles]})
    figure.update_layout(
        barmode="stack",
        bargap=0.1,
        coloraxis={
            "colorscale": _LENGTH_COLOURS, "cmin": low, "cmax": high,
            "colorbar": {"title": "sequence,<br>tokens", "tickvals": ticks,
                         "ticktext": [f"{10**t:,.0f}" for t in ticks]},
        },
        updatemenus=[{
            "buttons": buttons, "type": "buttons", "direction": "right", "showactive": False, "x": 1,
            "xanchor": "right", "y": 1.12,
        }],
    )  # fmt: skip
    figure.update_yaxes(title=first)
    figure.update_xaxes(title=bars.unit, row=2, col=1)
    return figure


def heat_maps(traffic: Traffic) -> go.Figure:
    unit = traffic.unit
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.16, subplot_titles=("route and back", "attention's exchanges, all blocks")
    )
    for column, matrix in enumerate((traffic.route, traffic.attention), start=1):
        scale, prefix = scale_of(float(matrix.max()), "B")
        cells = np.where(matrix > 0, matrix / scale, np.nan)
        figure.add_heatmap(
            z=cells, row=1, col=column, colorscale=_LENGTH_COLOURS, zmin=0, zmax=float(matrix.max()) / scale or 1.0,
            colorbar={"title": prefix, "x": 0.43 if column == 1 else 1.0, "thickness": 12},
            hovertemplate=f"{unit} %{{y}} to {unit} %{{x}}: %{{z:.4g}} {prefix}<extra></extra>", hoverongaps=False,
        )  # fmt: skip
        figure.update_xaxes(title=f"to {unit}", row=1, col=column, constrain="domain")
        figure.update_yaxes(
            title=f"from {unit}", row=1, col=column, autorange="reversed", scaleanchor=f"x{column}", constrain="domain"
        )
        if traffic.num_blocks <= _MAX_LABELLED_BARS:  # else ticks may stand between two blocks
            figure.update_xaxes(dtick=1, row=1, col=column)
            figure.update_yaxes(dtick=1, row=1, col=column)
        ranks_per_node = traffic.ranks_per_node
        if traffic.ranks_per_block == 1 and ranks_per_node < traffic.num_blocks <= 128:
            for boundary in range(ranks_per_node, traffic.num_blocks, ranks_per_node):
                line = {"width": 0.5, "dash": "dot", "color": "#888888"}
                figure.add_vline(x=boundary - 0.5, line=line, row=1, col=column)
                figure.add_hline(y=boundary - 0.5, line=line, row=1, col=column)
    return figure


def node_traffic(route: NodeTraffic, attention: NodeTraffic) -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=("route and back", "attention's exchanges, all blocks"))
    for column, traffic in enumerate((route, attention), start=1):
        scale, prefix = scale_of(float(max(traffic.inside.max(), traffic.outside.max())), "B")
        nodes = np.arange(len(traffic.inside))
        for name, num_bytes, colour in (
            ("to ranks of its node", traffic.inside, "#56B4E9"),
            ("to other nodes", traffic.outside, "#D55E00"),
        ):
            figure.add_bar(
                x=nodes, y=num_bytes / scale, name=name, marker_color=colour, marker_line_width=0, row=1, col=column,
                showlegend=column == 1, legendgroup=name,
                hovertemplate=f"node %{{x}}: %{{y:.4g}} {prefix} {name}<extra></extra>",
            )  # fmt: skip
        figure.update_yaxes(title=f"sent in a step, {prefix}", row=1, col=column)
        figure.update_xaxes(title="node", row=1, col=column, dtick=1 if len(nodes) <= _MAX_LABELLED_BARS else None)
    figure.update_layout(barmode="stack", bargap=0.15, legend_y=1.14)
    return figure


def step_times(predicted: Mapping[str, StepTime], measured_s: Mapping[str, Sequence[float]]) -> go.Figure:
    figure = go.Figure()
    names = list(predicted)
    for (term, label), colour in zip(StepTime.labels().items(), itertools.cycle(_TERM_COLOURS), strict=False):
        seconds = [step.terms[term] for step in predicted.values()]
        if any(seconds):
            figure.add_bar(
                y=names, x=seconds, name=label, orientation="h", marker_color=colour, marker_line_width=0,
                hovertemplate=f"{label}: %{{x:.4f}} s<extra>%{{y}}</extra>",
            )  # fmt: skip
    for name, seconds_of in measured_s.items():
        figure.add_box(
            x=list(seconds_of), y=[f"{name}, measured"] * len(seconds_of), name=f"{name}, measured", orientation="h",
            boxpoints="all" if len(seconds_of) <= 200 else "outliers", showlegend=False, marker_color=AFTER,
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title="seconds a step, forward and backward", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def scaling(points: Sequence[Point]) -> go.Figure:
    figure = make_subplots(rows=1, cols=3, subplot_titles=[title for title, _ in PANELS])
    colours = (BEFORE, AFTER, "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
    for index, (name, line) in enumerate(lines_of(points).items()):
        ranks = [point.num_ranks for point in line]
        for column, (_, value) in enumerate(PANELS, start=1):
            figure.add_scatter(
                x=ranks, y=[value(point) for point in line], name=name, mode="lines+markers", legendgroup=name,
                showlegend=column == 1, line={"color": colours[index % len(colours)]}, row=1, col=column,
                hovertemplate="%{x:,} ranks: %{y:.4g}",
            )  # fmt: skip
    figure.update_layout(legend_y=1.14)
    ticks = sorted({point.num_ranks for point in points})
    figure.update_xaxes(type="log", title="ranks", tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
    figure.update_yaxes(rangemode="tozero")
    return figure


def _bag_boundaries(plan: Plan) -> list[int]:
    firsts = [ranks[0] for ranks in plan.topology.bags]
    return sorted(firsts)[1:] if len(firsts) < plan.num_ranks else []
