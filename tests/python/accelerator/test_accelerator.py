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
    compiled_attention_agrees,
    devices_differ,
    frozen_in_turn_agrees,
    lens_of,
    samples_in_pinned_memory,
    steps_without_a_cpu_backend,
    tables_of_a_loader,
    tables_serve_two_streams,
)
from distributed.ranks import run_ranks


@functools.cache
def steps_of_balancers(world: int) -> list[dict[str, list[Any]]]:
    return run_ranks(balancers_agree, world, TOPOLOGIES[world])


def test_a_rank_without_rows_is_told_which_gradients_travel() -> None:
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


def test_a_second_stream_reads_the_tables_behind_their_copy() -> None:
    for on_device, on_cpu in run_ranks(tables_serve_two_streams, 2):
        assert torch.equal(on_device, on_cpu)


@pytest.mark.parametrize(("told", "device"), [(False, "sim:1"), (True, "sim:1"), (True, "sim")])
@pytest.mark.parametrize("micro_batches", [None, 2])
def test_the_planning_thread_packs_index_tables(micro_batches: int | None, told: bool, device: str) -> None:
    """Once the balancer knows the device, from the loader or the first exchange. Where the training thread does not
    wait for their copy, numbers differ: on the simulated device it runs when that is waited for."""
    # Planning of that many steps has begun when the first step computes; none where the loader was told.
    steps_before, per_step = (2, 1) if micro_batches is None else (3, micro_batches)
    if told:
        steps_before = 0
    for of_rank in run_ranks(tables_of_a_loader, 2, micro_batches, told, device):
        on_cpu, on_device = of_rank["cpu"], of_rank[device]
        assert len(on_device.values) == len(on_cpu.values) > 0
        assert all(torch.equal(a, b) for a, b in zip(on_device.values, on_cpu.values, strict=True))
        assert on_device.syncs == []
        steps = len(on_cpu.values) // per_step
        assert on_device.num_by_training_thread == steps_before * per_step
        # That of the step behind the last, which nobody computes, included where one is planned.
        assert len(on_device.current_devices_of_others) >= (steps - steps_before) * per_step
        assert set(on_device.current_devices_of_others) == {1 if device == "sim:1" else 0}
        assert on_cpu.num_by_training_thread == 0 and on_cpu.current_devices_of_others == []


@pytest.mark.parametrize("topology", ["g2n1", "g2/1n1"])
def test_a_compiled_graph_holds_exchanges(topology: str) -> None:
    """Tracers take all tensors of an operation to be on one device; the host reads parts of an exchange's tables."""
    for of_rank in run_ranks(compiled_attention_agrees, 2, topology):
        for on_cpu, on_device in of_rank:
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-5, atol=1e-6)


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
        assert (planning.launched, planning.copies, planning.syncs) == ([], [], []), planning
        assert new_groups == 0
    assert sorted(number for *_, numbers, _ in of_ranks for number in numbers) == sorted(
        rank for rank in range(2) for _ in range(sum(lens_of(rank)))
    )


def test_the_group_for_the_cpu_says_what_it_needs() -> None:
    for message in run_ranks(a_balancer_without_an_interface, 2):
        assert "set GLOO_SOCKET_IFNAME to the network interface that hosts share" in message
