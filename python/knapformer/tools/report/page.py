"""Reports as one HTML file that opens offline: everything, plotly too, is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, Plan, StepTime, plan_home, predict_step
from knapformer.tools.cost_args import settings_dict
from knapformer.tools.files import check_packages, write
from knapformer.tools.ways import NO_BALANCER, MasksOfKind, masks_by_kind

if TYPE_CHECKING:
    import plotly.graph_objects as go


# The page, not plotly, colours text and lines, which follow its theme.
_CLEAR = {"template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
_BREAKS = re.compile("(?<=[a-z])(?=[A-Z])")  # where a phone may break a long word


class HtmlPage:
    """Sections in the order in which they are added. Headings and texts are HTML."""

    def __init__(self) -> None:
        self._sections: list[str] = []
        self._charts: list[str] = []

    def add(self, heading: str, text: str, figure: go.Figure, height: int | None = None) -> None:
        """height: in pixels (default: the figure's own)."""
        figure.update_layout(
            **_CLEAR, height=height or figure.layout.height, font={"size": 12}, hovermode="closest",
            margin=dict.fromkeys("lrtb", 8) | figure.layout.margin.to_plotly_json(), showlegend=False,
        )  # fmt: skip
        figure.update_xaxes(automargin=True, ticklabelstandoff=4)
        figure.update_yaxes(automargin=True)
        legend = {
            trace.name: trace.line.color if trace.type == "scatter" else trace.marker.color
            for trace in figure.data if trace.name
        }  # fmt: skip
        names = (f'<li><i style="background:{of}"></i>{html.escape(name)}</li>' for name, of in legend.items())
        chart = f"chart{len(self._charts)}"
        self._charts.append(f'"{chart}": {figure.to_json()}')
        self._add_section(heading, text, f'<ul>{"".join(names)}</ul><div id="{chart}"></div>')

    def add_table(self, heading: str, text: str, rows: Iterable[Mapping[str, str]]) -> None:
        """rows: at least one, each with its cells by heading."""
        rows = list(rows)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        cells = ((f"<td>{_BREAKS.sub('<wbr>', html.escape(cell))}</td>" for cell in row.values()) for row in rows)
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        self._add_section(heading, text, f"<table><tr>{head}</tr>{body}</table>")

    def write(
        self, path: str, title: str, subtitle: str, figures: Iterable[tuple[str, str]], settings: Mapping[str, Any]
    ) -> None:
        """Writes the page whole or not at all. figures: (value, label) pairs at its top, in HTML. subtitle: HTML.

        Raises OSError.
        """
        from plotly.offline import get_plotlyjs

        parts = {
            "@TITLE@": html.escape(title),
            "@SUBTITLE@": subtitle,
            "@FIGURES@": "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in figures),
            "@SECTIONS@": "\n".join(self._sections),
            "@SETTINGS@": "".join(
                f"<tr><th>{name}</th><td>{html.escape(_setting(value))}</td></tr>" for name, value in settings.items()
            ),
            "@CHARTS@": "{" + ",\n".join(self._charts).replace("</", "<\\/") + "}",
            "@PLOTLY@": get_plotlyjs().replace("</script", "<\\/script"),
        }
        page = files("knapformer.tools.report").joinpath("page.html").read_text(encoding="utf-8")
        # One pass over the template, so that inserted text is not searched for placeholders.
        write(path, re.sub("|".join(parts), lambda place: parts[place[0]], page))

    def _add_section(self, heading: str, text: str, content: str) -> None:
        self._sections.append(f"<section><h2>{heading}</h2><p>{text}</p>{content}</section>")


def _setting(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_report(path: str, plan: Plan) -> None:
    """Writes the report of a plan to `path`, whole or not at all. For a step it shows all micro-batches, and the
    one that takes longest in detail.

    Raises ArgumentError, OSError.
    """
    check_packages("--report")
    from knapformer.tools.report import charts

    if plan.num_tokens == 0:
        raise ArgumentError("plan: got one without sequences, expected at least one sequence to report on")
    page, detail, figures = HtmlPage(), "", list[tuple[str, str]]()
    if plan.num_micro_batches > 1:
        whole, longest = plan, max(range(plan.num_micro_batches), key=plan.predicted_times.__getitem__)
        detail = f"; of {plan.num_micro_batches} micro-batches, number {longest} in detail, which takes longest"
        waits = "in each" if plan.sync == "micro_batch" else "once, at the end of the step"
        text = f"Work of one block over the mean of a rank and micro-batch. Ranks wait for each other {waits}."
        page.add("The step: work per rank and micro-batch", text, charts.work_per_micro_batch(plan), 380)
        plan = plan.plans[longest]
        figures += [
            (f"{whole.predicted_time:.3g} s", f"predicted step of {whole.num_micro_batches} micro-batches"),
            (f"{whole.predicted_time / whole.ideal_time - 1:.2%}", "over ideal"),
            (f"{whole.tokens_moved / whole.num_tokens:.1%}", "of the step's tokens change ranks"),
        ]
    before, step = predict_step(plan_home(plan)), predict_step(plan)
    text = "Of one block, over the mean: what the longest bar is above 1 is the time that the others wait."
    page.add("Work per rank", text, charts.work_per_rank(plan), 340)
    text = "One bar for each rank, cut into the sequences that lie there; point at one for its length, home and chunk. "
    num_drawn = charts.num_drawn(plan)
    text += "Dotted lines: bags. " + (f"The first {num_drawn} ranks." if plan.num_ranks > num_drawn else "")
    page.add("Where every sequence lies", text, charts.placement(plan), 600)
    add_masks(page, _masks_of(plan))
    rows = {name: _terms(time) for name, time in ((NO_BALANCER, before), (str(plan.topology), step))}
    text = "Predicted by the cluster model; terms of the slowest group of ranks."
    title_of_axis = "seconds a step, forward and backward"
    page.add("Step time", text, charts.stacked_bars(rows, title_of_axis))
    figures += [
        (f"{plan.max_over_mean_before:.2f} → {plan.max_over_mean_after:.3f}", "slowest rank's work over the mean"),
        (f"{plan.wir_before:.2f} → {plan.wir_after:.2f}".replace("inf", "∞"), "highest over lowest work (WIR)"),
        (f"{before.total_s:.3g} → {step.total_s:.3g} s", "predicted step"),
        (f"{before.total_s / step.total_s:.2f} times", "predicted speed-up"),
        (f"{max(plan.tokens_before):,} → {max(plan.tokens_after):,}", "tokens of the fullest rank"),
        (f"{plan.tokens_moved / plan.num_tokens:.1%}", "of the tokens change ranks"),
        (_bytes(step.route_bytes.total + step.attention_bytes.total), "sent between ranks in a step"),
        (_bytes(step.route_bytes.between + step.attention_bytes.between), "of that leaves a node"),
    ]
    settings = {
        "topology": plan.topology, "solver": plan.solver, "width": plan.d_model, "gamma": f"{plan.workload.gamma:g}",
        **{field: value for part in settings_dict(plan).values() for field, value in part.items()},
    }  # fmt: skip
    subtitle = (
        f"{plan.num_ranks:,} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens; "
        f"bags: {html.escape(str(plan.topology))}"
        + (f", {plan.topology.num_replicas} times" if plan.topology.num_replicas > 1 else "")
        + detail
    )
    page.write(path, f"knapformer: {plan.num_ranks:,} ranks, {plan.topology}", subtitle, figures, settings)


def add_masks(page: HtmlPage, masks: Mapping[str, MasksOfKind]) -> None:
    """Nothing where attention is full. masks: by kind."""
    if set(masks) == {"full"}:
        return
    pairs = sum(of.pairs for of in masks.values())
    rows = [
        {"mask": kind, "sequences": f"{of.samples:,}", "of their pairs": f"{of.pairs / of.all_pairs:.1%}",
         "of all pairs": f"{of.pairs / (pairs or 1):.1%}"}
        for kind, of in masks.items()
    ]  # fmt: skip
    text = (
        "(query, key) pairs that masks leave: of those that full attention would have, and of all that are computed "
        "here. Parts: masks that list the parts of a sequence."
    )
    page.add_table("Attention masks", text, rows)


def _masks_of(plan: Plan) -> dict[str, MasksOfKind]:
    lens = [length for of_rank in plan.seq_lens for length in of_rank]
    if not plan.masks and plan.attention_pairs:  # of a file that names none
        squares = sum(length**2 for length in lens)
        return {"not known": MasksOfKind(len(lens), sum(plan.attention_pairs), squares)}
    masks = plan.masks or ["full"] * len(lens)
    return masks_by_kind((mask, length, 1) for mask, length in zip(masks, lens, strict=True))


def _terms(time: StepTime) -> dict[str, float]:
    return {label: time.terms[term] for term, label in StepTime.labels().items()}


def _bytes(num_bytes: float) -> str:
    from knapformer.tools.report.charts import scale_of

    scale, unit = scale_of(num_bytes, "B")
    return f"{num_bytes / scale:.3g} {unit}"
