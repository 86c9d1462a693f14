"""Plots by matplotlib, of the extra `report`: PNG, SVG or PDF by the file's name."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError
from knapformer.tools.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours: told apart without colour vision too.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


def check_plot(path: str | None) -> None:
    """Raises ArgumentError where --picture could not be drawn. None: none is asked for."""
    if path is None:
        return
    if Path(path).suffix not in _SUFFIXES:
        raise ArgumentError(f"--picture: got {path!r}, expected a file that ends in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--picture: needs matplotlib, which is not installed: pip install 'knapformer[report]'")


def new_figure(num_panels: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure and its panels, side by side; drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, num_panels, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def set_title(figure: Figure, title: str) -> None:
    """title: may hold a file's name, which may be no text."""
    figure.suptitle(title.encode(errors="backslashreplace").decode())


def save_figure(figure: Figure, path: str) -> None:
    """Whole or not at all. Raises OSError."""
    import matplotlib.pyplot as plt

    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:], dpi=150)
    plt.close(figure)
    write_atomically(path, content.getvalue())
