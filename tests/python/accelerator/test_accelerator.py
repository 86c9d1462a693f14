"""The balancer, the loader and the models on an accelerator, simulated, against the CPU; and what they ask of it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from accelerator.device_ranks import (
    HEAD_BYTES,
    NUM_HEADS,
    ROUTED_BYTES,
    Launches,
    PackedBytes,
    a_mistake_where_memory_grows,
    a_model_with_the_kernel_agrees,
    a_rank_that_cannot_pack,
    attention_beside_others,
    balancers_agree,
    compiled_attention_agrees,
    devices_mix,
    errors_with_work_in_flight,
    frozen_in_turn_agrees,
    launches_of_calls,
    lens_of,
    loader_agrees,
    models_agree,
    numbers_of_the_host,
    packed_bytes_of_calls,
    peer_memory_without_the_kernel,
    rotations_agree,
    samples_in_pinned_memory,
    steps_without_a_cpu_backend,
    tables_of_a_loader,
    tables_serve_two_streams,
    transports_agree,
    waits_for_numbers_of_the_device,
    whole_sequences_attend_meanwhile,
)
from distributed.ranks import run_ranks

from knapformer import Plan

TOPOLOGIES = {
    1: ["g1n1"],
    2: ["g1n2", "g2n1", "g2/1n1"],
    3: ["g1n3", "g3n1"],
    4: ["g4n1", "g4/2/1n1", "g2n2", "g1n2+g2n1"],
}
BF16 = 2e-2
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
def test_a_rank_without_rows_is_told_which_gradients_travel(peer_memory: bool) -> None:
    for pairs, syncs in run_ranks(frozen_in_turn_agrees, 3, peer_memory):
        assert syncs == []
        for expected, got in pairs:
            assert torch.equal(expected, got)


@each_transport
@each_topology
def test_a_balanced_step_is_the_cpus(world: int, topology: str, peer_memory: bool) -> None:
    for of_rank in steps_of_balancers(world, peer_memory):
        for on_cpu, on_device in of_rank[topology]:
            torch.testing.assert_close(on_device, on_cpu, rtol=1e-12, atol=1e-12)


def test_ranks_of_one_backend_may_be_on_different_devices() -> None:
    for pairs, (by_several_backends, by_peer_memory) in run_ranks(devices_mix, 2, ["g2n1", "g2/1n1"]):
        for on_cpu, mixed in pairs:
            torch.testing.assert_close(mixed, on_cpu, rtol=1e-12, atol=1e-12)
        assert by_several_backends.startswith("ArgumentError: ") and " on sim" in by_several_backends
        assert by_peer_memory.startswith("ArgumentError: ") and " on sim" in by_peer_memory


@functools.cache
def steps_of_models(world: int) -> list[dict[str, Any]]:
    return run_ranks(models_agree, world, MODELS[world], NESTED[world], timeout_s=240)


each_model = pytest.mark.parametrize(("world", "name"), [(n, name) for n in MODELS for name in MODELS[n]])


def check_steps_are_the_cpus(steps: list[dict[str, Any]], name: str) -> None:
    for of_rank in steps:
        out, loss, grads, _ = of_rank[name]["sim", 1]
        cpu_out, cpu_loss, cpu_grads, _ = of_rank[name]["cpu", 1]
        torch.testing.assert_close(out, cpu_out, rtol=1e-5, atol=1e-5)
        assert loss == pytest.approx(cpu_loss, rel=1e-5)
        for parameter, grad in cpu_grads.items():
            assert (grads[parameter] - grad).norm() <= 1e-5 * max(grad.norm(), 1e-3), parameter


@each_model
def test_a_models_step_is_the_cpus(world: int, name: str) -> None:
    check_steps_are_the_cpus(steps_of_models(world), name)


@pytest.mark.parametrize("name", ["flux-tiny", "wan-tiny"])
def test_compiled_blocks_compute_the_same(name: str) -> None:
    """Exchanges and kernels that take lengths are outside of their graphs, operations of ours inside."""
    steps = run_ranks(models_agree, 2, [name], "g2n1", False, torch.float32, True, timeout_s=240)
    check_steps_are_the_cpus(steps, name)
    for of_rank in steps:
        counted = of_rank[name]["sim", 1][3]
        assert counted.syncs == [] and counted.pageable_copies == []


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
            assert counted.launched.count("barrier") > 0
            assert counted.syncs == ([] if step else ["synchronizeDevice"])  # for the first region alone


def test_a_checkpointed_model_tries_the_kernel_once_and_waits_for_nothing() -> None:
    """In the middle of its first block, which is computed again later, exchanges and all."""
    num_blocks, num_steps = 4, 2
    for of_rank, num_calls in run_ranks(a_model_with_the_kernel_agrees, 2, "flux-tiny", "g2n1", timeout_s=240):
        assert num_calls == 1 + 2 * num_blocks * num_steps  # tried; forward and computed again
        cpu_out, cpu_loss, cpu_grads, _ = of_rank["cpu", 0]
        for step in range(num_steps):
            out, loss, grads, counted = of_rank["sim", step]
            assert counted.collectives > 0 and counted.syncs == [] and counted.pageable_copies == []
            # In norm: how much a single number differs hangs on the order in which a CPU's products add.
            assert (out - cpu_out).norm() <= BF16 / 2 * cpu_out.norm()
            assert loss == pytest.approx(cpu_loss, rel=BF16)
            for parameter, grad in cpu_grads.items():
                assert (grads[parameter] - grad).norm() <= BF16 * max(grad.norm(), 1e-3), parameter


@pytest.mark.parametrize("name", ["flux-tiny", "qwen"])
def test_numbers_and_masks_may_be_the_hosts(name: str) -> None:
    ((expected, outputs, counted),) = run_ranks(numbers_of_the_host, 1, name)
    assert len(outputs) == 2
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert counted.syncs == [] and counted.pageable_copies == []


@pytest.mark.parametrize("name", ["wan-tiny", "qwen"])
def test_numbers_and_masks_of_the_device_cost_one_wait(name: str) -> None:
    (waits,) = run_ranks(waits_for_numbers_of_the_device, 1, name)
    assert len(waits) == 1


def test_sums_by_peer_memory_are_the_same_to_the_bit() -> None:
    for by_all_to_all, by_peer_memory in run_ranks(transports_agree, 4):
        assert len(by_all_to_all) == len(by_peer_memory) > 0
        assert all(torch.equal(a, b) for a, b in zip(by_all_to_all, by_peer_memory, strict=True))


def test_whole_sequences_attend_while_ranks_write_to_their_peers() -> None:
    of_ranks = run_ranks(whole_sequences_attend_meanwhile, 2)
    assert any(waits for waits, _, _ in of_ranks)
    for waits, by_peer_memory, by_all_to_all in of_ranks:
        assert waits in ([], [2, 2]), "both barriers are behind attention on whole sequences"
        assert len(by_peer_memory) == 3
        assert all(torch.equal(a, b) for a, b in zip(by_peer_memory, by_all_to_all, strict=True))


def test_a_mistake_is_seen_where_peer_memory_grows() -> None:
    """Torch's ranks meet in its store there, where none looks for what others say."""
    for kind, message, seconds, waits in run_ranks(a_mistake_where_memory_grows, 2, timeout_s=100):
        assert kind == "ArgumentError" and "q: got 100001 rows" in message and seconds < 20, (kind, message, seconds)
        # Nothing behind the first region: the rank that failed may be what the device waits for.
        assert waits == ["synchronizeDevice"]


