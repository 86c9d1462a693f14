"""A clock that counts floating-point operations: what is measured by it does not depend on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from knapformer.tools.measure import timing
from torch.utils.flop_counter import FlopCounterMode

from knapformer import masked  # noqa: F401  for its op


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, heads, length, width = query
    return int(4 * batch * heads * length * key[2] * width)


def _masked_flops(query: Any, key: Any, value: Any, runs: Any, **kwargs: Any) -> int:
    """Of the pairs in the ranges of keys that queries see."""
    pairs = 0
    for num_queries, *ranges in runs.tolist():
        for first, end, first_moves, end_moves in zip(*(iter(ranges),) * 4, strict=True):
            pairs += sum(end - first + i * (end_moves - first_moves) for i in range(num_queries))
    return int(4 * pairs * query.shape[1] * query.shape[2])


def _masked_backward_flops(grad: Any, query: Any, key: Any, value: Any, o: Any, sums: Any, runs: Any, **kw: Any) -> int:
    return 2 * _masked_flops(query, key, value, runs)


for of_values in (_masked_flops, _masked_backward_flops):
    of_values._get_raw = True  # type: ignore[attr-defined]  # not of shapes

# Kernels of the CPU that torch's own table lacks.
_ATTENTION = {
    torch.ops.knapformer.masked_attention: _masked_flops,
    torch.ops.knapformer.masked_attention_backward: _masked_backward_flops,
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
