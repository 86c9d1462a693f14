"""The process groups of a balancer's bags and of what hosts tell each other, and which ranks are on one node, as their
launcher says. Needs torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

import knapformer._torch as _torch
from knapformer._core import ArgumentError, StateError


def bag_group(parent: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of a bag. ranks: as numbered inside `parent`, in order; only these ranks take part in making it."""
    assert parent is not None  # a rank alone has a bag of one, which needs no group
    what = f"bag {ranks[0]}-{ranks[-1]}"
    if len(ranks) < parent.size():
        return _subgroup(parent, ranks, what, dist.get_backend_config(parent))
    # Others (FSDP) may use the parent, and a communicator runs one collective after another: attention would wait for
    # their all-gathers. So a bag of all ranks gets a communicator of its own on accelerators, not where hosts send.
    backends = accelerator_backends(parent)
    if not backends:
        return parent
    group = _subgroup(parent, ranks, what, ",".join(f"{device}:{name}" for device, name in backends.items()))
    cpu = torch.device("cpu")
    if cpu not in group._device_types:
        of_hosts = (parent if cpu in parent._device_types else cpu_group(parent))._get_backend(cpu)
        types, custom = dist.Backend.backend_type_map, dist.ProcessGroup.BackendType.CUSTOM
        group._register_backend(cpu, types.get(of_hosts.name(), custom), of_hosts)
    return group


def accelerator_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Names of backends, by type of device, without one that also serves the CPU, as Gloo may. None of a group that
    torch.distributed did not make."""
    if group not in c10d._world.pg_map:
        return {}
    backends = c10d.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
    of_hosts = backends.pop("cpu", None)
    return {device: str(name) for device, name in backends.items() if name != of_hosts}


def cpu_group(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group over Gloo of all ranks of `parent`, which has no backend for the CPU."""
    assert parent is not None  # a rank alone tells nobody anything
    try:
        return _subgroup(parent, range(parent.size()), "for the CPU", "gloo")
    except RuntimeError as error:
        raise StateError(
            "group: got one without a backend for the CPU, and one over Gloo could not be made. Where the name of a "
            "host leads to its loopback address, set GLOO_SOCKET_IFNAME to the network interface that hosts share "
            f"({error})"
        ) from error


def _subgroup(parent: dist.ProcessGroup, ranks: Sequence[int], what: str, backend: str) -> dist.ProcessGroup:
    """A group of some ranks of `parent`, in order; only these ranks take part in making it.

    A group costs connections and lives as long as the default group, so all balancers on one parent share it.
    """
    name = f"{parent.group_name}/knapformer {what}"
    group: dist.ProcessGroup
    for group, group_name in c10d._world.pg_names.items():
        if group_name == name:
            return group
    members = dist.get_process_group_ranks(parent)
    global_ranks = [members[rank] for rank in ranks]
    # The number makes keys that no group had before, also where groups were destroyed and made again on one store.
    store = parent.get_group_store()
    number = store.add(f"knapformer/{what}/{parent.rank()}", 1)
    # Not new_group. With local synchronization it names a group by the number of groups that this rank is a member of,
    # which differs between ranks as soon as their bags do. Without, all ranks of the job would have to call it. In both
    # cases it splits the default group's communicator where that is bound to a device, which also takes all its ranks.
    world = dist.group.WORLD
    assert world is not None
    bound_device = world.bound_device_id
    world.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(parent.rank()),
            global_ranks,
            dist.Backend(backend),
            PrefixStore(f"knapformer/{what}/number {number}", store),
            cast("c10d.GroupName", name),
            timeout=_torch.timeout_of(parent),
            group_desc=f"knapformer {what}",
        )
    finally:
        world.bound_device_id = bound_device
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(global_ranks)}
    return group


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
    degrees = [on_first]
    while degrees[-1] > 1:
        smallest_factor = next(factor for factor in range(2, degrees[-1] + 1) if degrees[-1] % factor == 0)
        degrees.append(degrees[-1] // smallest_factor)
    return f"g{'/'.join(map(str, degrees))}n{len(nodes) // on_first}"