def test_a_second_stream_reads_the_tables_behind_their_copy() -> None:
    for on_device, on_cpu in run_ranks(tables_serve_two_streams, 2):
        assert torch.equal(on_device, on_cpu)


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


def test_errors_are_seen_while_the_device_works() -> None:
    """The host is inside the device's wait, where it cannot look itself; or it waits for the device later."""
    of_waiting, _ = run_ranks(errors_with_work_in_flight, 2, timeout_s=120)
    wanted = {"failed": "rank 1: x: got 3 rows", "differs": "on rank 1, expected none, as on rank 0"}
    assert set(of_waiting) == {name + ahead for name in wanted for ahead in ("", ", ahead")}
    for name, (kind, message, seconds) in of_waiting.items():
        case, ahead = name.split(",")[0], name.endswith("ahead")
        assert kind == ("StateError" if ahead else "ArgumentError"), of_waiting
        assert wanted[case] in message and seconds < 10, of_waiting


def test_no_collective_begins_before_all_ranks_have_packed() -> None:
    """In its first one a backend opens connections, and a host that waits there for a failed rank hears nothing."""
    of_waiting, of_failed = run_ranks(a_rank_that_cannot_pack, 2)
    assert "rank 1: simulated device: out of memory" in of_waiting[0] and "out of memory" in of_failed[0]
    assert of_waiting[1] == of_failed[1] == 0


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
        shares = world > 1 and (name != "attention" or topology not in ("g1n2", "g1n3"))
        assert all(any("knapformer::move_rows" in launched for launched in part) == shares for part in parts), name


