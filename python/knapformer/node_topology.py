"""The topology of a balancer that gets none: which ranks are on one node, as their launcher says. Needs torch."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from knapformer._core import ArgumentError, nested_topology
from knapformer.groups import accelerator_backends

# The environment variables by which launchers say how many ranks there are, how many on this node, and, where they may
# number ranks across nodes in turn, which of these this one is.
_LAUNCHERS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", ""),  # torchrun
    ("WORLD_SIZE", "LOCAL_SIZE", ""),  # DeepSpeed
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # Intel MPI, MPICH
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),  # srun: "8", "8(x2)", "8(x2),4"
)


def _ranks_per_node(rank: int, num_ranks: int) -> int | None:
    """As the launcher of this rank of `num_ranks` says; None where none says it of so many ranks."""
    of = os.environ
    for ranks, ranks_on_node, number_on_node in _LAUNCHERS:
        if ranks_on_node not in of or of.get(ranks, str(num_ranks)) != str(num_ranks):
            continue
        of_nodes = of[ranks_on_node]
        if "," in of_nodes:
            raise ArgumentError(
                f"topology: got none, for nodes with {of_nodes} ranks ({ranks_on_node}), expected equally many on each "
                "node, or a topology"
            )
        per_node = int(of_nodes.split("(")[0])
        local_rank = int(of.get(number_on_node, rank % per_node))
        if local_rank != rank % per_node:
            raise ArgumentError(
                f"topology: got none, for rank {rank}, which is number {local_rank} on its node ({number_on_node}), "
                f"expected {per_node} ranks one after another on each node, or a topology"
            )
        return per_node
    return None


def node_topology(group: dist.ProcessGroup | None = None) -> str:
    """A bag of each node's ranks, nested with as many degrees as nest, down to 1: g8/4/2/1n4 for 4 nodes of 8 ranks.

    group: the ranks. None: the default group, or this process alone. How many ranks a node has is what torchrun, Slurm
        or MPI say in environment variables. Where none says it, all ranks are taken to be on one node.

    Raises ArgumentError where the group's ranks on a node are not one after another, where nodes have unequal numbers
    of them, or where no variable is set and the ranks, on accelerators, are more than the accelerators of this node.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    members = [0] if group is None else dist.get_process_group_ranks(group)
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    per_node = _ranks_per_node(rank, num_ranks)
    if per_node is None:
        per_node, num_devices = num_ranks, torch.accelerator.device_count()
        if group is not None and accelerator_backends(group) and num_devices < num_ranks:
            raise ArgumentError(
                f"topology: got none, for {num_ranks} ranks, of which this one sees {num_devices} accelerators, "
                "expected LOCAL_WORLD_SIZE in the environment, the number of ranks on a node, or a topology"
            )
    nodes = [rank // per_node for rank in members]
    on_first = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(on_first)]:
        raise ArgumentError(
            f"topology: got none, for ranks on the nodes {nodes} ({per_node} ranks a node), expected equally many "
            "on each node, one after another, or a topology"
        )
    return nested_topology(on_first, len(nodes) // on_first)
