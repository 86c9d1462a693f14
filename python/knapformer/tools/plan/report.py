"""The picture of a plan: one HTML file that opens offline, as plotly writes it."""

from __future__ import annotations

import html
import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from knapformer import Plan, plan_home, predict_micro_batch
from knapformer.tools.files import write

_MAX_RANKS = 128  # of more no bars are drawn
# Viridis without its darkest part, on which numbers would be illegible.
_COLOURS = ["#3e4c8a", "#2a788e", "#22a884", "#7ad151", "#fde725"]

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title></head>
<body style="font-family: sans-serif; max-width: 1280px; margin: 0 auto; padding: 12px">
<h2>{title}</h2>{text}{chart}</body>
</html>
"""


def write_report(path: str, plan: Plan, *said: str) -> None:
    """Writes the picture of a plan of at least one sequence; of a step of several micro-batches, of the one that takes
    longest. said: of the plan, in words.

    Raises OSError.
    """
    title = f"{plan.num_ranks:,} ranks, {plan.topology}"
    lines = [*filter(None, said), f"{plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens."]
    if plan.num_micro_batches > 1:
        longest = max(range(plan.num_micro_batches), key=plan.predicted_times.__getitem__)
        lines.append(f"Drawn: of {plan.num_micro_batches} micro-batches number {longest}, which takes longest.")
        plan = plan.plans[longest]
    if plan.num_ranks > _MAX_RANKS:
        lines.append(f"Drawn: the first {_MAX_RANKS} ranks.")
    lines.append(
        f"Highest over lowest work of a rank: {plan.wir_before:.2f} → {plan.wir_after:.2f}. Predicted seconds: "
        f"{predict_micro_batch(plan_home(plan)).total_s:.3g} → {plan.predicted_time:.3g}. Tokens of the fullest rank: "
        f"{max(plan.tokens_before):,} → {max(plan.tokens_after):,}."
    )
    text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    chart = placement(plan).to_html(full_html=False, config={"displayModeBar": False}, default_height="80vh")
    write(path, _PAGE.format(title=html.escape(title), text=text, chart=chart))


def placement(plan: Plan) -> go.Figure:
    """Bars before above bars after: one for each of the first ranks, cut into its sequences, coloured by their length,
    the longest first. Dotted lines: bags."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08,
        subplot_titles=("before: every sequence at home", f"after: {plan.topology}, {plan.solver}"),
    )  # fmt: skip
    homes = [(home, length) for home, lens in enumerate(plan.seq_lens) for length in lens]
    mean = sum(plan.workload_before) / plan.num_ranks
    whole = ((i, home, 0, length) for i, (home, length) in enumerate(homes))
    for row, (chunks, works) in enumerate(((whole, plan.sequence_works), (plan.chunks, plan.chunk_works)), start=1):
        bars = sorted(zip(chunks, works, strict=True), key=lambda bar: -homes[bar[0][0]][1])
        bars = [bar for bar in bars if bar[0][1] < _MAX_RANKS]
        figure.add_bar(
            x=[rank for (_, rank, _, _), _ in bars], y=[work / mean for _, work in bars],
            hovertext=[_of_chunk(homes[of[0]], *of) for of, _ in bars],
            text=[str(sequence) for (sequence, _, _, _), _ in bars],
            textposition="inside", insidetextanchor="middle", textangle=0,
            hovertemplate="%{hovertext}<extra>rank %{x}</extra>", width=0.8, row=row, col=1,
            marker={
                "color": [math.log10(homes[sequence][1]) for (sequence, _, _, _), _ in bars],
                "coloraxis": "coloraxis", "line": {"width": 0.5, "color": "rgba(255,255,255,0.4)"},
            },
        )  # fmt: skip
    firsts = sorted(ranks[0] for ranks in plan.topology.bags)
    for first in firsts[1:] if len(firsts) < plan.num_ranks else []:
        if first < _MAX_RANKS:
            figure.add_vline(x=first - 0.5, line={"width": 1, "dash": "dot", "color": "#888888"}, row=2, col=1)
    low, high = (math.log10(of(length for _, length in homes)) for of in (min, max))
    ticks = [low + i * (high - low) / 4 for i in range(5 if high > low else 1)]
    figure.update_layout(
        template="plotly_white",
        barmode="stack",
        showlegend=False,
        margin={"l": 60, "r": 10, "t": 30, "b": 50},
        uniformtext={"mode": "hide", "minsize": 9},  # numbers that find no room
        coloraxis={
            "colorscale": _COLOURS, "cmin": low, "cmax": max(high, low + 0.1),
            "colorbar": {
                "title": {"text": "tokens of<br>the sequence"}, "thickness": 12, "tickvals": ticks,
                "ticktext": [f"{10**tick:,.0f}" for tick in ticks],
            },
        },
    )  # fmt: skip
    figure.update_yaxes(title="work over the mean", rangemode="tozero", matches="y")
    figure.update_xaxes(title="rank", row=2, col=1)
    return figure


def _of_chunk(of: tuple[int, int], sequence: int, rank: int, first: int, count: int) -> str:
    home, length = of
    lies = f"tokens {first:,} to {first + count - 1:,} ({count:,})" if count < length else "whole"
    stays = " (stays)" if home == rank else ""
    return f"sequence {sequence}<br>{length:,} tokens<br>here: {lies}<br>home: rank {home}{stays}"