@functools.cache
def packed_bytes(world: int, peer_memory: bool) -> list[dict[str, tuple[Plan, dict[str, PackedBytes]]]]:
    return run_ranks(packed_bytes_of_calls, world, TOPOLOGIES[world], peer_memory)


class Moved(NamedTuple):
    """Bytes that one exchange takes and gives on a rank, and those of both that stay there."""

    taken: int
    given: int
    staying: int

    def back(self) -> Moved:
        return Moved(self.given, self.taken, self.staying)

    def packed(self, peer_memory: bool = False) -> int:
        """What is taken is read once, and what comes by the wire once more: none where the peer wrote it in place."""
        return self.taken + (0 if peer_memory else self.given - self.staying)


def routed(plan: Plan, rank: int) -> Moved:
    homes = [home for home, lens in enumerate(plan.seq_lens) for _ in lens]
    staying = sum(tokens for sequence, on, _, tokens in plan.chunks if on == rank == homes[sequence])
    return Moved(*(ROUTED_BYTES * n for n in (plan.tokens_before[rank], plan.tokens_after[rank], staying)))


def shared_and_whole(plan: Plan, rank: int) -> tuple[Moved, int]:
    """Of heads, from the rank's rows to the sequences that it shares; and the bytes of its other sequences."""
    lens = [length for of_home in plan.seq_lens for length in of_home]
    rows = {sequence: tokens for sequence, on, _, tokens in plan.chunks if on == rank}
    moved, whole = [0, 0, 0], 0
    for sequence, (first, degree) in enumerate(zip(plan.first_rank_of_sequence, plan.degree_of_sequence, strict=True)):
        if degree == 1:
            whole += HEAD_BYTES * NUM_HEADS * rows.get(sequence, 0)
        elif first <= rank < first + degree:
            of_rows, own_heads = HEAD_BYTES * rows.get(sequence, 0), NUM_HEADS // degree
            for i, num_bytes in enumerate(
                (of_rows * NUM_HEADS, HEAD_BYTES * lens[sequence] * own_heads, of_rows * own_heads)
            ):
                moved[i] += num_bytes
    return Moved(*moved), whole


@each_transport
@each_topology
def test_each_byte_is_packed_once(world: int, topology: str, peer_memory: bool) -> None:
    """On each side of the wire, or in all where ranks write to each other's memory. Attention reads what is whole on a
    rank where it lies; what it gives for that is copied beside the rest."""
    for rank, of_rank in enumerate(packed_bytes(world, peer_memory)):
        plan, packed = of_rank[topology]
        route, (heads, whole) = routed(plan, rank), shared_and_whole(plan, rank)
        there, back = heads.packed(peer_memory), heads.back().packed(peer_memory) + whole
        expected = {
            "route": PackedBytes(route.packed(), route.back().packed()),
            "reverse_route": PackedBytes(route.back().packed(), route.packed()),
            "attention": PackedBytes(3 * there + back, there + 3 * back),  # q, k, v and their output
        }
        if world == 1:
            expected = dict.fromkeys(expected, PackedBytes(0, 0))
        elif heads == Moved(0, 0, 0):  # a bag of one rank
            expected["attention"] = PackedBytes(0, 0)
        assert packed == expected, (rank, plan.chunks)


def test_hosts_never_queue_behind_the_device() -> None:
    """On a group that serves the device alone, as "nccl" does."""
    for expected, got, planning, _, new_groups in (of_ranks := run_ranks(steps_without_a_cpu_backend, 2)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert (planning.launched, planning.copies, planning.syncs) == ([], [], []), planning
        assert new_groups == 0
    assert sorted(number for *_, numbers, _ in of_ranks for number in numbers) == sorted(
        rank for rank in range(2) for _ in range(sum(lens_of(rank)))
    )
