"""Models on an accelerator, simulated, against the CPU; and where they make the host wait."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerator.model_ranks import (
    a_model_with_the_kernel_agrees,
    models_agree,
    numbers_of_the_host,
    waits_for_numbers_of_the_device,
)
from distributed.ranks import run_ranks

BF16 = 2e-2


MODELS = {1: ["flux-tiny"], 2: ["transformer-tiny", "flux-tiny", "wan-tiny"], 4: ["flux-tiny"]}


NESTED = {1: "g1n1", 2: "g2/1n1", 4: "g4/2/1n1"}


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
    steps = run_ranks(models_agree, 2, [name], "g2n1", torch.float32, True, timeout_s=240)
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
