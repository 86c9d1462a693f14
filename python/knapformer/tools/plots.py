"""Plots by matplotlib (extra `report`): PNG, SVG or PDF, by the suffix of the file's name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knapformer.tools.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart without colour vision too.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


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


def save_figure(figure: Figure, path: str, title: str) -> None:
    """Writes it whole or not at all. title: may hold a file's name, which may not be valid text. Raises OSError."""
    import matplotlib.pyplot as plt

    figure.suptitle(title.encode(errors="backslashreplace").decode())
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:], dpi=150)
    plt.close(figure)
    write_atomically(path, content.getvalue())
