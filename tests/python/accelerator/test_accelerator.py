"""The balancer and the loader on an accelerator, simulated, against the CPU; and what they ask of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerator.cases import TOPOLOGIES, each_topology
from accelerator.device_ranks import (
    a_balancer_without_an_interface,
    a_rank_that_cannot_pack,
    attention_beside_others,
    balancers_agree,
    copies_for_two_streams,
    devices_differ,
    frozen_in_turn_agrees,
    lens_of,
    samples_in_pinned_memory,
    steps_without_a_cpu_backend,
    tables_of_a_loader,
)
from distributed.ranks import run_ranks


@functools.cache
def steps_of_balancers(world: int) -> list[dict[str, list[Any]]]:
    return run_ranks(balancers_agree, world, TOPOLOGIES[world])


def test_what_makes_x_is_frozen_in_turn_where_ranks_have_no_rows() -> None:
    for pairs, syncs in run_ranks(frozen_in_turn_agrees, 3):
        assert syncs == []
        for expected, got in pairs:
            assert torch.equal(expected, got)


@each_topology
def test_a_balanced_step_is_the_cpus(world: int, topology: str) -> None:
    for of_rank in steps_of_balancers(world):
        for on_cpu, on_device in of_rank[topology]:
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-12, atol=1e-12)


def test_ranks_on_different_devices_are_an_error_on_all() -> None:
    for message in run_ranks(devices_differ, 2):
        assert message.startswith("ArgumentError: ") and " on sim" in message and " on cpu" in message


def test_each_stream_has_its_own_copy_of_the_tables() -> None:
    """Behind which its exchanges and kernels come, so that none needs to wait for another stream's."""
    assert run_ranks(copies_for_two_streams, 2) == [[3, 3], [3, 3]]


@pytest.mark.parametrize(("micro_batches", "device"), [(None, "sim:1"), (2, "sim:1"), (2, "sim")])
def test_the_tables_of_a_step_are_one_copy_without_a_wait(micro_batches: int | None, device: str) -> None:
    """Packed ahead once the balancer knows the device, by the first exchange."""
    for (on_cpu, cpu_counted), (on_device, counted) in run_ranks(tables_of_a_loader, 2, micro_batches, device):
        assert len(on_device) == len(on_cpu) > 0
        assert all(torch.equal(a, b) for a, b in zip(on_device, on_cpu, strict=True))
        assert counted.syncs == [] and counted.pageable_copies == []
        assert (counted.copies_to_device, cpu_counted.copies_to_device) == (len(on_device), 0)


def test_attention_waits_for_no_other_user_of_the_group() -> None:
    """A communicator runs one collective after another; a bag of all ranks has one of its own."""
    for of_rank in run_ranks(attention_beside_others, 2, ["g2n1", "g2/1n1"], timeout_s=90):
        for on_cpu, on_device in (pair for pairs in of_rank for pair in pairs):
            torch.testing.assert_close(on_device, on_cpu)


def test_samples_of_other_ranks_arrive_in_pinned_memory() -> None:
    """A copy from other memory makes the host wait. What a rank loads itself stays where its loader put it."""
    chunks = [chunk for of_rank in run_ranks(samples_in_pinned_memory, 2) for chunk in of_rank]
    assert {came for came, _ in chunks} == {True, False}
    assert all(came == pinned for came, pinned in chunks)


def test_no_collective_begins_before_all_ranks_have_packed() -> None:
    """In its first one a backend opens connections, and a host that waits there for a failed rank hears nothing."""
    of_waiting, of_failed = run_ranks(a_rank_that_cannot_pack, 2)
    assert "rank 1: simulated device: out of memory" in of_waiting[0] and "out of memory" in of_failed[0]
    assert of_waiting[1] == of_failed[1] == 0


def test_hosts_never_queue_behind_the_device() -> None:
    """On a group that serves the device alone, as "nccl" does."""
    for expected, got, planning, _, new_groups in (of_ranks := run_ranks(steps_without_a_cpu_backend, 2)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert (planning.launched, planning.copies_to_device, planning.syncs) == ([], 0, []), planning
        assert new_groups == 0
    assert sorted(number for *_, numbers, _ in of_ranks for number in numbers) == sorted(
        rank for rank in range(2) for _ in range(sum(lens_of(rank)))
    )


def test_the_group_for_the_cpu_says_what_it_needs() -> None:
    for message in run_ranks(a_balancer_without_an_interface, 2):
        assert "set GLOO_SOCKET_IFNAME to the network interface that hosts share" in message
