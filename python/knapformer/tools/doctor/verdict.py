"""Which alternative to take, what it gains, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from knapformer.tools.baselines import Alternative
from knapformer.tools.doctor.alternatives import Result, gain, simulate
from knapformer.tools.ways import DrawnSteps

WORTH = 0.03  # a gain below this is none
# Factors by which published figures may be off: gamma, the compute rate, and the links' bandwidth.
_UNSURE = {"gamma": (0.75, 1.25), "rate": (0.75, 1.25), "bandwidth": (0.5, 2.0)}


@dataclass(frozen=True)
class Verdict:
    """now, taken: what was compared; equal where nothing is better. text: a sentence, for somebody who has read nothing
    else. speed_up: how many times as fast as now; 1: equal. low, high: its range, given the draw of data (two standard
    errors) and the uncertainty of gamma and the cluster; None where only one step was simulated, which tells nothing of
    the draw."""

    now: Result
    taken: Result
    text: str
    speed_up: float = 1.0
    low: float | None = 1.0
    high: float | None = 1.0

    @property
    def is_worth_it(self) -> bool:
        return self.taken is not self.now


def decide(results: Sequence[Result], now: Result, draw: DrawnSteps, job: str) -> Verdict:
    """Takes the alternative with the least change among those that are as fast as the fastest, within WORTH: the first
    where samples stay whole, else the first. One that changes which samples a step has is not taken.

    results: the least change first. job: what is trained, and on how many ranks."""
    what = now.alternative.name
    advised = [r for r in results if r.problem is None and not r.alternative.effect]
    if not advised:
        shortest = next((r.problem for r in reversed(results) if r.problem), "no alternative can be planned")
        return Verdict(now, now, f"No alternative fits: {shortest} ({job}).")
    fastest = max(advised, key=lambda r: r.efficiency)
    close = [r for r in advised if r.efficiency >= fastest.efficiency / (1 + WORTH)]
    taken = min(close, key=lambda r: r.alternative.degree > 0)
    name = taken.alternative.advice or taken.alternative.name
    if now.problem is not None:
        return Verdict(now, taken, f"Take {name} for {job}: {what} does not fit ({now.problem}).")
    speed_up, error = gain(taken, now)
    num_steps = len(draw.batches)
    is_known = num_steps > 1  # of one step error is NaN
    few = "" if is_known else " One step is too few to say how sure that is."
    if speed_up >= 1 + WORTH and speed_up - 2 * error <= 1:
        span = f"{speed_up:.2f} times as fast as {what}, give or take {2 * error:.2f}"
        text = f"Not known for {job}: {name} is {span}, over {num_steps} steps; more would tell (--steps, or batches)."
        return Verdict(now, now, text)
    if taken is now or speed_up < 1 + WORTH:
        worth = f"no alternative that trains on the same samples is {WORTH:.0%} faster than {what}"
        one = 1.0 if is_known else None
        return Verdict(now, now, f"Not worth it for {job}: {worth}.{few}", 1.0, one, one)
    low = high = None
    if is_known:
        seen = [speed_up - 2 * error, speed_up + 2 * error, *_elsewhere(taken.alternative, now.alternative, draw)]
        low, high = min(seen), max(seen)
    span = f" ({low:.2f} to {high:.2f})" if is_known else ""
    text = (
        f"Take {name}: training {job} is then {speed_up:.2f} times as fast as with {what}{span}, "
        f"{1 - 1 / speed_up:.0%} fewer GPU-hours.{few}"
    )
    return Verdict(now, taken, text, speed_up, low, high)


def _elsewhere(taken: Alternative, now: Alternative, draw: DrawnSteps) -> Iterator[float]:
    """How many times as fast taken is as now for other gammas and clusters, where both are possible."""
    of = draw.planning
    for setting, factors in _UNSURE.items():
        for factor in factors:
            if setting == "gamma":
                planning = replace(of, gamma=of.gamma * factor)
            else:
                fields = ("flops_per_s",) if setting == "rate" else ("node_bytes_per_s", "network_bytes_per_s")
                scaled = of.cluster.replace(**{name: getattr(of.cluster, name) * factor for name in fields})
                planning = replace(of, cluster=scaled)
            one, other = (simulate(alternative, replace(draw, planning=planning)) for alternative in (taken, now))
            if one.problem is None and other.problem is None:
                yield gain(one, other)[0]
