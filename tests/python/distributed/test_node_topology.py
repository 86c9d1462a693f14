"""A balancer without a topology: nested bags over the ranks of each node."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from knapformer.balancer import node_topology
from ranks import run_ranks

from knapformer import ArgumentError, SequenceBalancer

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


@pytest.mark.parametrize(("ranks", "expected"), [("1", "g1n1"), ("6", "g1n1")])
def test_a_process_alone_is_a_bag_of_one(ranks: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert node_topology() == expected
