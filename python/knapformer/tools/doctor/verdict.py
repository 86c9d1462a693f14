"""Which alternative to take, what it gains, how sure that is, and what would change the answer most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from knapformer import ArgumentError
from knapformer.tools.doctor.alternatives import Case, Result, gain, simulate
from knapformer.tools.ways import Lengths

WORTH = 0.03  # a gain below this is none
# Factors by which published figures may be off: gamma, the compute rate, and the links' bandwidth.
_UNSURE = {"gamma": (0.75, 1.25), "rate": (0.75, 1.25), "bandwidth": (0.5, 2.0)}
_LEVERS = {"gamma": (0.5, 2.0), "bandwidth": (0.25, 4.0)}
# The least change comes first; alternatives that change which samples a step has are not advised.
_CHANGE = ("as_drawn", "one_by_one", "longest_first", "sampler", "static", "bags")


@dataclass(frozen=True)
class Lever:
    """The gain of `taken` with a lower and with a higher value of one setting. name: the setting and both values."""

    name: str
    taken: str
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """now, taken: what was compared; equal where nothing is better. speedup: how many times as fast as now; 1: equal.

    low, high: the range of speedup, given the draw of data (two standard errors) and the uncertainty of gamma and the
    cluster; None where only one step was simulated, which tells nothing of the draw. problem: why nothing can be taken.
    faster: alternatives that are faster than taken but not advised, because they change which samples a step has; the
    fastest first. too_much: what is said of `now` where it has a problem. unsure: what may be faster than now, by how
    much; the steps differ too much to know.
    """

    now: Result
    taken: Result
    speedup: float = 1.0
    low: float | None = 1.0
    high: float | None = 1.0
    problem: str | None = None
    faster: tuple[Result, ...] = ()
    too_much: str = ""
    unsure: str = ""

    @property
    def is_worth_it(self) -> bool:
        return self.problem is None and self.taken is not self.now

    def sentence(self, job: str) -> str:
        """job: what is trained, and on how many ranks."""
        if self.problem is not None:
            return f"{self.problem} ({job})."
        few = "" if self.low is not None else " One step is too few to say how sure that is."
        if self.unsure:
            return f"Not known for {job}: {self.unsure}; more steps would tell (--steps)."
        if not self.is_worth_it:
            return (
                f"Not worth it for {job}: no alternative that trains on the same samples is {WORTH:.0%} faster than "
                f"{self.now.alternative.name}.{few}"
            )
        taken = self.taken.alternative.advice or self.taken.alternative.name
        if self.now.problem is not None:
            return f"Take {taken} for {job}: {self.now.alternative.name} {self.too_much} ({self.now.problem})."
        span = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return (
            f"Take {taken}: training {job} is then {self.speedup:.2f} times as fast as with "
            f"{self.now.alternative.name}{span}, {1 - 1 / self.speedup:.0%} fewer GPU-hours.{few}"
        )

    def aside(self) -> str | None:
        """A sentence on what is faster but not advised; None where nothing is."""
        if not self.faster:
            return None
        named = ", ".join(f"{r.alternative.name} {gain(r, self.now)[0]:.2f} times" for r in self.faster)
        return f"Faster, but a step then has other samples: {named}. Below is what each does to the training."


def decide(results: Sequence[Result], now: Result, case: Case) -> Verdict:
    """Takes the alternative with the least change among those that are as fast as the fastest, within WORTH."""
    verdict = _of_same_samples(results, now, case)
    if verdict.problem is not None or now.problem is not None:
        return verdict
    others = [r for r in results if r.problem is None and _rank(r) is None]
    faster = [r for r in others if r.efficiency > verdict.taken.efficiency * (1 + WORTH)]
    return replace(verdict, faster=tuple(sorted(faster, key=lambda r: -r.efficiency)))


def _of_same_samples(results: Sequence[Result], now: Result, case: Case) -> Verdict:
    advised = [r for r in results if r.problem is None and _rank(r) is not None]
    if not advised:
        shortest = next((r.problem for r in reversed(results) if r.problem), "no alternative can be planned")
        limit = case.max_tokens
        what = (
            f"No alternative keeps --max-tokens-per-rank {limit}"
            if case.limit_is_given
            else "No alternative fits in memory"
        )
        return Verdict(now, now, problem=f"{what}: {shortest}")
    fastest = max(advised, key=lambda r: r.efficiency)
    close = [r for r in advised if r.efficiency >= fastest.efficiency / (1 + WORTH)]
    taken = min(close, key=lambda r: _rank(r) or 0)
    if now.problem is not None:
        of_memory = "" if case.limit_is_given else " in memory"
        return Verdict(now, taken, too_much=case.too_much + of_memory)
    speedup, error = gain(taken, now)
    one_step = len(case.batches) == 1  # then error is NaN
    if speedup >= 1 + WORTH and speedup - 2 * error <= 1:
        name = taken.alternative.advice or taken.alternative.name
        span = f"{speedup:.2f} times as fast as {now.alternative.name}, give or take {2 * error:.2f}"
        return Verdict(now, now, unsure=f"{name} is {span}, over {len(case.batches)} steps")
    if taken is now or speedup < 1 + WORTH:
        return Verdict(now, now, 1.0, None, None) if one_step else Verdict(now, now)
    if one_step:
        return Verdict(now, taken, speedup, None, None)
    seen = [speedup - 2 * error, speedup + 2 * error]
    for what, factors in _UNSURE.items():
        seen += [_speedup(_scaled(case, what, factor), taken, now) for factor in factors]
    sure = [value for value in seen if math.isfinite(value)]
    return Verdict(now, taken, speedup, min(sure), max(sure))


def levers(
    verdict: Verdict, results: Sequence[Result], case: Case, batches_of: Callable[[int], Sequence[Sequence[Lengths]]]
) -> list[Lever]:
    """The levers, first the one that changes the gain most. batches_of: draws steps with another number of
    micro-batches, [step][micro-batch][rank].

    Where nothing is worth it, the gain is that of the fastest of this project's alternatives.
    """
    taken, now = verdict.taken, verdict.now
    others = [r for r in results if r.problem is None and _rank(r) is not None and r is not now and r.alternative.ours]
    if now.problem is not None or not others:
        return []
    if taken is now:
        taken = max(others, key=lambda r: r.efficiency)
    found = []
    for what, (low, high) in _LEVERS.items():
        values = [_speedup(_scaled(case, what, factor), taken, now) for factor in (low, high)]
        found.append(Lever(f"{what} times {low:g} or {high:g}", taken.alternative.name, *values))
    count = case.micro_batches
    fewer, more = max(1, count // 2), count * 2
    values = [_speedup_with(micro_batches, case, batches_of, taken, now) for micro_batches in (fewer, more)]
    found.append(Lever(f"{fewer} or {more} micro-batches", taken.alternative.name, *values))
    known = [lever for lever in found if math.isfinite(lever.low) and math.isfinite(lever.high)]
    return sorted(known, key=lambda lever: -abs(lever.high - lever.low))


def _speedup_with(
    micro_batches: int, case: Case, batches_of: Callable[[int], Sequence[Sequence[Lengths]]], taken: Result,
    now: Result,
) -> float:  # fmt: skip
    try:
        batches = batches_of(micro_batches)
    except ArgumentError:  # fewer batches than that were given
        return math.nan
    return _speedup(replace(case, batches=batches), taken, now)


def _rank(result: Result) -> int | None:
    key = result.alternative.key
    return next((i for i, start in enumerate(_CHANGE) if key.startswith(start)), None)


def _scaled(case: Case, what: str, factor: float) -> Case:
    planning = case.planning
    if what == "gamma":
        return replace(case, planning=replace(planning, gamma=planning.gamma * factor))
    fields = ("flops_per_s",) if what == "rate" else ("node_bytes_per_s", "network_bytes_per_s")
    cluster = planning.cluster.replace(**{name: getattr(planning.cluster, name) * factor for name in fields})
    return replace(case, planning=replace(planning, cluster=cluster))


def _speedup(case: Case, taken: Result, now: Result) -> float:
    """How many times as fast taken is as now on another draw; NaN where one of the two is not possible there."""
    results = [simulate(result.alternative, case) for result in (taken, now)]
    if any(result.problem is not None for result in results):
        return math.nan
    return gain(*results)[0]
