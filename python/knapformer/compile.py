"""Attention over the ranks of a bag, in a form that torch.compile traces whole. Needs torch.

SequenceBalancer is C++, which a tracer cannot look into. A graph can hold the op `knapformer::exchange` under it. So
what attention takes in a step is taken out of the balancer before the compiled part. What changes from step to step is
tensors, and numbers and names stay, so one graph serves all steps:

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

# (q, k, v, layout) -> o or (o, log_sum_exp), as in SequenceBalancer.attention.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], Tensor | tuple[Tensor, Tensor]]

# The op's tables, layout, group and label, as the balancer gives them.
OpArguments: TypeAlias = tuple[list[Tensor], list[int], str, str]


@dataclass
class AttentionTables:
    """What attention takes on this rank in one step. Made anew after each plan_routing (finish_planning).

    Lists have an entry for each level: the sequences that equally many ranks share. A flat bag has one level.
    """

    rows: list[Tensor]  # (rows of this rank at the level, 0)
    layouts: list[Any]  # of the sequences that attention sees: what `attend` gets
    travels: list[bool]  # whether the level's rows travel
    to_sequences: OpArguments  # of the levels that travel: q, k, v of this rank's rows -> of whole sequences
    to_rows: OpArguments  # and o back

    @staticmethod
    def of(
        balancer: SequenceBalancer, device: torch.device, layout: Callable[[Tensor], Any] = lambda seq_lens: seq_lens
    ) -> AttentionTables:
        """Of the plan in force, for tensors on `device`. Outside of what is compiled.

        layout: makes what `attend` gets of the lengths (int32 CPU) of the sequences that it sees, once a step: what a
        kernel wants that no graph can make, such as offsets on the device. By default the lengths themselves.
        """
        rows, seq_lens, travels, to_sequences, to_rows = balancer.op_attention(device)
        return AttentionTables(rows, [layout(lens) for lens in seq_lens], travels, to_sequences, to_rows)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """As SequenceBalancer.attention, with the same collectives; `attend` is called for every level, also where that
        has no tokens here. An error in it is not told to other ranks.

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, head_dim). Returns (chunk tokens, heads, ..).
        """
        heads = [q.shape[1], k.shape[1]]
        sizes = [rows.shape[0] for rows in self.rows]
        split = [t.split(sizes) if len(sizes) > 1 else [t] for t in (q, k, v)]
        inputs = self._exchange([list(level) for level in zip(*split, strict=True)], heads, self.to_sequences)
        outputs = []
        for (q, k, v), layout in zip(inputs, self.layouts, strict=True):
            attended = attend(q, k, v, layout)
            outputs.append([attended[0] if isinstance(attended, tuple) else attended])
        returned = [o for (o,) in self._exchange(outputs, heads, self.to_rows)]
        return returned[0] if len(returned) == 1 else torch.cat(returned)

    def _exchange(self, levels: list[list[Tensor]], heads: list[int], arguments: OpArguments) -> list[list[Tensor]]:
        """What travels comes back moved, by one all-to-all; the rest as it is."""
        tensors = [t for level, travels in zip(levels, self.travels, strict=True) if travels for t in level]
        if not tensors:
            return levels
        differentiable = [int(t.requires_grad) for t in tensors] if torch.is_grad_enabled() else []
        moved: list[Tensor] = torch.ops.knapformer.exchange(tensors, differentiable, heads, *arguments, [0, 0], [])
        result = []
        for level, travels in zip(levels, self.travels, strict=True):
            result.append(moved[: len(level)] if travels else level)
            moved = moved[len(level) :] if travels else moved
        return result
