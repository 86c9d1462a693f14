"""The balancer, the loader and the models on an accelerator, simulated, against the CPU; and what they ask of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerator.device_ranks import (
    Launches,
    a_mistake_where_memory_grows,
    balancers_agree,
    errors_with_work_in_flight,
    launches_of_calls,
    loader_agrees,
    models_agree,
    peer_memory_without_the_kernel,
    rotations_agree,
    tables_of_a_loader,
    transports_agree,
)
from distributed.ranks import run_ranks

TOPOLOGIES = {1: ["g1n1"], 2: ["g1n2", "g2n1", "g2/1n1"], 4: ["g4n1", "g4/2/1n1", "g2n2", "g1n2+g2n1"]}
MODELS = {1: ["flux-tiny"], 2: ["transformer-tiny", "flux-tiny", "wan-tiny"], 4: ["flux-tiny"]}
NESTED = {1: "g1n1", 2: "g2/1n1", 4: "g4/2/1n1"}


@functools.cache
def steps_of_balancers(world: int, peer_memory: bool) -> list[dict[str, list[Any]]]:
    return run_ranks(balancers_agree, world, TOPOLOGIES[world], peer_memory)


each_topology = pytest.mark.parametrize(
    ("world", "topology"), [(n, topology) for n in TOPOLOGIES for topology in TOPOLOGIES[n]]
)
each_transport = pytest.mark.parametrize("peer_memory", [False, True], ids=["all_to_all", "peer_memory"])


@each_transport
@each_topology
def test_a_balanced_step_is_the_cpus(world: int, topology: str, peer_memory: bool) -> None:
    for of_rank in steps_of_balancers(world, peer_memory):
        for on_cpu, on_device in of_rank[topology]:
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-12, atol=1e-12)


@functools.cache
def steps_of_models(world: int) -> list[dict[str, Any]]:
    return run_ranks(models_agree, world, MODELS[world], NESTED[world], timeout_s=240)


each_model = pytest.mark.parametrize(("world", "name"), [(n, name) for n in MODELS for name in MODELS[n]])


@each_model
def test_a_models_step_is_the_cpus(world: int, name: str) -> None:
    for of_rank in steps_of_models(world):
        out, loss, grads, _ = of_rank[name]["sim", 1]
        cpu_out, cpu_loss, cpu_grads, _ = of_rank[name]["cpu", 1]
        torch.testing.assert_close(out, cpu_out, rtol=1e-5, atol=1e-5)
        assert loss == pytest.approx(cpu_loss, rel=1e-5)
        for parameter, grad in cpu_grads.items():
            assert (grads[parameter] - grad).norm() <= 1e-5 * max(grad.norm(), 1e-3), parameter


@each_model
def test_nothing_waits_for_the_device_between_the_plan_and_the_optimizer(world: int, name: str) -> None:
    for of_rank in steps_of_models(world):
        for step in (0, 1):
            counted = of_rank[name]["sim", step][3]
            assert (counted.collectives > 0) == (world > 1)
            assert counted.syncs == [] and counted.pageable_copies == []


@each_model
def test_the_same_step_gives_the_same_bits(world: int, name: str) -> None:
    for of_rank in steps_of_models(world):
        first, second = (of_rank[name]["sim", step][2] for step in (0, 1))
        assert all(torch.equal(first[parameter], second[parameter]) for parameter in first)


def test_a_models_step_by_peer_memory_is_the_same_to_the_bit() -> None:
    """A checkpointed one: attention in it is recomputed, and its exchanges with it."""
    name = "flux-tiny"
    by_all_to_all, by_peer_memory = (run_ranks(models_agree, 2, [name], "g2n1", peers) for peers in (False, True))
    for expected, of_rank in zip(by_all_to_all, by_peer_memory, strict=True):
        for step in (0, 1):
            out, loss, grads, counted = of_rank[name]["sim", step]
            expected_out, expected_loss, expected_grads, _ = expected[name]["sim", step]
            assert torch.equal(out, expected_out) and loss == expected_loss
            assert all(torch.equal(grads[parameter], grad) for parameter, grad in expected_grads.items())
            assert counted.launched.count("barrier") > 0 and counted.syncs == []


def test_sums_by_peer_memory_are_the_same_to_the_bit() -> None:
    for by_all_to_all, by_peer_memory in run_ranks(transports_agree, 4):
        assert len(by_all_to_all) == len(by_peer_memory) > 0
        assert all(torch.equal(a, b) for a, b in zip(by_all_to_all, by_peer_memory, strict=True))


def test_a_mistake_is_seen_where_peer_memory_grows() -> None:
    """Torch's ranks meet in its store there, where none looks for what others say."""
    for kind, message, seconds in run_ranks(a_mistake_where_memory_grows, 2, timeout_s=100):
        assert kind == "ArgumentError" and "q: got 100001 rows" in message and seconds < 20, (kind, message, seconds)


