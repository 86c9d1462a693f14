"""What a simulation is asked to do: checked in full before any rank starts. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from knapformer import ArgumentError, Cluster, DataMix, Plan, Sample, StepPlan, Topology, TrainedModel, plan
from knapformer._core import DEFAULT_GAMMA
from knapformer.tools.cli_args import batches_of_step
from knapformer.tools.launch import RunSettings
from knapformer.tools.simulate.data import SeededSample, StepData

#: Ways without this project: keys of knapformer.tools.doctor.alternatives.baselines.
WAYS = ("buckets", "time_budget", "static_2", "static_4", "static_8")


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(RunSettings):
    """Construction checks that the fields fit together; its ArgumentError names the field that does not."""

    data: str  # data codes, the name of a published mix, or of the file that `lengths` are from
    lengths: tuple[int, ...] = ()  # in tokens: samples are drawn from these at random, not from a mix
    batch_size: int = 4  # with `lengths`: of a rank and micro-batch
    ways: tuple[str, ...] = ()  # of WAYS, measured as well
    topologies: tuple[str, ...]  # each is measured beside "no balancer", with the balancer in the model
    micro_batches: int | None = None  # of a step, which is then also planned whole; None: one, not planned whole
    # Of every plan or, with micro_batches, of steps planned whole alone (0: none, and for those what the fullest rank
    # draws for a micro-batch); of buckets and time budgets (0: none).
    max_tokens_per_rank: int = 0
    equal_lengths: bool = False  # as much work in sequences of equal length is measured as well
    scale: float = 1.0  # divides the resolutions
    max_text_tokens: int = 392
    num_steps: int = 10
    num_warmup_steps: int = 2
    num_repeats: int = 1  # of every timed step, the fastest of which counts: for machines that are not idle
    gamma: float = DEFAULT_GAMMA
    cluster: Cluster = field(default_factory=Cluster)  # what the planner predicts times with
    shard_ranks: int = TrainedModel().shard_ranks
    predicts: bool = False  # `cluster` describes this machine, so predicted steps are shown beside measured ones
    solver: str = "balanced"
    seed: int = 0
    keep_exchanges: bool = False  # keeps what attention's exchanges received: the recomputation repeats none
    peak_tflops: float | None = None  # of one rank's device; with it the results hold HFU
    report_path: str | None = None  # an HTML file, with the first timed plan of the last variant of the drawn samples

    def __post_init__(self) -> None:
        if not self.lengths:
            self.mix().check_divides(self.num_ranks)
        if not self.topologies and self.micro_batches is None and not self.ways:
            raise ArgumentError("topology: got none, expected at least one, micro_batches, or ways")
        for way in self.ways:
            known = [name for name in WAYS if not name.startswith("static_") or self.num_ranks % int(name[7:]) == 0]
            if way not in known or self.ways.count(way) > 1:
                expected = f"each once of {', '.join(known)} on {self.num_ranks} ranks"
                raise ArgumentError(f"way: got {way!r}, expected {expected}")
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

        # Some errors show only in planning, such as a solver that does not support nested bags.
        # A limit of tokens may be kept in one step and not in another.
        for step in range(self.num_warmup_steps + self.num_steps if self.max_tokens_per_rank else 1):
            drawn = self.draw(step)
            for topology in self.topologies:
                self.plan(drawn.seq_lens(0), topology)
            if self.micro_batches is not None:
                self.plan_step(drawn)

    def mix(self) -> DataMix:
        return DataMix.parse(self.data, resolution_scale=self.scale, max_text_tokens=self.max_text_tokens)

    def draw(self, step: int) -> StepData:
        """What the ranks draw in an optimizer step: in each micro-batch the next batch of the mix."""
        batches = batches_of_step(step, self.micro_batches or 1)
        if self.lengths:
            return self.of_lengths(
                step,
                [
                    [random.Random(f"{self.seed} {k} {rank}").choices(self.lengths, k=self.batch_size) for k in batches]
                    for rank in range(self.num_ranks)
                ],
            )
        mix = self.mix()
        return self._seeded(
            step, [[mix.draw(self.seed, batch, rank) for batch in batches] for rank in range(self.num_ranks)]
        )

    def of_lengths(self, step: int, lengths: list[list[list[int]]]) -> StepData:
        """Samples of these lengths, [rank][micro-batch][sample], with a tenth of the length as text tokens."""

        def size(length: int) -> Sample:
            text_tokens = length // 10 if self.model.text_limit is None else min(length // 10, self.model.text_limit)
            return Sample(text_tokens, length if self.model.text_beside else length - text_tokens)

        return self._seeded(step, [[list(map(size, lens)) for lens in of_rank] for of_rank in lengths])

    def _seeded(self, step: int, sizes: list[list[list[Sample]]]) -> StepData:
        """Gives each sample the seed of its tensors. sizes: [rank][micro-batch][sample]."""
        first_seed = (self.seed * 1_000_003 + step) * 65_537
        seeds = (seed % (1 << 63) for seed in itertools.count(first_seed))
        return StepData(
            self.model,
            [[[SeededSample(self.model.possible(s), next(seeds)) for s in of] for of in of_rank] for of_rank in sizes],
        )

    def plan(self, seq_lens: list[list[int]], topology: str, **others: Any) -> Plan:
        """The plan of a micro-batch as the ranks' balancers make it, with `others` in place of their arguments."""
        keep_to = self.planning() | others
        planned: Plan = plan(seq_lens, topology, self.model.d_model, masks=self.model.mask, **keep_to)
        return planned

    def plan_step(self, data: StepData) -> StepPlan:
        """The plan of an optimizer step as BalancedBatchSampler makes it: whole samples, where possible at least one on
        every rank in every micro-batch."""
        of = self.planning()
        # A fixed time, which is the same in every plan, would hide how far a plan is from the best.
        of |= {"model": of["model"].replace(routed=False), "cluster": self.cluster.replace(fixed_s=0.0)}
        of |= {"max_tokens_per_rank": self.max_tokens_per_rank or data.max_tokens()}
        planned: StepPlan = plan(
            data.seq_lens_of_step(), f"g1n{self.num_ranks}", self.model.d_model, masks=self.model.mask,
            micro_batches=self.micro_batches or 1, **of,
        )  # fmt: skip
        return planned.fill_ranks()

    def planning(self) -> dict[str, Any]:
        """Arguments of `plan` and of SequenceBalancer."""
        limit = self.max_tokens_per_rank if self.micro_batches is None else 0
        return {
            "gamma": self.gamma, "solver": self.solver, "cluster": self.cluster, "model": self.trained(),
            "max_tokens_per_rank": limit,
        }  # fmt: skip

    def trained(self) -> TrainedModel:
        model = self.model
        return TrainedModel(
            num_blocks=model.depth,
            num_parameters=0.0,
            recomputes=self.checkpointing,
            num_heads=model.num_heads,
            mode=self.mode,
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **shallow,
            "lengths": len(self.lengths),
            "ways": list(self.ways),
            "topologies": list(self.topologies),
            "model": self.model.to_dict(),
            "cluster": self.cluster.to_dict(),
        }
