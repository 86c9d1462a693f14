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

Floats = np.ndarray[Any, np.dtype[np.float64]]
Matrix = Floats


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


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes of one step that each node's ranks send each other, and that they send to other nodes."""

    inside: Floats
    outside: Floats


def traffic_of(plan: Plan, max_blocks: int = 128) -> Traffic:
    """By rank up to `max_blocks` ranks, by node up to as many nodes, by runs of nodes above."""
    ranks_per_node = plan.cluster.ranks_per_node
    ranks_per_block = 1
    if plan.num_ranks > max_blocks:
        num_nodes = -(-plan.num_ranks // ranks_per_node)
        ranks_per_block = ranks_per_node * -(-num_nodes // max_blocks)
    return Traffic(ranks_per_block, ranks_per_node, *_matrices(plan, ranks_per_block))


def node_traffic_of(plan: Plan) -> tuple[NodeTraffic, NodeTraffic]:
    """The traffic of the route, and that of attention."""
    route, attention = _matrices(plan, plan.cluster.ranks_per_node)
    return _by_node(route), _by_node(attention)


def _matrices(plan: Plan, ranks_per_block: int) -> tuple[Matrix, Matrix]:
    num_blocks, route, attention = step_traffic(plan, ranks_per_block)
    return np.array(route).reshape(num_blocks, num_blocks), np.array(attention).reshape(num_blocks, num_blocks)


def _by_node(matrix: Matrix) -> NodeTraffic:
    inside = matrix.diagonal()
    return NodeTraffic(inside, matrix.sum(axis=1) - inside)
