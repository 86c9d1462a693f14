"""The ways to run a simulated step that are measured beside each other, and the plans of each. Imports no torch.

Buckets and the time budget choose their samples with the code that `knapformer doctor` predicts with; static sequence
parallelism is planned as there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from knapformer import Plan, WorkloadModel, plan_home, plan_home_bags
from knapformer.tools.doctor.alternatives import Alternative, Draw, Setting, baselines
from knapformer.tools.report import NO_BALANCER, PLANNED_STEP
from knapformer.tools.simulate.data import StepData
from knapformer.tools.simulate.settings import SimulationSettings

EQUAL_LENGTHS = "equal lengths"  # as much work, in sequences that leave nothing to balance


def others(settings: SimulationSettings) -> list[Alternative]:
    """The alternatives that settings.ways names."""
    return [alternative for alternative in baselines(settings.num_ranks) if alternative.key in settings.ways]


def variant_names(settings: SimulationSettings) -> list[str]:
    """The others are compared with the first."""
    planned = [] if settings.micro_batches is None else [PLANNED_STEP]
    equal = [EQUAL_LENGTHS] if settings.equal_lengths else []
    return [NO_BALANCER, *(of.name for of in others(settings)), *settings.topologies, *planned, *equal]


@dataclass(frozen=True)
class WayStep:
    """What one way gives the ranks to compute in a step, before a balancer in the model moves any of it.

    followed: for each micro-batch the plan that the balancer follows; None: the balancer makes its own, or there is no
    balancer. own_share: share of the work that is not padding. same_samples: whether it computes the drawn samples.
    """

    data: StepData
    followed: Sequence[Plan] | None = None
    own_share: float = 1.0
    same_samples: bool = True


class Variants:
    """All ways of one simulation, in all of its steps. Every rank builds the same ones."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._drawn = [settings.draw(step) for step in range(settings.num_warmup_steps + settings.num_steps)]
        self._others = {of.name: self._static(of.degree) if of.degree else self._of(of) for of in others(settings)}

    def ways(self, step: int) -> dict[str, WayStep]:
        """What each variant computes in a step, by the variant's name."""
        settings, drawn = self._settings, self._drawn[step]
        of = dict.fromkeys(variant_names(settings), WayStep(drawn))
        of |= {name: steps[step] for name, steps in self._others.items()}
        if PLANNED_STEP in of:
            of[PLANNED_STEP] = WayStep(drawn.as_planned(settings.plan_step(drawn)))
        if EQUAL_LENGTHS in of:
            of[EQUAL_LENGTHS] = WayStep(drawn.of_equal_lengths(WorkloadModel(settings.gamma)), same_samples=False)
        return of

    def plans(self, step: int) -> dict[str, Sequence[Plan]]:
        """The plan of each micro-batch, by variant: the same as the ranks made, since equal input gives equal plans."""
        of: dict[str, Sequence[Plan]] = {}
        settings = self._settings
        for name, way in self.ways(step).items():
            lens = [way.data.seq_lens(k) for k in range(settings.micro_batches or 1)]
            if way.followed is not None:
                of[name] = way.followed
            elif name in settings.topologies:
                of[name] = [settings.plan(of_ranks, name) for of_ranks in lens]
            else:
                alone = f"g1n{settings.num_ranks}"
                of[name] = [plan_home(settings.plan(of_ranks, alone, max_tokens_per_rank=0)) for of_ranks in lens]
        return of

    def _static(self, degree: int) -> list[WayStep]:
        """The ranks of a group share all sequences that they have drawn, and route the tokens to each other."""
        settings = self._settings
        topology = f"g{degree}n{settings.num_ranks // degree}"

        def followed(data: StepData, micro_batch: int) -> Plan:
            planned = settings.plan(data.seq_lens(micro_batch), topology, solver="greedy", max_tokens_per_rank=0)
            return plan_home_bags(planned)

        return [WayStep(data, [followed(data, k) for k in range(settings.micro_batches or 1)]) for data in self._drawn]

    def _of(self, alternative: Alternative) -> list[WayStep]:
        """Steps of other samples, put together by the alternative from the lengths that were given or drawn."""
        settings, micro_batches = self._settings, self._settings.micro_batches or 1
        lens = [data.seq_lens_of_step() for data in self._drawn]
        setting = Setting(
            num_ranks=settings.num_ranks,
            batch_size=max(1, round(statistics.fmean(len(of) for ranks in lens for of in ranks) / micro_batches)),
            micro_batches=micro_batches,
            d_model=settings.model.d_model,
            gamma=settings.gamma,
            cluster=settings.cluster,
            model=settings.trained(),
            max_tokens=settings.max_tokens_per_rank,
        )
        pool = settings.lengths or [n for ranks in lens for of in ranks for n in of]
        steps = alternative.steps(Draw(setting, lens, pool, settings.seed))
        ways = []
        for number, step in zip(range(len(lens)), steps, strict=False):
            of_ranks = [[plan.chunk_lens[rank] for plan in step.plans] for rank in range(settings.num_ranks)]
            data = settings.of_lengths(number, of_ranks)
            ways.append(WayStep(data, own_share=step.work_s / step.plan_work_s, same_samples=False))
        return ways
