"""What a simulation is asked to do: checked in full before any rank starts. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from knapformer import ArgumentError, ClusterModel, DataMix, Plan, Topology, plan
from knapformer.calibrate.calibration import cluster_fields
from knapformer.models.config import ModelConfig, config_from_dict, config_to_dict, mask_factor

DTYPE_NAMES = ("bf16", "fp32", "fp64")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class SimulationSettings:
    """Construction checks every field and raises ArgumentError, naming it."""

    data: str  # data codes, or the name of a published mix
    topologies: tuple[str, ...]  # each is measured beside "no balancer"
    num_ranks: int
    model: ModelConfig
    model_name: str
    scale: float = 1.0  # divides the resolutions
    max_text_tokens: int = 392
    num_steps: int = 10
    num_warmup_steps: int = 2
    num_repeats: int = 1  # of every timed step, of which the best counts: for machines that are not idle
    gamma: float | None = None  # None: fitted to this machine before the run
    cluster: ClusterModel = field(default_factory=ClusterModel)  # what the planner predicts times with
    solver: str = "balanced"
    seed: int = 0
    dtype: str | None = None  # None: bf16 on CUDA, fp32 on the CPU
    device: str = "auto"
    checkpointing: bool = True
    keep_exchanges: bool = False  # what attention's exchanges brought is kept: the recomputation repeats none
    threads: int = 1  # per rank, on the CPU
    peak_tflops: float | None = None  # of one rank's device; with it the results hold HFU
    json_path: str | None = None
    report_path: str | None = None  # an HTML file, with the last topology's plan of the first timed step

    def __post_init__(self) -> None:
        self.mix().check_divides(self.num_ranks)
        if not self.topologies:
            raise ArgumentError("topology: got none, expected at least one")
        for i, topology in enumerate(self.topologies):
            canonical = str(Topology(topology, self.num_ranks))
            if canonical in (str(Topology(other)) for other in self.topologies[:i]):
                raise ArgumentError(f"topology: got {topology!r} twice, expected each once")
        for name, least in (("num_steps", 1), ("num_warmup_steps", 0), ("num_repeats", 1), ("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 1 << (64 if name == "seed" else 31):
                raise ArgumentError(f"{name}: got {value!r}, expected an integer >= {least}")
        for name, zero_allowed in (("gamma", True), ("peak_tflops", False)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or (zero_allowed and value == 0))):
                raise ArgumentError(
                    f"{name}: got {value!r}, expected a finite number {'>=' if zero_allowed else '>'} 0"
                )
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise ArgumentError(f"dtype: got {self.dtype!r}, expected one of {', '.join(DTYPE_NAMES)}")
        if self.device not in DEVICES:
            raise ArgumentError(f"device: got {self.device!r}, expected one of {', '.join(DEVICES)}")

        if self.keep_exchanges and not self.checkpointing:
            raise ArgumentError(
                "keep_exchanges: got True, expected it with checkpointing, without which none is repeated"
            )

        # What only a plan can tell, such as a solver that does not know nested bags.
        lengths = self.mix().draw_lengths(self.seed, 0, self.num_ranks)
        for topology in self.topologies:
            self.plan(lengths, topology, 1.0 if self.gamma is None else self.gamma)

    def mix(self) -> DataMix:
        return DataMix.parse(self.data, resolution_scale=self.scale, max_text_tokens=self.max_text_tokens)

    def plan(self, seq_lens: list[list[int]], topology: str, gamma: float) -> Plan:
        """As the ranks' balancers plan."""
        d_model, factor = self.model.d_model, self.mask_factor
        return plan(seq_lens, topology, d_model, gamma, self.solver, mask_factor=factor, cluster=self.cluster)

    @property
    def mask_factor(self) -> float:
        return mask_factor(self.model)

    def to_dict(self) -> dict[str, Any]:
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **shallow,
            "topologies": list(self.topologies),
            "model": config_to_dict(self.model),
            "cluster": cluster_fields(self.cluster),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> SimulationSettings:
        """Of what to_json wrote, in a rank that was started with it."""
        fields = json.loads(text)
        read = {
            "topologies": tuple(fields["topologies"]),
            "model": config_from_dict(fields["model"]),
            "cluster": ClusterModel(**fields["cluster"]),
        }
        return SimulationSettings(**{**fields, **read})
