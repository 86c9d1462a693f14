"""What a simulation is asked to do: checked in full before any rank starts. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, StepPlan, Topology, TrainedModel, plan
from knapformer._core import DEFAULT_GAMMA
from knapformer.models.registry import config_to_dict
from knapformer.tools.cli_args import batches_of_step
from knapformer.tools.launch import RunSettings
from knapformer.tools.simulate.data import SeededSample, StepData


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(RunSettings):
    """Construction checks how fields go together, and raises ArgumentError, naming one."""

    data: str  # data codes, or the name of a published mix
    topologies: tuple[str, ...]  # each is measured beside "no balancer", with the balancer in the model
    micro_batches: int | None = None  # of an optimizer step, which is then also planned whole; None: one, and it is not
    max_tokens_per_rank: int = 0  # of a step planned whole; 0: what the fullest rank draws for a micro-batch
    equal_lengths: bool = False  # as much work in sequences of equal length is measured as well
    scale: float = 1.0  # divides the resolutions
    max_text_tokens: int = 392
    num_steps: int = 10
    num_warmup_steps: int = 2
    num_repeats: int = 1  # of every timed step, of which the best counts: for machines that are not idle
    gamma: float | None = None  # None: fitted to this machine before the run
    cluster: Cluster = field(default_factory=Cluster)  # what the planner predicts times with
    shard_ranks: int = TrainedModel().shard_ranks
    predicts: bool = False  # the cluster is this machine: measured steps stand beside predicted ones
    solver: str = "balanced"
    seed: int = 0
    keep_exchanges: bool = False  # what attention's exchanges brought is kept: the recomputation repeats none
    peak_tflops: float | None = None  # of one rank's device; with it the results hold HFU
    report_path: str | None = None  # an HTML file, with the last topology's plan of the first timed step

    def __post_init__(self) -> None:
        self.mix().check_divides(self.num_ranks)
        if not self.topologies and self.micro_batches is None:
            raise ArgumentError("topology: got none, expected at least one, or micro_batches")
        for i, topology in enumerate(self.topologies):
            canonical = str(Topology(topology, self.num_ranks))
            if canonical in (str(Topology(other)) for other in self.topologies[:i]):
                raise ArgumentError(f"topology: got {topology!r} twice, expected each once")
        if self.model.text_limit is not None and self.max_text_tokens > self.model.text_limit:
            expected = f"at most {self.model.text_limit}, which the model takes"
            raise ArgumentError(f"max_text_tokens: got {self.max_text_tokens}, expected {expected}")
        if self.keep_exchanges and not self.checkpointing:
            raise ArgumentError(
                "keep_exchanges: got True, expected it with checkpointing, without which none is repeated"
            )

        # What only a plan can tell, such as a solver that does not know nested bags.
        first = self.draw(0)
        gamma = DEFAULT_GAMMA if self.gamma is None else self.gamma
        for topology in self.topologies:
            self.plan(first.seq_lens(0), topology, gamma)
        if self.micro_batches is not None:
            self.plan_step(first, gamma)

    def mix(self) -> DataMix:
        return DataMix.parse(self.data, resolution_scale=self.scale, max_text_tokens=self.max_text_tokens)

    def draw(self, step: int) -> StepData:
        """What the ranks draw in an optimizer step: in each micro-batch the next batch of the mix."""
        mix, batches = self.mix(), batches_of_step(step, self.micro_batches or 1)
        first_seed = (self.seed * 1_000_003 + step) * 65_537
        number = 0
        samples: list[list[list[SeededSample]]] = []
        for rank in range(self.num_ranks):
            samples.append([])
            for batch in batches:
                sizes = mix.draw(self.seed, batch, rank)
                seeds = ((first_seed + number + i) % (1 << 63) for i in range(len(sizes)))
                samples[-1].append([SeededSample(*of) for of in zip(sizes, seeds, strict=True)])
                number += len(sizes)
        return StepData(self.model, samples)

    def plan(self, seq_lens: list[list[int]], topology: str, gamma: float) -> Plan:
        """Of a micro-batch, as the ranks' balancers plan."""
        planned: Plan = plan(seq_lens, topology, self.model.d_model, masks=self.model.mask, **self.planning(gamma))
        return planned

    def plan_step(self, data: StepData, gamma: float) -> StepPlan:
        """Of an optimizer step, as BalancedBatchSampler plans: whole samples, a sample on every rank in every
        micro-batch."""
        of = self.planning(gamma)
        # What takes as long in every plan would hide how far a plan is from the best.
        of |= {"model": of["model"].replace(routed=False), "cluster": self.cluster.replace(fixed_s=0.0)}
        planned: StepPlan = plan(
            data.seq_lens_of_step(), f"g1n{self.num_ranks}", self.model.d_model, masks=self.model.mask,
            max_tokens_per_rank=self.max_tokens_per_rank or data.max_tokens(),
            micro_batches=self.micro_batches or 1, **of,
        )  # fmt: skip
        return planned.fill_ranks()

    def planning(self, gamma: float) -> dict[str, Any]:
        """Arguments of `plan` and of SequenceBalancer."""
        model, recomputes = self.model, self.checkpointing
        trained = TrainedModel(
            num_blocks=model.depth, num_parameters=0.0, recomputes=recomputes, num_heads=model.num_heads
        )
        return {"gamma": gamma, "solver": self.solver, "cluster": self.cluster, "model": trained}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **shallow,
            "topologies": list(self.topologies),
            "model": config_to_dict(self.model),
            "cluster": self.cluster.to_dict(),
        }
