"""Predictions over the number of ranks, as `plan` makes them and as reports and plots draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knapformer.tools.measure.figures import number_or_none


@dataclass(frozen=True)
class Point:
    """A topology on a number of ranks."""

    num_ranks: int
    topology: str  # as planned, or "none"
    asked: str  # as asked for, such as "g8n*", a different topology on every number of ranks
    plan_s: float  # median wall time of the planner on this machine; 0 without a balancer
    mean: Mapping[str, float]  # over steps: seconds, bytes and tokens by name
    hfu: float | None = None  # hardware FLOPs utilization, 0 to 1; None where the device's peak is not known

    @property
    def sent_bytes(self) -> float:
        return self.mean["route_bytes"] + self.mean["attention_bytes"]

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        mean = fields.pop("mean")
        return {**fields, **mean, "wir": number_or_none(self.mean["wir"])}


#: What is drawn over the number of ranks: titles and values.
PANELS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("step, s", lambda p: p.mean["total_s"]),
    ("efficiency, %", lambda p: 100 * p.mean["efficiency"]),
    ("GB that a rank sends in a step", lambda p: p.sent_bytes / p.num_ranks / 1e9),
)


def lines_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each topology, by its name as asked for."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.asked, []).append(point)
    return lines
