"""The environment in which figures were measured: hardware, versions, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import knapformer
from knapformer.installed_torch import installed_torch

if TYPE_CHECKING:
    import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit with which figures of a device were measured."""
    import torch

    return {
        **host_environment(),
        "accelerator": None if device.type == "cpu" else device_name(device),
        "threads_per_rank": torch.get_num_threads(),
    }


def default_dtype(device: torch.device) -> str:
    """A name in knapformer.models.training.DTYPES."""
    return "fp32" if device.type == "cpu" else "bf16"


def device_name(device: torch.device) -> str:
    import torch

    return _processor() if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def host_environment() -> dict[str, Any]:
    """The part that is known without importing torch."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": installed_torch(),
        "knapformer": knapformer.__version__,
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the checkout in which this file lies; None where it lies in none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
