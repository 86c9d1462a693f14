"""Seconds of work on a device, measured in rounds so that a disturbance hits all measurements alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has finished the work that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


_HEAD_START_CYCLES = 10_000_000  # about 5 ms


def seconds_of(work: Work, device: torch.device) -> float:
    """Seconds from an idle device to the end of `work`; on accelerators between two events, without the latency between
    host and device. A CUDA device is first kept busy, so that it does not wait for the host's launches in between."""
    if device.type != "cpu":
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        synchronize(device)
        if device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured_rounds(
    prepare: Sequence[Callable[[], Work]], device: torch.device, num_rounds: int, num_warmup_rounds: int = 1,
    on_done: Callable[[], None] = lambda: None,
) -> list[list[float]]:  # fmt: skip
    """For each of `prepare` the seconds of its work, one per round.

    A round measures each work once, so that a temporary disturbance hits a whole round and not one of the works. Each
    is prepared anew right before it is timed, so only one at a time holds memory. on_done: called after each
    measurement.
    """
    times: list[list[float]] = [[] for _ in prepare]
    for round_ in range(num_warmup_rounds + num_rounds):
        gc.collect()  # now, not within a timed part
        gc.disable()
        try:
            for index, make in enumerate(prepare):
                seconds = seconds_of(make(), device)
                if round_ >= num_warmup_rounds:
                    times[index].append(seconds)
                on_done()
        finally:
            gc.enable()
    return times


def relative_spread(times: Sequence[float]) -> float:
    """Interquartile range over the median: 0 for fewer than two times."""
    if len(times) < 2:
        return 0.0
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / median
