"""Charts, figures and settings as one HTML file that opens offline: everything, plotly too, is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from knapformer.tools.files import write

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
