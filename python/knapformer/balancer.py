"""SequenceBalancer: plans a training step, and moves its tensors. Needs torch.

The work is done in C++ (`knapformer._torch`). What has to be Python are the process groups, which torch.distributed
makes (`groups`), and what launchers say of nodes (`nodes`).
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist

import knapformer._torch as _torch
from knapformer._core import DEFAULT_GAMMA, ArgumentError, Cluster, TrainedModel
from knapformer.groups import bag_group, cpu_group
from knapformer.nodes import node_topology
from knapformer.signatures import show_signatures

show_signatures(_torch)

# On a rank that happens to own no rows, Inductor would drop the exchange from the graph as dead code, and the rank's
# peers would wait for it. So the op is marked as having a side effect: the one on the other ranks.
torch.fx.node.has_side_effect(torch.ops.knapformer.exchange.default)


@torch.library.register_fake("knapformer::exchange")  # type: ignore[untyped-decorator]
def _shapes_of_exchange(tensors: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    """Tracers take all tensors of an operation to be on one device; the host reads parts of an exchange's tables."""
    differentiable, heads, tables, *others = arguments
    beside = [table.to(tensors[0].device) for table in tables]
    shapes: list[torch.Tensor] = torch.ops.knapformer.exchange_shapes(tensors, differentiable, heads, beside, *others)
    return shapes


class SequenceBalancer(_torch.SequenceBalancer):
    """Balances the work of data-parallel ranks: tokens move at the start of the model, and back at its end.

        balancer = SequenceBalancer("g8/4/2/1n1", gamma=0.49)
        plan = balancer.plan_routing(seq_lens, d_model)       # every step
        chunk_lens, x, features = balancer.route(x, features)
        for block in blocks:
            ...
            o = balancer.attention(q, k, v, attend)           # in flat bags also: pre_attn, attend, post_attn
        seq_lens, x = balancer.reverse_route(x)

    topology: text such as "g1n2+g2n1" (flat bags) or "g8/4/2/1n1" (in each bag of 8 a sequence is shared by 8, 4, 2 or
        1 of its ranks), repeated over the ranks of `group`. None: nested bags over the ranks of each node, as
        torchrun, Slurm or MPI count them in the environment. "auto": the balancer takes the best of
        `knapformer.rank_topologies` for the first lengths that it plans, and keeps it; the attribute `topology` then
        has its text. A call of `rank_topologies` can take a larger sample of lengths.
    gamma: cost of a FLOP of attention over that of a FLOP of the matrix products: a number, or a
        `knapformer.Calibration`.
    group: the ranks that balance among each other; all of them make the balancer. None: the default group, or this
        process alone where torch.distributed is not initialised. The group may be shared with others (FSDP), as long as
        all ranks call into it in the same order.
    solver: one of `knapformer.solver_names()`: "balanced", or "greedy" (the published one; flat topologies only).
    effort, cluster, rank_speed, max_tokens_per_rank, num_heads, model: as in `knapformer.plan`. mask: the mask of all
        sequences, as there. Planning lengths that cannot keep max_tokens_per_rank raises ArgumentError on every rank;
        other lengths are planned as before.

    Lengths come back as int32 CPU tensors, the same object all through a step: `max()` and sums do not wait for an
    accelerator, and one non-blocking copy a step brings to the device what a varlen kernel needs there.

    Ranks that disagree, a call out of order, or a tensor that does not fit raise ArgumentError (a ValueError) or
    StateError (a RuntimeError) on every rank. The balancer cannot be used after that. If ranks were already waiting for
    each other, its groups cannot be used either.
    """

    def __init__(
        self,
        topology: str | None = None,
        gamma: SupportsFloat = DEFAULT_GAMMA,
        group: dist.ProcessGroup | None = None,
        *,
        solver: str = "balanced",
        effort: int | str = "default",
        mask: str = "full",
        cluster: Cluster | str | None = None,
        rank_speed: Sequence[float] = (),
        max_tokens_per_rank: int = 0,
        num_heads: int = 0,
        model: TrainedModel | None = None,
        engine: str | None = None,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        _release_groups_at_exit(os.getpid())
        if topology is None:
            try:
                topology = node_topology(group)
            except ArgumentError as error:
                _torch.refuse_balancer(group, str(error))
                raise
        super().__init__(
            topology,
            gamma=gamma,
            solver=solver,
            effort=effort,
            mask=mask,
            cluster=cluster,
            rank_speed=rank_speed,
            max_tokens_per_rank=max_tokens_per_rank,
            num_heads=num_heads,
            model=model,
            engine=engine,
            group=group,
            make_bag_group=lambda ranks: bag_group(group, [int(rank) for rank in ranks]),
            make_cpu_group=lambda: cpu_group(group),
        )

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
