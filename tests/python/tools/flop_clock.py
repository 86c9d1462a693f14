"""A clock that counts floating-point operations: what is measured by it does not depend on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from knapformer.tools.measure import timing
from torch.utils.flop_counter import FlopCounterMode


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, heads, length, width = query
    return int(4 * batch * heads * length * key[2] * width)


# Kernels of the CPU that torch's own table lacks.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *args, **kwargs: (
        2 * _attention_flops(*args, **kwargs)
    ),
}


def flops_of(work: Callable[[], object]) -> int:
    """Runs the work; returns the FLOPs of its matrix products and attention, forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        work()
    return int(counter.get_total_flops())


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds at 1 GFLOP/s. An exchange, which computes nothing, takes its wall-clock time."""
    start = time.perf_counter()
    flops = flops_of(work)
    return flops / 1e9 if flops else time.perf_counter() - start


def install() -> None:
    """Replaces the clock of all measurements in this process."""
    timing.seconds_of = seconds_of
