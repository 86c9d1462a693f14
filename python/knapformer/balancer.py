"""SequenceBalancer: plans a training step, and moves its tensors. Needs torch.

The work is done in C++ (`knapformer._torch`). What has to be Python are the process groups, which torch.distributed
makes, and what launchers say of nodes (`groups`, `node_topology`).
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import knapformer._torch as _torch
from knapformer._core import Plan
from knapformer._torch import PlanningAhead, Samples
from knapformer.cost import Cost, CostSettings
from knapformer.groups import bag_group, check_initialized, cpu_group
from knapformer.node_topology import node_topology
from knapformer.step import Attend, Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

Lengths: TypeAlias = Iterable[SupportsIndex] | Tensor


class SequenceBalancer(_torch.SequenceBalancer):
    """Balances the work of data-parallel ranks: tokens move at the start of the model, and back at its end.

        balancer = SequenceBalancer("g8/4/2/1n1", d_model=3072)
        plan = balancer.plan_routing(seq_lens)                # every step
        chunk_lens, x, features = balancer.route(x, features)
        for block in blocks:
            ...
            o = balancer.attention(q, k, v, attend)           # in flat bags also: pre_attn, attend, post_attn
        seq_lens, x = balancer.reverse_route(x)

    topology: text such as "g1n2+g2n1" (flat bags) or "g8/4/2/1n1" (in each bag of 8 a sequence is shared by 8, 4, 2 or
        1 of its ranks), repeated over the ranks of `group`. None: a nested bag for each node, of its ranks, as
        torchrun, Slurm or MPI count them in the environment. `knapformer.rank_topologies` names the best one for a
        sample of lengths.
    cost, settings: a `Cost`, or its fields as keyword arguments.
    group: the ranks that balance among each other; all of them make the balancer. None: the default group, or this
        process alone without torch.distributed (ArgumentError if WORLD_SIZE says otherwise). It may be shared with
        others (FSDP), as long as all ranks call into it in the same order.
    solver: "balanced" (None); or, for flat topologies, "greedy", the published code's, or "greedy_remaining", the
        published text's.
    max_tokens_per_rank: as in `knapformer.plan`. Planning lengths that cannot keep it raises ArgumentError on every
        rank; other lengths are planned as before.

    route, reverse_route, pre_attn, post_attn and attention are those of `Step`, by the step in force: see there.

    Lengths come back as int32 CPU tensors, the same object all through a step: `max()` and sums do not wait for an
    accelerator, and one non-blocking copy a step brings to the device what a varlen kernel needs there.

    Ranks that disagree, a call out of order, or a tensor that does not fit raise ArgumentError (a ValueError) or
    StateError (a RuntimeError) on every rank. The balancer cannot be used after that. If ranks were already waiting for
    each other, its groups cannot be used either.
    """

    def __init__(
        self,
        topology: str | None = None,
        cost: Cost | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        solver: str | None = None,
        max_tokens_per_rank: int = 0,
        **settings: Unpack[CostSettings],
    ) -> None:
        if group is None:
            check_initialized("group")
            group = dist.group.WORLD if dist.is_initialized() else None
        _release_groups_at_exit(os.getpid())
        self.cost = Cost.of(cost, settings)
        super().__init__(
            node_topology(group) if topology is None else topology, self.cost, solver, max_tokens_per_rank,
            group, lambda ranks: bag_group(group, [int(rank) for rank in ranks]), lambda: cpu_group(group),
        )  # fmt: skip

    def plan_routing(
        self,
        seq_lens: Lengths,
        d_model: SupportsIndex | None = None,
        masks: Iterable[str] | None = None,
        *,
        micro_batches: SupportsIndex = 1,
        work: Iterable[SupportsFloat] | None = None,
    ) -> Plan:
        """Learns the lengths of all ranks' sequences, and plans where their tokens go. The step is then in force, until
        the next plan.

        seq_lens: tokens of each of this rank's sequences, at least 1 each; a list or an integer tensor (a tensor on an
            accelerator costs a wait for the accelerator). May be empty.
        d_model: width of the blocks, in features; the same on all ranks. None: the cost's.
        masks: one for each of these sequences, as in `knapformer.attention_pairs`. None: the cost's mask.
        micro_batches: as in `knapformer.plan`, the same on all ranks: the sequences are those of an optimizer step,
            whose micro-batches are planned together. Micro-batch k computes plan.home_sequences(rank, k) of this rank's
            sequences: pack these, call follow(plan, k), and go on; nothing is in force before.
        work: the work of each of these sequences, as in `knapformer.plan`, in place of what the formula gives for its
            length; from every rank that has sequences, or from none. With given work, observe learns only the speeds of
            ranks.

        Returns the Plan, the same on all ranks. Lengths that cannot keep max_tokens_per_rank raise ArgumentError on all
        ranks; then no plan is in force until the next one is made.

        Collective over the balancer's group, one collective; on CPU tensors where the group has a CPU backend.
        """
        d_model = self.cost.d_model if d_model is None else d_model
        return super().plan_routing(seq_lens, d_model, masks, micro_batches, work)

    def start_planning(
        self,
        seq_lens: Lengths,
        d_model: SupportsIndex | None = None,
        *,
        micro_batches: SupportsIndex = 1,
        ended: bool = False,
        failure: str | None = None,
        masks: Iterable[str] | None = None,
        work: Iterable[SupportsFloat] | None = None,
        samples: Samples | None = None,
    ) -> PlanningAhead:
        """The first half of plan_routing, for a step to come: launches the gather of lengths and returns.

        The rest of planning runs on a separate thread. Hand the returned object to finish_planning, on all ranks or
        none.

        ended: this rank's data has ended (PlanningAhead.num_ended).
        failure: why this rank's data has failed; then finish_planning raises StateError on all ranks.
        samples: what this rank loaded, in place of seq_lens. Between the halves start_moving(ahead), collective, waits
            for the plan and launches the all-to-all that sends it to the ranks that compute it. After finish_planning,
            finish_moving(ahead), collective, waits for it, once: by micro-batch, the tensors of each chunk on this
            rank, in the order of its rows. Of failed data and refused lengths finish_planning raises the error.

        Collective over the balancer's group, one collective.
        """
        d_model = self.cost.d_model if d_model is None else d_model
        return super().start_planning(seq_lens, d_model, micro_batches, ended, failure, masks, work, samples)

    def finish_planning(self, ahead: PlanningAhead) -> Plan:
        """The second half of plan_routing: waits for the rest of planning. Returns what that returns, and puts in force
        what that does. A plan may be finished again, after others. ArgumentError for an object of another balancer.

        All ranks call it, with what they started together. No collective, except where some rank has more sequences
        than any rank had before.
        """
        return super().finish_planning(ahead)

    def step(self, plan: Plan, micro_batch: SupportsIndex = 0) -> Step:
        """The step of a plan on this rank, whose methods move tensors.

        plan: one that this balancer made. Or one that every rank made by itself, by any settings, from lengths that are
            known before the data is loaded (BalancedBatchSampler.plan): of the balancer's topology and number of ranks,
            the same on all ranks. route takes tokens from the plan's home ranks to their chunks. Where ranks load their
            own chunks, in the order of chunk_lens, nothing is routed, and attention works on these tokens at once.
        micro_batch: of a plan of several.

        All ranks call it with the same. Micro-batches may come in any order, and several times. No collective for a
        plan of this balancer's. For another one an all-gather of a number, for which the next exchange waits: ranks
        whose plans differ raise ArgumentError there, before a token moves.
        """
        return Step(super().step(plan, micro_batch))

    @property
    def current(self) -> Step:
        """The step in force: that of the last plan. StateError where there is none."""
        return Step(super().current)

    def follow(self, plan: Plan | Step, micro_batch: SupportsIndex = 0) -> Plan:
        """Puts a step in force, for the calls after this one: that of a plan, as `step` gives it, or a step that was
        held. Returns the plan of that micro-batch."""
        return super().use(plan if isinstance(plan, Step) else self.step(plan, micro_batch))

    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None, sequence_features: Sequence[Tensor] | None = None
    ) -> tuple[Any, ...]:
        """Step.route of the step in force: (chunk_lens, x, features), and sequence_features where given."""
        return Step(super().current_for("route")).route(x, features, sequence_features)

    def reverse_route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Step.reverse_route of the step in force: (seq_lens, x)."""
        seq_lens, x = Step(super().current_for("reverse_route")).reverse_route(x)
        return seq_lens, super().watched(x)

    def pre_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: str = "full") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step.pre_attn of the step in force: (seq_lens, q, k, v)."""
        return Step(super().current_for("pre_attn")).pre_attn(q, k, v, mask)

    def post_attn(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """Step.post_attn of the step in force: (chunk_lens, o)."""
        chunk_lens, o = Step(super().current_for("post_attn")).post_attn(o)
        return chunk_lens, super().watched(o)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as Step.attention
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None, mask: str | None = None
    ) -> Tensor:
        """Step.attention of the step in force: o."""
        return super().watched(Step(super().current_for("attention")).attention(q, k, v, attend, mask))

    def observe(self, seconds: SupportsFloat) -> None:
        """Feeds back how long this rank was busy with the step of the last plan: its forward and backward passes,
        without waiting for other ranks.

        Of a step of micro-batches (BalancedStepLoader, say): with those that were in force since the last call, so
        call it after each, or once after all of them. The seconds reach all ranks with the lengths of the next plan,
        and all learn the same gamma and speeds from them, which later plans follow. Warns once where the given workload
        model misses the observed times by more than 10 %, and once where seconds are 100 times off those of the other
        ranks and steps (milliseconds, say): such times are left out. A rank may skip steps. Raises ArgumentError where
        seconds are not from 1e-12 to 1e12, StateError before plan_routing. Not collective.
        """
        super().observe(seconds)

    def metrics(self) -> dict[str, int | float]:
        """Metrics for a training loop to log, of the step since the last plan, so far: a flat dict.

        Keys are 'balancer/...', values numbers (wir is infinite where a rank has no work):
        wir, max_over_mean (_before, _after): of the planned work per rank; tokens_before, tokens_after: of this rank;
        tokens_moved, attention_tokens_moved: of all ranks, as Plan has them;
        bytes_sent, num_collectives: of this rank; planning_s: the plan and its tables; waiting_s: how long the host
        waited for other ranks in the balancer's collectives (with tensors on an accelerator the stream waits instead,
        which does not count); gamma, rank_speed: what the plan was made with; given_model_error, learned_model_error:
        of the workload model against what was observed. Not collective.
        """
        return {f"balancer/{name}": value for name, value in super().metrics().items()}

    def report(self, message: str) -> None:
        """Tells the other ranks that this one failed and will not come to the calls they wait in: they raise StateError
        with this message. Not collective.
        """
        super().report(message)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceBalancer:
        """Itself, so that models which hold it may be copied: to make a balancer takes all ranks."""
        return self


@functools.cache
def _release_groups_at_exit(process: int) -> None:
    """A process group has threads until its last reference goes, which may be a balancer's. A thread that needs the
    interpreter after the interpreter's end aborts the process, and a balancer may be destroyed only after that end.

    Once in each process: a process that multiprocessing forks on Python 3.13 begins without the handlers of its parent.
    """
    atexit.register(_torch.release_groups)
