"""The ways to run a simulated step that are measured beside each other, and the plans of each. Imports no torch."""

from __future__ import annotations

from knapformer import Plan, WorkloadModel, plan_home
from knapformer.tools.report import NO_BALANCER, PLANNED_STEP
from knapformer.tools.simulate.data import StepData
from knapformer.tools.simulate.settings import SimulationSettings

EQUAL_LENGTHS = "equal lengths"  # as much work, in sequences that leave nothing to balance


def variant_names(settings: SimulationSettings) -> list[str]:
    """The first is what the others are held against."""
    planned = [] if settings.micro_batches is None else [PLANNED_STEP]
    return [NO_BALANCER, *settings.topologies, *planned, *([EQUAL_LENGTHS] if settings.equal_lengths else [])]


def data_of_variants(settings: SimulationSettings, step: int, gamma: float) -> dict[str, StepData]:
    """What the ranks compute, by variant, before a balancer in the model moves any of it."""
    drawn = settings.draw(step)
    of = dict.fromkeys(variant_names(settings), drawn)
    if PLANNED_STEP in of:
        of[PLANNED_STEP] = drawn.as_planned(settings.plan_step(drawn, gamma))
    if EQUAL_LENGTHS in of:
        of[EQUAL_LENGTHS] = drawn.of_equal_lengths(WorkloadModel(gamma))
    return of


def plans_of_variants(settings: SimulationSettings, step: int, gamma: float) -> dict[str, list[Plan]]:
    """The plan of each micro-batch, by variant: those that the ranks made, since equal input gives equal plans."""
    of: dict[str, list[Plan]] = {}
    for name, data in data_of_variants(settings, step, gamma).items():
        lens = [data.seq_lens(k) for k in range(settings.micro_batches or 1)]
        if name in settings.topologies:
            of[name] = [settings.plan(of_ranks, name, gamma) for of_ranks in lens]
        else:
            of[name] = [plan_home(settings.plan(of_ranks, f"g1n{settings.num_ranks}", gamma)) for of_ranks in lens]
    return of
