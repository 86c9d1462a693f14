"""The simulated accelerator itself: it shows what it is there to show."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import simulated_device as sim
import torch
from accelerator.device_ranks import a_missing_wait, an_input_overwritten_too_soon
from distributed.ranks import run_ranks
from knapformer.tools.measure.environment import default_dtype, environment
from knapformer.tools.measure.timing import seconds_of

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def device() -> None:
    sim.register()


def test_host_code_that_reads_device_memory_ends_the_process() -> None:
    program = (
        "import ctypes, simulated_device as sim, torch; sim.register(); x = torch.ones(4, device='sim');"
        "print(x.cpu().sum().item(), flush=True); ctypes.string_at(x.data_ptr(), 4)"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.stdout == "4.0\n" and ended.returncode == -11


def test_operations_and_views_are_those_of_the_cpu() -> None:
    x = torch.arange(24, dtype=torch.float32)
    y = x.to("sim")
    view = y.view(4, 6)[1:, ::2].t()
    view.mul_(3)
    x.view(4, 6)[1:, ::2].mul_(3)
    assert torch.equal(y.cpu(), x)
    assert torch.equal(
        view.contiguous().view(torch.int32).cpu(), x.view(4, 6)[1:, ::2].t().contiguous().view(torch.int32)
    )
    z, of_cpu = (torch.view_as_complex(t.view(-1, 2)) for t in (y, x))
    assert torch.equal((z * z.conj()).cpu(), of_cpu * of_cpu.conj())


def test_memory_that_was_not_written_is_not_zero() -> None:
    x = torch.zeros(1000, device="sim")
    del x
    assert torch.empty(1000, device="sim").isnan().all().item()


def test_what_is_counted() -> None:
    x = torch.ones(3, device="sim")
    with sim.counted() as counted:
        (x + 1).mul_(2)
        torch.tensor([1, 2]).pin_memory().to("sim", non_blocking=True)
    assert (counted.launches, counted.copies_to_device, counted.syncs, counted.pageable_copies) == (2, 1, [], [])
    waits = {
        "blocking copy": lambda: torch.tensor([1.0]).to("sim"), "item": lambda: x[0].item(), "read": lambda: x.cpu(),
        "number of rows": lambda: x.nonzero(), "mask": lambda: x[x > 0], "list": lambda: x.tolist(),
    }  # fmt: skip
    for name, wait in waits.items():
        with sim.counted() as counted:
            wait()
        assert counted.syncs, name
    with sim.counted() as counted:
        torch.ones(2).to("sim", non_blocking=True)
    assert counted.pageable_copies == ["copy to the device"] and counted.syncs == []


def test_commands_time_and_name_any_accelerator() -> None:
    device = torch.device("sim")
    assert 0.05 <= seconds_of(lambda: time.sleep(0.05), device) < 25  # seconds, where events tell milliseconds
    assert environment(device)["accelerator"] == "simulated accelerator"
    assert (default_dtype(device), default_dtype(torch.device("cpu"))) == ("bf16", "fp32")


def test_a_missing_wait_shows_as_wrong_numbers() -> None:
    assert run_ranks(a_missing_wait, 2) == [(False, True)] * 2


def test_an_input_overwritten_before_its_collective_shows_as_wrong_numbers() -> None:
    assert run_ranks(an_input_overwritten_too_soon, 2) == [False] * 2
