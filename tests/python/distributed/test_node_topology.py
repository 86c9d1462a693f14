"""A balancer without a topology: nested bags over the ranks of each node."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from knapformer.node_topology import _LAUNCHERS, node_topology
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from knapformer import ArgumentError, SequenceBalancer

EXPECTED = {"2": "g2/1n2", "4": "g4/2/1n1", "1": "g1n4", "3": None}


def _topologies(rank: int, world_size: int) -> tuple[dict[str, str | None], str]:
    found: dict[str, str | None] = {"": node_topology()}
    for local in EXPECTED:
        os.environ["LOCAL_WORLD_SIZE"] = local
        try:
            found[local] = node_topology()
        except ArgumentError as error:
            assert "topology: got none, for ranks on the nodes [0, 0, 0, 1]" in str(error)
            found[local] = None
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    group = dist.new_group([0, 2])  # one of each node
    if rank in (0, 2):
        assert node_topology(group) == "g1n2"
    balancer = SequenceBalancer()
    balancer.plan_routing([100 if rank == 0 else 1], 8)
    balancer.route(torch.ones(100 if rank == 0 else 1, 8))
    return found, str(balancer.plan.topology)


def test_bags_are_the_ranks_of_a_node() -> None:
    for found, used in run_ranks(_topologies, 4):
        assert found == {"": "g4/2/1n1", **EXPECTED}
        assert used == "g2/1n2"


def _srun(num_tasks: int, per_node: str, local: int = 3) -> dict[str, str]:
    """As rank 3 gets it."""
    of_step = {"SLURM_STEP_NUM_TASKS": str(num_tasks), "SLURM_STEP_TASKS_PER_NODE": per_node}
    return of_step | {"SLURM_LOCALID": str(local)}


def _mpirun(num_ranks: int, per_node: int, local: int = 3) -> dict[str, str]:
    values = {"SIZE": num_ranks, "LOCAL_SIZE": per_node, "LOCAL_RANK": local}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


STARTERS: dict[str, tuple[dict[str, str], str]] = {
    "nobody says": ({}, "g8/4/2/1n1"),
    "torchrun, within Slurm": ({"LOCAL_WORLD_SIZE": "2", **_srun(8, "4(x2)")}, "g2/1n4"),
    "DeepSpeed": ({"WORLD_SIZE": "8", "LOCAL_SIZE": "4", "LOCAL_RANK": "3"}, "g4/2/1n2"),
    "srun on one node": (_srun(8, "8"), "g8/4/2/1n1"),
    "srun on nodes": (_srun(8, "4(x2)"), "g4/2/1n2"),
    "srun of one task, which starts the ranks": (_srun(1, "1", 0), "g8/4/2/1n1"),
    "srun on unequal nodes": (_srun(8, "3(x2),2"), "for nodes with 3(x2),2 ranks (SLURM_STEP_TASKS_PER_NODE)"),
    "srun, node by node": (_srun(8, "4(x2)", 1), "rank 3, which is number 1 on its node (SLURM_LOCALID)"),
    "mpirun": (_mpirun(8, 4), "g4/2/1n2"),
    "mpirun of a process a node, which starts the ranks": (_mpirun(2, 1, 0), "g8/4/2/1n1"),
    "mpirun, node by node": (_mpirun(8, 4, 1), "rank 3, which is number 1 on its node (OMPI_COMM_WORLD_LOCAL_RANK)"),
}


@pytest.mark.parametrize(("said", "expected"), STARTERS.values(), ids=list(STARTERS))
def test_what_starts_the_ranks_says_how_many_a_node_has(
    said: dict[str, str], expected: str, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = _topology_of_8()
    assert found == expected if "/" in expected else expected in found


@pytest.mark.parametrize("on_accelerators", [False, True])
def test_more_ranks_than_a_node_has_accelerators(
    on_accelerators: bool, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = {"cuda": "nccl"} if on_accelerators else {}
    monkeypatch.setattr("knapformer.node_topology.accelerator_backends", lambda group: backends)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    found = _topology_of_8()
    assert ("sees 4 accelerators, expected LOCAL_WORLD_SIZE" in found) == on_accelerators
    assert (found == "g8/4/2/1n1") == (not on_accelerators)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in _LAUNCHERS:
        for name in filter(None, launcher):
            monkeypatch.delenv(name, raising=False)


def _topology_of_8() -> str:
    """Of a job of 8 ranks, of which this is rank 3; or why there is none."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        return node_topology()
    except ArgumentError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "expected"), [("1", "g1n1"), ("6", "g1n1")])
def test_a_process_alone_is_a_bag_of_one(ranks: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert node_topology() == expected
