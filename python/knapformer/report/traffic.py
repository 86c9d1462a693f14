"""Who sends how many bytes to whom in a step, from a plan: between ranks, or between blocks of many ranks.

matrix[sender, receiver], in bytes. What ranks of one block send each other is on its diagonal; what stays on its rank
is nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from knapformer import Plan
from knapformer._core import HardwareModel, TrainedModel

Floats = np.ndarray[Any, np.dtype[np.float64]]
Matrix = Floats

# As in knapformer/core/step_time.h: route and reverse_route with their gradients; q, k, v and the output in each pass.
_ROUTES_PER_STEP = 4
_ATTENTION_TENSORS = 4


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

    def block_name(self, block: int) -> str:
        first = block * self.ranks_per_block
        if self.ranks_per_block == 1:
            return f"rank {first}"
        return f"{self.unit} {block} (ranks {first} to {first + self.ranks_per_block - 1})"

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


def exchange_passes(model: TrainedModel) -> int:
    """Passes through a block in a step that exchange rows for attention."""
    return 3 if model.recomputes else 2


def traffic_of(plan: Plan, hardware: HardwareModel, model: TrainedModel, max_blocks: int = 128) -> Traffic:
    """By rank up to `max_blocks` ranks, by node up to as many nodes, by runs of nodes above."""
    ranks_per_block = 1
    if plan.num_ranks > max_blocks:
        ranks_per_block = hardware.ranks_per_node
        num_nodes = -(-plan.num_ranks // ranks_per_block)
        ranks_per_block *= -(-num_nodes // max_blocks)
    sender, receiver, route, pairs = _messages(plan, model)
    num_blocks = -(-plan.num_ranks // ranks_per_block)
    return Traffic(
        ranks_per_block,
        hardware.ranks_per_node,
        _matrix(sender, receiver, route, ranks_per_block, num_blocks),
        _matrix(*pairs, ranks_per_block, num_blocks),
    )


def node_traffic_of(plan: Plan, hardware: HardwareModel, model: TrainedModel) -> tuple[NodeTraffic, NodeTraffic]:
    """Of route, and of attention."""
    sender, receiver, route, (a_sender, a_receiver, attention) = _messages(plan, model)
    return (
        _by_node(sender, receiver, route, plan.num_ranks, hardware.ranks_per_node),
        _by_node(a_sender, a_receiver, attention, plan.num_ranks, hardware.ranks_per_node),
    )


def _messages(plan: Plan, model: TrainedModel) -> tuple[Any, Any, Any, tuple[Any, Any, Any]]:
    """Route's senders, receivers and bytes, and attention's; one entry for each chunk, and for each of its peers."""
    chunks = np.array(plan.chunks, dtype=np.int64).reshape(-1, 4)
    sequence, rank, tokens = chunks[:, 0], chunks[:, 1], chunks[:, 3]
    homes = np.repeat(np.arange(plan.num_ranks), [len(lens) for lens in plan.seq_lens])
    row_bytes = plan.d_model * model.bytes_per_number
    route = tokens * float(row_bytes + model.side_bytes_per_token) * _ROUTES_PER_STEP

    degree = np.array(plan.degree_of_sequence, dtype=np.int64)[sequence]
    first = np.array(plan.first_rank_of_sequence, dtype=np.int64)[sequence]
    per_peer = tokens * float(row_bytes) / np.maximum(degree, 1) * _ATTENTION_TENSORS
    per_peer *= exchange_passes(model) * model.num_blocks
    shared = np.flatnonzero(degree > 1)
    repeated = np.repeat(shared, degree[shared])
    starts = np.cumsum(degree[shared]) - degree[shared]
    peer = first[repeated] + np.arange(len(repeated)) - np.repeat(starts, degree[shared])
    home = homes[sequence]
    moved, met = home != rank, rank[repeated] != peer
    attention = (rank[repeated][met], peer[met], per_peer[repeated][met])
    return home[moved], rank[moved], route[moved], attention


def _matrix(sender: Any, receiver: Any, num_bytes: Any, ranks_per_block: int, num_blocks: int) -> Matrix:
    cells = sender // ranks_per_block * num_blocks + receiver // ranks_per_block
    return _sums(cells, num_bytes, num_blocks * num_blocks).reshape(num_blocks, num_blocks)


def _by_node(sender: Any, receiver: Any, num_bytes: Any, num_ranks: int, ranks_per_node: int) -> NodeTraffic:
    num_nodes = -(-num_ranks // ranks_per_node)
    node = sender // ranks_per_node
    leaves = node != receiver // ranks_per_node
    return NodeTraffic(
        _sums(node[~leaves], num_bytes[~leaves], num_nodes), _sums(node[leaves], num_bytes[leaves], num_nodes)
    )


def _sums(cells: Any, values: Any, num_cells: int) -> Floats:
    return np.bincount(cells, weights=values, minlength=num_cells).astype(np.float64)
