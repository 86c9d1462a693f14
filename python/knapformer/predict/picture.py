"""Predicted scaling as a picture: step time, efficiency and what moves, over the number of ranks."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path

from knapformer import ArgumentError
from knapformer.output import write_atomically
from knapformer.predict.scaling import Point

_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours: told apart without colour vision too.
_COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


def check_picture(path: str) -> None:
    """Raises ArgumentError where it could not be drawn."""
    if Path(path).suffix not in _SUFFIXES:
        raise ArgumentError(f"--picture: got {path!r}, expected a file that ends in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--picture: needs matplotlib, which is not installed: pip install 'knapformer[report]'")


def draw_scaling(path: str, points: list[Point], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.asked, []).append(point)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels: tuple[tuple[str, Callable[[Point], float]], ...] = (
        ("step, s", lambda p: p.total_s),
        ("efficiency, %", lambda p: 100 * p.efficiency),
        ("GB a rank moves in a step", lambda p: (p.route_bytes + p.attention_bytes) / p.num_ranks / 1e9),
    )
    ticks = sorted({point.num_ranks for point in points})
    for axis, (label, value) in zip(axes, panels, strict=True):
        for colour, (name, line) in zip(_COLOURS * len(lines), lines.items(), strict=False):
            axis.plot([p.num_ranks for p in line], [value(p) for p in line], "o-", color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45 if len(ticks) > 5 else 0)
        axis.minorticks_off()
        axis.set(xlabel="ranks", title=label, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:], dpi=150)
    plt.close(figure)
    write_atomically(path, content.getvalue())
