"""Attention over the ranks of a bag, in a form that torch.compile traces whole. Needs torch.

SequenceBalancer is C++, which a tracer cannot look into; but a graph can hold the op that it calls,
`knapformer::exchange`. So AttentionTables takes from the balancer, before the compiled part, what a step's attention
needs. Only tensors change from step to step; numbers and names stay, so one graph serves all steps:

    tables = AttentionTables.of(balancer, x.device)       # once a step, by every rank; or of a Step

    @torch.compile(fullgraph=True, dynamic=True)
    def block(x, tables):
        ...
        o = tables.attention(q, k, v, attend)             # as balancer.attention

Inductor's mode "reduce-overhead" records no exchange: it divides the graph there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from knapformer._torch import Step
from knapformer.balancer import SequenceBalancer
from knapformer.masked import attend as attend_by_masks
from knapformer.masked import layout_on

# (q, k, v, layout) -> o or (o, log_sum_exp), as in SequenceBalancer.attention.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], Tensor | tuple[Tensor, Tensor]]

# The op's tables, layout and names, as the balancer gives them.
OpArguments: TypeAlias = tuple[list[Tensor], list[int], list[str]]


@dataclass
class AttentionTables:
    """What attention needs on this rank in one step. Made anew for each step.

    Lists have an entry for each level. A level is the sequences of one degree; a flat bag has one level.
    """

    rows: list[Tensor]  # of shape (rows of this rank at the level, 0)
    layouts: list[Any]  # what `attend` gets for the sequences that attention sees
    travels: list[bool]  # whether the level's rows travel
    to_sequences: OpArguments  # for the levels that travel: q, k, v of this rank's rows -> of whole sequences
    to_rows: OpArguments  # for the same levels: o back to this rank's rows
    # Where keys come in stages: the exchanges of those behind the first, and the rows of all stages by sequence.
    stages: list[tuple[list[OpArguments], Tensor] | None]

    @staticmethod
    def of(
        balancer: SequenceBalancer | Step,
        device: torch.device,
        layout: Callable[..., Any] = lambda seq_lens: seq_lens,
        mask: str | None = "full",
        cuts_queries: bool = False,
    ) -> AttentionTables:
        """The tables of a step, or of the one in force, for tensors on `device`. To be called outside of the compiled
        part.

        layout: called here for each level, with the lengths (int32 CPU) of the sequences that `attend` will see. Its
        result is passed to `attend`: what no graph can make, such as offsets on the device. Default: the lengths.
        cuts_queries: `attend` takes parts of queries. `layout` is then called with their lengths, those of the keys,
            and where queries begin among them (SequenceBalancer.attention).
        mask: the one that `attend` applies, as in SequenceBalancer.attention; ArgumentError where another is planned.
            None: `attention` is called without `attend`, and applies to each sequence its planned mask.
        """
        step = balancer if isinstance(balancer, Step) else balancer.current
        rows, attended, travels, to_sequences, to_rows, stages = step.op_attention(device, mask, cuts_queries)
        if mask is None:
            layouts = [layout_on(tables, device) for tables in attended]
            return AttentionTables(rows, layouts, travels, to_sequences, to_rows, stages)
        layouts = [layout(*lens) if cuts_queries else layout(lens[0]) for lens in attended]
        return AttentionTables(rows, layouts, travels, to_sequences, to_rows, stages)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend = attend_by_masks) -> Tensor:
        """Like SequenceBalancer.attention, with the same collectives, but `attend` is called for every level, also for
        one without tokens on this rank, and an error in `attend` is not reported to the other ranks.

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, head_dim). Returns (chunk tokens, heads, ..).
        """
        heads = [q.shape[1], k.shape[1]]
        sizes = [rows.shape[0] for rows in self.rows]
        split = [t.split(sizes) if len(sizes) > 1 else [t] for t in (q, k, v)]
        inputs = self._exchange([list(level) for level in zip(*split, strict=True)], heads, self.to_sequences)
        outputs = []
        for (q, k, v), layout, stages, rows in zip(
            inputs, self.layouts, self.stages, zip(*split, strict=True), strict=True
        ):
            if stages is not None:
                come = [[k, v], *(self._run(list(rows[1:]), heads, arguments) for arguments in stages[0])]
                k, v = (torch.cat(list(of)).index_select(0, stages[1]) for of in zip(*come, strict=True))
            attended = attend(q, k, v, layout)
            o = attended[0] if isinstance(attended, tuple) else attended
            if q.shape[0] == 0:  # `attend` need not use q, k, v then; the backward of their exchange needs this rank
                o = o + (q.sum() + k.sum() + v.sum()).to(o.dtype)
            outputs.append([o])
        returned = [o for (o,) in self._exchange(outputs, heads, self.to_rows)]
        return returned[0] if len(returned) == 1 else torch.cat(returned)

    @staticmethod
    def _run(tensors: list[Tensor], heads: list[int], arguments: OpArguments) -> list[Tensor]:
        differentiable = [int(t.requires_grad) for t in tensors] if torch.is_grad_enabled() else []
        moved: list[Tensor] = torch.ops.knapformer.exchange(tensors, differentiable, heads, *arguments)
        return moved

    def _exchange(self, levels: list[list[Tensor]], heads: list[int], arguments: OpArguments) -> list[list[Tensor]]:
        """Moves the levels that travel, by one all-to-all, and returns the other levels as they are."""
        tensors = [t for level, travels in zip(levels, self.travels, strict=True) if travels for t in level]
        if not tensors:
            return levels
        moved, result = self._run(tensors, heads, arguments), []
        for level, travels in zip(levels, self.travels, strict=True):
            result.append(moved[: len(level)] if travels else level)
            moved = moved[len(level) :] if travels else moved
        return result
