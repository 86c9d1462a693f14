"""The process groups of a balancer's bags, and of what hosts tell each other. Needs torch."""

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


def check_initialized(name: str, remedy: str = "") -> None:
    """Raises ArgumentError in a job of several ranks without a process group, where this rank would work alone."""
    if not dist.is_initialized() and (started := os.environ.get("WORLD_SIZE") or "1") != "1":
        got = f"got none, and no process group, in a job of WORLD_SIZE={started}"
        raise ArgumentError(f"{name}: {got}; expected {remedy}init_process_group before, or no WORLD_SIZE")


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
