"""Who sends how many bytes to whom in a step: between ranks, or between blocks of many ranks.

matrix[sender, receiver], in bytes. What ranks of one block send each other is on the diagonal; what stays on its rank
is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from knapformer import Plan
from knapformer._core import step_traffic

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step. Blocks are single ranks, nodes, or several nodes."""

    ranks_per_block: int
    ranks_per_node: int
    route: Matrix
    attention: Matrix

    @property
    def num_blocks(self) -> int:
        return len(self.route)

    @property
    def unit(self) -> str:
        if self.ranks_per_block == 1:
            return "rank"
        return "node" if self.ranks_per_block == self.ranks_per_node else "block of nodes"


def traffic_of(plan: Plan, max_blocks: int = 128) -> Traffic:
    """By rank up to `max_blocks` ranks, by node up to as many nodes, by runs of nodes above."""
    ranks_per_node = plan.cluster.ranks_per_node
    ranks_per_block = 1
    if plan.num_ranks > max_blocks:
        num_nodes = -(-plan.num_ranks // ranks_per_node)
        ranks_per_block = ranks_per_node * -(-num_nodes // max_blocks)
    num_blocks, *matrices = step_traffic(plan, ranks_per_block)
    route, attention = (np.array(matrix).reshape(num_blocks, num_blocks) for matrix in matrices)
    return Traffic(ranks_per_block, ranks_per_node, route, attention)
