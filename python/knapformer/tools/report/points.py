"""Predictions over the number of ranks, as `predict` makes them and as reports and plots draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from knapformer.tools.measure.figures import number_or_none


@dataclass(frozen=True)
class Point:
    """A topology on a number of ranks: means over steps, in seconds, bytes, and tokens."""

    num_ranks: int
    topology: str  # as planned, or "none"
    asked: str  # as asked for: "g8n*" is another topology on every number of ranks
    efficiency: float
    wir: float
    tokens_per_s: float
    plan_s: float  # median wall time of the planner on this machine; 0 without a balancer
    tokens: float
    max_tokens_per_rank: float
    token_s: float
    attention_s: float
    exchange_s: float
    route_s: float
    fsdp_s: float
    host_s: float
    fixed_s: float
    total_s: float
    ideal_s: float
    route_bytes: float
    route_bytes_between_nodes: float
    attention_bytes: float
    attention_bytes_between_nodes: float

    def as_dict(self) -> dict[str, float | str | None]:
        return {**asdict(self), "wir": number_or_none(self.wir)}


#: What is drawn over the number of ranks: titles and values.
PANELS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("step, s", lambda p: p.total_s),
    ("efficiency, %", lambda p: 100 * p.efficiency),
    ("GB that a rank sends in a step", lambda p: (p.route_bytes + p.attention_bytes) / p.num_ranks / 1e9),
)


def lines_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """By topology, as asked for."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.asked, []).append(point)
    return lines
