"""Predicted scaling as a plot: step time, efficiency and what moves, over the number of ranks."""

from __future__ import annotations

from knapformer.tools.plots import COLOURS, new_figure, save_figure, set_title
from knapformer.tools.report.points import PANELS, Point, lines_of


def draw_scaling(path: str, points: list[Point], title: str) -> None:
    lines = lines_of(points)
    figure, axes = new_figure(3, 13, 4)
    ticks = sorted({point.num_ranks for point in points})
    for axis, (label, value) in zip(axes, PANELS, strict=True):
        for colour, (name, line) in zip(COLOURS * len(lines), lines.items(), strict=False):
            axis.plot([p.num_ranks for p in line], [value(p) for p in line], "o-", color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45 if len(ticks) > 5 else 0)
        axis.minorticks_off()
        axis.set(xlabel="ranks", title=label, ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), frameon=False)
    set_title(figure, title)
    save_figure(figure, path)
