"""A balancer without a topology: nested bags over the ranks of each node."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from knapformer.balancer import node_topology
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from knapformer import ArgumentError, SequenceBalancer, balancer

EXPECTED = {"2": "g2/1n1", "4": "g4/2/1n1", "1": "g1n1", "3": None}


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
        assert node_topology(group) == "g1n1"
    balancer = SequenceBalancer()
    balancer.plan_routing([100 if rank == 0 else 1], 8)
    balancer.route(torch.ones(100 if rank == 0 else 1, 8))
    return found, str(balancer.plan.topology)


def test_bags_are_the_ranks_of_a_node() -> None:
    for found, used in run_ranks(_topologies, 4):
        assert found == {"": "g4/2/1n1", **EXPECTED}
        assert used == "g2/1n1"  # repeated: two nodes


def _srun(num_tasks: int, per_node: str) -> dict[str, str]:
    return {"SLURM_STEP_NUM_TASKS": str(num_tasks), "SLURM_STEP_TASKS_PER_NODE": per_node}


STARTERS: dict[str, tuple[dict[str, str], str]] = {
    "nobody says": ({}, "g8/4/2/1n1"),
    "torchrun, within Slurm": ({"LOCAL_WORLD_SIZE": "2", **_srun(8, "4(x2)")}, "g2/1n1"),
    "srun on one node": (_srun(8, "8"), "g8/4/2/1n1"),
    "srun on nodes": (_srun(8, "4(x2)"), "g4/2/1n1"),
    "srun of one task, which starts the ranks": (_srun(1, "1"), "g8/4/2/1n1"),
    "srun on unequal nodes": (_srun(8, "3(x2),2"), "Slurm on nodes with 3(x2),2"),
    "mpirun": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "g4/2/1n1"),
}


@pytest.mark.parametrize(("said", "expected"), STARTERS.values(), ids=list(STARTERS))
def test_what_starts_the_ranks_says_how_many_a_node_has(
    said: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM") or name in balancer._NODE_SIZES]:
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    assert _topology_of_8() == expected if "/" in expected else expected in _topology_of_8()


def test_more_ranks_than_a_node_has_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    assert "8 ranks on nodes with 4 accelerators, expected LOCAL_WORLD_SIZE" in _topology_of_8()


def _topology_of_8() -> str:
    """Of a job of 8 ranks, this one among them; or why there is none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
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
