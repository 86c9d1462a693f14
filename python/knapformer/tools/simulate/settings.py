"""What a simulation is asked to do: checked in full before any rank starts. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, Topology, TrainedModel, plan
from knapformer._core import DEFAULT_GAMMA
from knapformer.models.registry import config_to_dict
from knapformer.tools.launch import RunSettings


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(RunSettings):
    """Construction checks how fields go together, and raises ArgumentError, naming one."""

    data: str  # data codes, or the name of a published mix
    topologies: tuple[str, ...]  # each is measured beside "no balancer"
    scale: float = 1.0  # divides the resolutions
    max_text_tokens: int = 392
    num_steps: int = 10
    num_warmup_steps: int = 2
    num_repeats: int = 1  # of every timed step, of which the best counts: for machines that are not idle
    gamma: float | None = None  # None: fitted to this machine before the run
    cluster: Cluster = field(default_factory=Cluster)  # what the planner predicts times with
    solver: str = "balanced"
    seed: int = 0
    keep_exchanges: bool = False  # what attention's exchanges brought is kept: the recomputation repeats none
    peak_tflops: float | None = None  # of one rank's device; with it the results hold HFU
    report_path: str | None = None  # an HTML file, with the last topology's plan of the first timed step

    def __post_init__(self) -> None:
        self.mix().check_divides(self.num_ranks)
        if not self.topologies:
            raise ArgumentError("topology: got none, expected at least one")
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
        lengths = self.seq_lens(0)
        for topology in self.topologies:
            self.plan(lengths, topology, DEFAULT_GAMMA if self.gamma is None else self.gamma)

    def mix(self) -> DataMix:
        return DataMix.parse(self.data, resolution_scale=self.scale, max_text_tokens=self.max_text_tokens)

    def plan(self, seq_lens: list[list[int]], topology: str, gamma: float) -> Plan:
        """As the ranks' balancers plan."""
        planned: Plan = plan(seq_lens, topology, self.model.d_model, masks=self.model.mask, **self.planning(gamma))
        return planned

    def planning(self, gamma: float) -> dict[str, Any]:
        """Arguments of `plan` and of SequenceBalancer."""
        model, recomputes = self.model, self.checkpointing
        trained = TrainedModel(
            num_blocks=model.depth, num_parameters=0.0, recomputes=recomputes, num_heads=model.num_heads
        )
        return {"gamma": gamma, "solver": self.solver, "cluster": self.cluster, "model": trained}

    def seq_lens(self, step: int) -> list[list[int]]:
        """Of each rank, what its balancer plans."""
        mix, ranks = self.mix(), range(self.num_ranks)
        return [[self.model.planned_tokens(sample) for sample in mix.draw(self.seed, step, rank)] for rank in ranks]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **shallow,
            "topologies": list(self.topologies),
            "model": config_to_dict(self.model),
            "cluster": self.cluster.to_dict(),
        }
