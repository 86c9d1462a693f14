"""The simulated accelerator of tests/simulated_device as torch's device "sim", for the ranks of a test.

    import simulated_device as sim
    sim.register()                                   # once a process, before its first tensor there
    group = sim.new_group()                          # CPU tensors by Gloo; those of "sim" late, on a thread
    with sim.counted() as counted:
        ...
    assert counted.syncs == []

The host cannot read its memory: code that touches it outside of a kernel ends the process. Two devices, "sim:0" and
"sim:1", share one memory. It is not fast, and not a CUDA device (`tensor.is_cuda` is False).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "simulated_device"


class Counted(types.SimpleNamespace):
    """What the code inside `counted` did, once that block is left. Numbers: launches, copies_to_device, collectives,
    packed_bytes (read by the packing kernel). Lists of names: launched, syncs, pageable_copies."""


def register() -> Any:
    """Makes "sim" a device of torch, and returns the module that counts."""
    if "_simulated_device" in sys.modules:
        return sys.modules["_simulated_device"]
    import torch

    files = sorted(FOLDER.glob("_simulated_device*.so"))
    if not files:
        raise RuntimeError(f"{FOLDER}: has no module, expected one: cmake --build build/release -t _simulated_device")
    spec = importlib.util.spec_from_file_location("_simulated_device", files[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["_simulated_device"] = module
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return module


def _device_module() -> types.ModuleType:
    """What torch asks of torch.sim."""
    import torch

    module = types.ModuleType("torch.sim")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: torch.accelerator.current_device_index(),
        set_device=lambda index: torch.accelerator.set_device_index(index),
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_device_name=lambda device: "simulated accelerator",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda *device: torch.get_rng_state(),
        set_rng_state=lambda *state: None,
        device=lambda device: contextlib.nullcontext(),
    )
    return module


def new_group(timeout_s: float = 60, backend: str = "cpu:gloo,sim:late") -> Any:
    """A group of all ranks, by default with backends for the CPU and "sim"; "late": with one for both. Collective over
    the default group."""
    import torch.distributed as dist

    module = register()
    if "late" not in dist.Backend.backend_list:

        def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
            return module.make_backend(dist.ProcessGroupGloo(dist.PrefixStore("hosts", store), rank, size, timeout))

        dist.Backend.register_backend("late", make, devices=["cpu", "sim"])
    return dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=timeout_s))


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    module, result = register(), Counted()
    module.reset_counters()
    yield result
    result.__dict__.update(module.counters())
