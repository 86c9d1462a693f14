"""SequenceBalancer: plans a training step, and moves its tensors. Needs torch.

The work is C++ (`knapformer._torch`). What is here is what has to be Python: the groups of bags are made by
`torch.distributed.new_group`, and attention is the caller's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer import _torch

# (q, k, v, seq_lens) -> o, over packed sequences. q: (tokens, heads, head_dim); k, v: (tokens, kv heads, head_dim);
# seq_lens: int32 CPU; o: (tokens, heads, ...).
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# An inductor graph of a rank that happens to own no rows would drop the exchange as dead code, and its peers would wait
# for it: the op has a side effect, on others.
torch.fx.node.has_side_effect(torch.ops.knapformer.exchange.default)


class SequenceBalancer(_torch.SequenceBalancer):
    """Balances the work of data-parallel ranks: tokens move at the start of the model, and back at its end.

        balancer = SequenceBalancer("g2n1", gamma=0.49)
        plan = balancer.plan_routing(seq_lens, d_model)       # every step
        chunk_lens, x, features = balancer.route(x, features)
        for block in blocks:
            ...
            o = balancer.attention(q, k, v, attend)           # or pre_attn, attend, post_attn
        seq_lens, x = balancer.reverse_route(x)

    topology: text such as "g1n2+g2n1", repeated over the ranks of `group`.
    gamma: cost of attention's FLOPs over that of the matrix products (`knapformer.fit_workload` measures it).
    group: whose ranks balance among each other; all of them make the balancer. None: the default group, or this process
        alone where torch.distributed is not initialised. It may be shared with others (FSDP), as long as all ranks call
        into it in the same order.
    mask_factor: share of the (query, key) pairs that the attention mask leaves: 1 full, 0.5 causal.
    solver: one of `knapformer.solver_names()`.

    Lengths come back as int32 CPU tensors, the same object all through a step: `max()` and sums cost no wait for an
    accelerator, and what a varlen kernel needs on the device is one non-blocking copy a step.

    Ranks that disagree, a call out of order, or a tensor that does not fit: ArgumentError (a ValueError) or StateError
    (a RuntimeError) on every rank. After that the balancer is of no more use, nor, where ranks were already waiting for
    each other, its groups.
    """

    def __init__(
        self,
        topology: str,
        gamma: float = 1.0,
        group: dist.ProcessGroup | None = None,
        *,
        mask_factor: float = 1.0,
        solver: str = "greedy",
        engine: str | None = None,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        super().__init__(
            topology,
            gamma=gamma,
            mask_factor=mask_factor,
            solver=solver,
            engine=engine,
            group=group,
            make_bag_group=lambda ranks: _bag_group(group, ranks),
        )

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Attention over whole sequences from chunks of them. Collective over the bag.

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, head_dim). attend sees this rank's share of
        the heads of whole sequences, and is called once, also without any. Returns (chunk tokens, heads, ...). Where
        attend raises, the other ranks hear of it.
        """
        seq_lens, q, k, v = self.pre_attn(q, k, v)
        try:
            o = attend(q, k, v, seq_lens)
        except Exception as error:
            self.report(f"attention: {type(error).__name__}: {error}")
            raise
        return self.post_attn(o)[1]


# (parent group, global ranks of a bag) -> the bag's group. A group costs connections and lives as long as the process:
# all balancers on one parent share them.
_bag_groups: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


def _bag_group(parent: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of a bag's ranks, counted inside `parent`; the bag's ranks alone take part in making it."""
    assert parent is not None  # a rank alone has a bag of one, which needs no group
    if len(ranks) == parent.size():
        return parent
    members = dist.get_process_group_ranks(parent)
    global_ranks = tuple(members[rank] for rank in ranks)
    key = (parent, global_ranks)
    if key not in _bag_groups:
        _bag_groups[key] = dist.new_group(
            list(global_ranks), backend=_backend_of(parent), use_local_synchronization=True, group_desc="knapformer bag"
        )
    return _bag_groups[key]


def _backend_of(group: dist.ProcessGroup) -> str:
    """As `new_group` takes it: "gloo", or "cpu:gloo,cuda:nccl"."""
    return dist.get_backend_config(group)
