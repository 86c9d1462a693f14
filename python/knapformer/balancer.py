"""SequenceBalancer: plans a training step, and moves its tensors. Needs torch.

The work is done in C++ (`knapformer._torch`). This file holds only what has to be Python: it makes the bags' process
groups, through torch.distributed.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence
from typing import Any, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

import knapformer._torch as _torch
from knapformer._core import DEFAULT_GAMMA, ArgumentError, Cluster, StateError, TrainedModel
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
    peer_memory: in attention each rank writes rows to where they belong in the memory of the bag's other ranks (torch's
        symmetric memory, over NVLink), in place of an all-to-all. Only on accelerators; the bag's group must be one
        that torch knows by name, and its ranks must see each other's memory. It has not run on a GPU yet: docs/gpu.md.

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
        peer_memory: bool = False,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        _release_groups_at_exit(os.getpid())
        super().__init__(
            node_topology(group) if topology is None else topology,
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
            peer_memory=peer_memory,
            group=group,
            make_bag_group=lambda ranks: _bag_group(group, [int(rank) for rank in ranks]),
            make_cpu_group=lambda: _cpu_group(group),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceBalancer:
        """Itself, so that models which hold it may be copied: to make a balancer takes all ranks."""
        return self


# Ranks on a node, as torchrun, DeepSpeed, Open MPI, Intel MPI, MPICH and MVAPICH count them.
_NODE_SIZES = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"
)  # fmt: skip


def _ranks_per_node(num_ranks: int) -> int | None:
    """Of the job of `num_ranks` that this process is of; None where nothing says it."""
    for name in _NODE_SIZES:
        if size := os.environ.get(name):
            return int(size)
    if os.environ.get("SLURM_STEP_NUM_TASKS") != str(num_ranks):
        return None  # not srun has started the ranks
    # "8" or "8(x2)"; "8,4" or "8(x2),4" where nodes have unequal numbers.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if "," in tasks:
        raise ArgumentError(
            f"topology: got none, for tasks of Slurm on nodes with {tasks}, expected equally many on each node, "
            "or a topology"
        )
    return int(tasks.split("(")[0]) if tasks else None


def node_topology(group: dist.ProcessGroup | None = None) -> str:
    """Nested bags over the ranks of each node, with as many degrees as nest, down to 1: g8/4/2/1n1 for 8 ranks.

    group: the ranks. None: the default group, or this process alone. How many ranks a node has is what torchrun, Slurm
        or MPI say in environment variables. Where none says it, all ranks are taken to be on one node.

    Raises ArgumentError where the group's ranks on a node are not one after another, where nodes have unequal numbers
    of them, or where no variable is set and there are more ranks than this node has accelerators.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    members = [0] if group is None else dist.get_process_group_ranks(group)
    num_ranks = 1 if group is None else dist.get_world_size()
    per_node = _ranks_per_node(num_ranks)
    if per_node is None:
        per_node, num_devices = num_ranks, torch.accelerator.device_count()
        if 0 < num_devices < num_ranks:
            raise ArgumentError(
                f"topology: got none, for {num_ranks} ranks on nodes with {num_devices} accelerators, expected "
                "LOCAL_WORLD_SIZE in the environment, the number of ranks on a node, or a topology"
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
    return f"g{'/'.join(map(str, degrees))}n1"


def _bag_group(parent: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of a bag. ranks: as numbered inside `parent`, in order; only these ranks take part in making it."""
    assert parent is not None  # a rank alone has a bag of one, which needs no group
    what, backends = f"bag {ranks[0]}-{ranks[-1]}", dist.get_backend_config(parent)
    if len(ranks) < parent.size():
        return _subgroup(parent, ranks, what, backends)
    # Others (FSDP) may use the parent, and a communicator runs one collective after another: attention would wait for
    # their all-gathers. So a bag of all ranks gets a communicator of its own on accelerators, not where hosts send.
    of_devices = c10d.BackendConfig(dist.Backend(backends)).get_device_backend_map()
    of_hosts = of_devices.pop("cpu", None)
    if of_hosts in of_devices.values() or not of_devices:
        return parent
    group = _subgroup(parent, ranks, what, ",".join(f"{device}:{name}" for device, name in of_devices.items()))
    cpu = torch.device("cpu")
    if of_hosts is not None and cpu not in group._device_types:
        group._register_backend(cpu, dist.Backend.backend_type_map[of_hosts], parent._get_backend(cpu))
    return group


def _cpu_group(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
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


@functools.cache
def _release_groups_at_exit(process: int) -> None:
    """A process group has threads until its last reference goes, which may be a balancer's. A thread that needs the
    interpreter after the interpreter's end aborts the process, and a balancer may be destroyed only after that end.

    Once in each process: a process that multiprocessing forks on Python 3.13 begins without the handlers of its parent.
    """
    atexit.register(_torch.release_groups)