def test_a_rotation_is_the_cpus_and_one_launch() -> None:
    (by_dtype,) = run_ranks(rotations_agree, 1)
    for on_cpu, on_device, counted in by_dtype:
        torch.testing.assert_close(on_device, on_cpu)
        assert counted.launched == ["knapformer::rotate_rows"] * 2 and counted.syncs == []


def test_peer_memory_asks_for_the_packing_kernel() -> None:
    for raised in run_ranks(peer_memory_without_the_kernel, 2):
        assert (
            raised.startswith("ArgumentError: ") and "peer_memory: got tensors on sim:0, expected a device on" in raised
        )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_loader_that_plans_ahead(world: int) -> None:
    for of_rank in run_ranks(loader_agrees, world):
        for on_cpu, on_device in of_rank:
            assert torch.equal(on_device, on_cpu)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("micro_batches", [None, 2])
def test_the_planning_thread_packs_index_tables(micro_batches: int | None, told: bool) -> None:
    """Once the balancer knows the device, from the loader or the first exchange. Where the training thread does not
    wait for their copy, numbers differ: on the simulated device it runs when that is waited for."""
    # Planning of that many steps has begun when the first step computes; none where the loader was told.
    steps_before, per_step = (2, 1) if micro_batches is None else (3, micro_batches)
    if told:
        steps_before = 0
    for of_rank in run_ranks(tables_of_a_loader, 2, micro_batches, told):
        on_cpu, on_device = of_rank["cpu"], of_rank["sim:1"]
        assert len(on_device.values) == len(on_cpu.values) > 0
        assert all(torch.equal(a, b) for a, b in zip(on_device.values, on_cpu.values, strict=True))
        assert on_device.syncs == []
        steps = len(on_cpu.values) // per_step
        assert on_device.num_by_training_thread == steps_before * per_step
        # That of the step behind the last, which nobody computes, included where one is planned.
        assert len(on_device.current_devices_of_others) >= (steps - steps_before) * per_step
        assert set(on_device.current_devices_of_others) == {1}
        assert on_cpu.num_by_training_thread == 0 and on_cpu.current_devices_of_others == []


def test_errors_are_seen_while_the_device_works() -> None:
    """The host is inside the device's wait, where it cannot look itself."""
    of_waiting, _ = run_ranks(errors_with_work_in_flight, 2, timeout_s=120)
    wanted = {"failed": "rank 1: x: got 3 rows", "differs": "on rank 1, expected none, as on rank 0"}
    for name, words in wanted.items():
        kind, message, seconds = of_waiting[name]
        assert kind == "ArgumentError" and words in message and seconds < 10, of_waiting


@functools.cache
def launches(world: int, peer_memory: bool) -> list[dict[str, dict[str, Launches]]]:
    return run_ranks(launches_of_calls, world, TOPOLOGIES[world], peer_memory)


@each_transport
@each_topology
def test_two_launches_for_an_exchange(world: int, topology: str, peer_memory: bool) -> None:
    """And none beside them: the packing kernel writes the levels of a nested bag where they belong."""
    for of_rank in launches(world, peer_memory):
        for name, of_call in of_rank[topology].items():
            for launched in of_call:
                barriers = launched.count("barrier")
                exchanges = 2 if name == "attention" and "knapformer::move_rows" in launched else 0
                # In place of an all-to-all: before ranks write to each other's memory, and behind it.
                assert barriers == (2 * exchanges if peer_memory else 0), (name, launched)
                assert set(launched) <= {"knapformer::move_rows", "barrier"}, (name, launched)
                assert len(launched) - barriers <= (4 if name == "attention" else 2), (name, launched)
    for name in ("route", "reverse_route", "attention"):
        parts = zip(*(of_rank[topology][name] for of_rank in launches(world, peer_memory)), strict=True)
        # One rank alone has no exchange, nor has attention in bags of one rank.
        shares = world > 1 and (name != "attention" or topology.replace("g1n2", "") != "")
        assert all(any("knapformer::move_rows" in launched for launched in part) == shares for part in parts), name
