"""Which alternative to take, what it gains, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from knapformer.tools.doctor.alternatives import Case, Result, gain, simulate

WORTH = 0.03  # a gain below this is none
# Factors by which published figures may be off: gamma, the compute rate, and the links' bandwidth.
_UNSURE = {"gamma": (0.75, 1.25), "rate": (0.75, 1.25), "bandwidth": (0.5, 2.0)}
NUM_UNSURE = sum(2 * len(factors) for factors in _UNSURE.values())  # simulations
# The least change comes first; alternatives that change which samples a step has are not advised.
_CHANGE = ("as_drawn", "one_by_one", "longest_first", "sampler", "static", "bags")


@dataclass(frozen=True)
class Verdict:
    """now, taken: what was compared; equal where nothing is better. text: a sentence, for somebody who has read nothing
    else. speedup: how many times as fast as now; 1: equal. low, high: the range of speedup, given the draw of data (two
    standard errors) and the uncertainty of gamma and the cluster; None where only one step was simulated, which tells
    nothing of the draw. faster: alternatives that are faster than taken but not advised, because they change which
    samples a step has; the fastest first.
    """

    now: Result
    taken: Result
    text: str
    speedup: float = 1.0
    low: float | None = 1.0
    high: float | None = 1.0
    faster: tuple[Result, ...] = ()

    @property
    def is_worth_it(self) -> bool:
        return self.taken is not self.now

    def aside(self) -> str:
        """A sentence on what is faster but not advised; '' where nothing is."""
        if not self.faster:
            return ""
        named = ", ".join(f"{r.alternative.name} {gain(r, self.now)[0]:.2f} times" for r in self.faster)
        return f"Faster, but a step then has other samples: {named}. Below is what each does to the training."


def decide(results: Sequence[Result], now: Result, case: Case, job: str) -> Verdict:
    """Takes the alternative with the least change among those that are as fast as the fastest, within WORTH. job: what
    is trained, and on how many ranks."""
    verdict = _of_same_samples(results, now, case, job)
    if now.problem is not None:
        return verdict
    others = [r for r in results if r.problem is None and _rank(r) is None]
    faster = [r for r in others if r.efficiency > verdict.taken.efficiency * (1 + WORTH)]
    return replace(verdict, faster=tuple(sorted(faster, key=lambda r: -r.efficiency)))


def _of_same_samples(results: Sequence[Result], now: Result, case: Case, job: str) -> Verdict:
    what, limit = now.alternative.name, f"--max-tokens-per-rank {case.max_tokens}"
    advised = [r for r in results if r.problem is None and _rank(r) is not None]
    if not advised:
        shortest = next((r.problem for r in reversed(results) if r.problem), "no alternative can be planned")
        why = f"keeps {limit}" if case.limit_is_given else "fits in memory"
        return Verdict(now, now, f"No alternative {why}: {shortest} ({job}).")
    fastest = max(advised, key=lambda r: r.efficiency)
    close = [r for r in advised if r.efficiency >= fastest.efficiency / (1 + WORTH)]
    taken = min(close, key=lambda r: _rank(r) or 0)
    name = taken.alternative.advice or taken.alternative.name
    if now.problem is not None:
        of_memory = "" if case.limit_is_given else " in memory"
        return Verdict(now, taken, f"Take {name} for {job}: {what} {case.too_much}{of_memory} ({now.problem}).")
    speedup, error = gain(taken, now)
    num_steps = len(case.batches)
    is_known = num_steps > 1  # of one step error is NaN
    few = "" if is_known else " One step is too few to say how sure that is."
    if speedup >= 1 + WORTH and speedup - 2 * error <= 1:
        span = f"{speedup:.2f} times as fast as {what}, give or take {2 * error:.2f}"
        text = f"Not known for {job}: {name} is {span}, over {num_steps} steps; more steps would tell (--steps)."
        return Verdict(now, now, text)
    if taken is now or speedup < 1 + WORTH:
        worth = f"no alternative that trains on the same samples is {WORTH:.0%} faster than {what}"
        one = 1.0 if is_known else None
        return Verdict(now, now, f"Not worth it for {job}: {worth}.{few}", 1.0, one, one)
    low = high = None
    if is_known:
        seen = [speedup - 2 * error, speedup + 2 * error]
        for setting, factors in _UNSURE.items():
            seen += [_speedup(_scaled(case, setting, factor), taken, now) for factor in factors]
        sure = [value for value in seen if math.isfinite(value)]
        low, high = min(sure), max(sure)
    span = f" ({low:.2f} to {high:.2f})" if is_known else ""
    text = (
        f"Take {name}: training {job} is then {speedup:.2f} times as fast as with {what}{span}, {1 - 1 / speedup:.0%} "
        f"fewer GPU-hours.{few}"
    )
    return Verdict(now, taken, text, speedup, low, high)


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
