"""Charts, figures and settings as one HTML file that opens offline: everything, plotly too, is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from knapformer.tools.files import write_atomically

if TYPE_CHECKING:
    import plotly.graph_objects as go


class HtmlPage:
    """Sections in the order in which they are added. Headings and texts are HTML."""

    def __init__(self) -> None:
        self._sections: list[str] = []
        self._charts: list[str] = []

    def add(self, heading: str, text: str, figure: go.Figure, height: int) -> None:
        """height: in pixels. The page sets the colours that must follow its theme."""
        figure.update_layout(
            template="none", height=height, margin={"l": 60, "r": 20, "t": 60, "b": 45}, hovermode="closest",
            legend={"orientation": "h", "x": 0, "yanchor": "bottom", "traceorder": "normal"}, font={"size": 12},
        )  # fmt: skip
        if figure.layout.legend.y is None:
            figure.update_layout(legend_y=1.02)
        figure.update_xaxes(automargin=True)
        figure.update_yaxes(automargin=True)
        chart = f"chart{len(self._charts)}"
        self._charts.append(f'"{chart}": {figure.to_json()}')
        self._add_section(heading, text, f'<div id="{chart}"></div>')

    def add_table(self, heading: str, text: str, rows: Iterable[Mapping[str, str]]) -> None:
        """rows: at least one, each with its cells by heading."""
        rows = list(rows)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows
        )
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
        write_atomically(path, re.sub("|".join(parts), lambda place: parts[place[0]], page))

    def _add_section(self, heading: str, text: str, content: str) -> None:
        section = f'<section><h2>{heading}</h2><p>{text}</p><div class="wide">{content}</div></section>'
        self._sections.append(section)


def _setting(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
