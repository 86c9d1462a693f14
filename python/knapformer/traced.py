"""Attention over the ranks of a bag, in a form that torch.compile traces whole. Needs torch.

SequenceBalancer is C++, which a tracer cannot look into; the op `knapformer::exchange` under it a graph can hold. So a
step's tables are taken out of the balancer before the compiled part. What changes from step to step is tensors, what
stays is numbers and a name, so a graph serves all steps:

    tables = AttentionTables.of(balancer, x.device)       # once a step, by every rank

    @torch.compile(fullgraph=True, dynamic=True)
    def block(x, tables):
        ...
        o = tables.attention(q, k, v, attend)             # as balancer.attention
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from knapformer.balancer import SequenceBalancer

# (q, k, v, layout) -> o, as in SequenceBalancer.attention.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], Tensor]

# HeadRole and HeadSharing of the op (knapformer/torch/exchange_call.h).
_QUERY, _KEY_VALUE = 1, 2
_SHARED_AT_SEND, _SHARED_AT_RECV = 1, 2


@dataclass
class AttentionTables:
    """A step's attention on this rank. Made anew after each plan_routing (finish_planning).

    By level, which is what sequences that are shared by equally many ranks make; a flat bag has one.
    """

    rows: list[Tensor]  # (rows of this rank at the level, 0)
    layouts: list[Any]  # of the sequences that attention sees: what `attend` gets
    is_shared: list[bool]
    # Of the shared levels, from this rank's rows to whole sequences, as the op takes them:
    send: list[Tensor]
    recv: list[Tensor]
    sharing_there: list[int]
    sharing_back: list[int]
    label_there: str
    label_back: str
    channel: str  # names the bag's group to the op

    @staticmethod
    def of(
        balancer: SequenceBalancer, device: torch.device, layout: Callable[[Tensor], Any] = lambda seq_lens: seq_lens
    ) -> AttentionTables:
        """Of the plan in force, for tensors on `device`. Outside of what is compiled.

        layout: makes what `attend` gets of the lengths (int32 CPU) of the sequences that it sees, once a step: what a
        kernel wants that no graph can make, such as offsets on the device. By default the lengths themselves.
        """
        levels = balancer.attention_exchanges(device)
        shared = [level for level in levels if level[3]]
        names = [[f"{name}/{degree}" for degree, *_ in shared for name in tensors] for tensors in ("qkv", "o")]
        return AttentionTables(
            rows=[level[2] for level in levels],
            layouts=[layout(level[5]) for level in levels],
            is_shared=[bool(level[3]) for level in levels],
            send=[tensor for level in shared for tensor in level[3]],
            recv=[tensor for level in shared for tensor in level[4]],
            sharing_there=[number for degree, index, *_ in shared for number in (_SHARED_AT_SEND, degree, index)],
            sharing_back=[number for degree, index, *_ in shared for number in (_SHARED_AT_RECV, degree, index)],
            label_there=f"attention({','.join(names[0])})",
            label_back=f"attention({','.join(names[1])})",
            channel=balancer.bag_channel,
        )

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """As SequenceBalancer.attention, with the same collectives; `attend` is called for every level, also where that
        has no tokens here. An error in it is not told to other ranks.

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, head_dim). Returns (chunk tokens, heads, ..).
        """
        heads = (q.shape[1], k.shape[1])
        sizes = [rows.shape[0] for rows in self.rows]
        split = [t.split(sizes) if len(sizes) > 1 else [t] for t in (q, k, v)]
        inputs = [[t[level] for t in split] for level in range(len(sizes))]
        inputs = self._exchange(inputs, heads, there=True)
        outputs = [[attend(q, k, v, layout)] for (q, k, v), layout in zip(inputs, self.layouts, strict=True)]
        returned = [o for (o,) in self._exchange(outputs, heads, there=False)]
        return returned[0] if len(returned) == 1 else torch.cat(returned)

    def _exchange(self, levels: list[list[Tensor]], heads: tuple[int, int], there: bool) -> list[list[Tensor]]:
        """What is shared comes back moved, by one all-to-all; the rest as it is."""
        roles = [_QUERY, _KEY_VALUE, _KEY_VALUE] if there else [_QUERY]
        shared = [tensors for tensors, is_shared in zip(levels, self.is_shared, strict=True) if is_shared]
        if not shared:
            return levels
        tensors = [tensor for level in shared for tensor in level]
        grad = torch.is_grad_enabled()
        moved: list[Tensor] = torch.ops.knapformer.exchange(
            tensors,
            self.send if there else self.recv,
            self.recv if there else self.send,
            [len(roles)] * len(shared),
            roles * len(shared),
            self.sharing_there if there else self.sharing_back,
            heads[0],
            heads[1],
            [int(grad and tensor.requires_grad) for tensor in tensors],
            self.channel,
            (self.label_there if there else self.label_back) + ("" if grad else " without gradients"),
        )
        result = []
        for level, is_shared in zip(levels, self.is_shared, strict=True):
            result.append(moved[: len(roles)] if is_shared else level)
            moved = moved[len(roles) :] if is_shared else moved
        return result
