"""Launches of the balancer's calls (bench_launches.py), and whether a step makes the host wait for the device.

The second part uses torch's own check, `torch.cuda.set_sync_debug_mode("error")`, around a step of a model with the
balancer, from the plan to the end of the backward pass. It sees waits that go through torch: blocking copies, reads of
values, waits for a stream. Gloo waits for the device, so one device runs one rank, whose step has no exchange; over
NCCL there are as many ranks as are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driver import Check, at_least, at_most, on_ranks
from settings import (
    Agenda,
    backend_of,
    merged_results,
    nested_topology,
    rank_device,
    run_command,
    seconds_left,
    sizes_of,
)

BENCH = Path(__file__).parents[1]
_COUNTING = "launches of calls"


def run(args: argparse.Namespace) -> dict[str, Any]:
    agenda, counted = Agenda(args), dict[str, Any]()
    if agenda.begins(_COUNTING):
        counted = _launches_checked(count_launches(args))
        agenda.keep(counted)
    syncs = on_ranks(check_syncs, args, args.ranks, backend_of(args, args.ranks), seconds_left(args))
    left_out = agenda.left_out + syncs["left_out"]
    return merged_results(counted, {"done": agenda.done}, syncs) | {"left_out": left_out}


def _launches_checked(counted: dict[str, Any]) -> dict[str, Any]:
    checks: list[Check] = []
    for name, row in counted.get("calls", {}).items():
        if row["limit"] is not None:
            checks.append({"name": f"{name}: launches", **at_most(row["max_launches"], row["limit"])})
            packed = at_least(row["min_packing_launches"], 1)
            checks.append({"name": f"{name}: launches of the packing kernel", **packed})
    return {"launches": counted, "checks": checks}


def count_launches(args: argparse.Namespace) -> dict[str, Any]:
    """The results of bench_launches.py, or why there is nothing to count."""
    if args.device == "cpu" and not list((BENCH.parent / "tests/simulated_device").glob("_simulated_device*.so")):
        return {"not_counted": "the CPU has no launches, and the simulated device of the tests is not built"}
    path = args.out / "launches-of-calls.json"
    path.unlink(missing_ok=True)
    device = {"cpu": "sim", "cuda": "cuda"}[args.device]
    command = [sys.executable, str(BENCH / "bench_launches.py"), "--device", device, "--json", str(path)]
    run_command(command, seconds_left(args))  # status 1 past a limit, which the file shows too
    if not path.exists():
        raise RuntimeError("bench_launches.py failed: its output is above")
    counted: dict[str, Any] = json.loads(path.read_text())
    return counted


def check_syncs(args: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, load_config, random_batch
    from knapformer.losses import token_mean
    from knapformer.models.parallel import DTYPES, init_weights, set_checkpointing
    from knapformer.tools.measure.device import default_dtype

    from knapformer import Sample, SequenceBalancer

    device, rank, num_ranks = rank_device(args), dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[default_dtype(device)]
    samples = [Sample(*size) for size in sizes_of(args).samples[rank::num_ranks]]
    found, checks, agenda = list[str](), list[Check](), Agenda(args)
    result = {"waits": found, "looked_for_waits": device.type == "cuda", "checks": checks}
    for name in sizes_of(args).models:
        if not agenda.begins(name):
            continue
        config = load_config(name)
        model = build_model(config, dtype, device)
        init_weights(model)
        set_checkpointing(model)
        balancer = SequenceBalancer(nested_topology(num_ranks), mask=config.mask)
        batch, target = random_batch(config, [config.possible(size) for size in samples], rank, device, dtype)
        for step in range(3):  # the first compiles kernels and tries them
            try:
                with _error_on_sync(device, enabled=step > 0):
                    loss = token_mean((model(batch, balancer) - target).square().mean(-1), total=len(target))
                    loss.backward()
            except RuntimeError as error:
                if num_ranks > 1 or "synchroniz" not in str(error):
                    raise  # the other ranks wait for this one
                found.append(f"{name}, step {step}: {str(error).splitlines()[0]}")
                break
            model.zero_grad(set_to_none=True)
        waits = [step for step in found if step.startswith(name)]
        checks.append({"name": f"{name}: steps in which the host waits for the device", **at_most(len(waits), 0)})
        agenda.keep(result)
    return {**result, **agenda.result()}


@contextlib.contextmanager
def _error_on_sync(device: Any, enabled: bool) -> Iterator[None]:
    """An error where the host waits for a CUDA device; the CPU has nothing to wait for."""
    import torch

    if device.type == "cpu" or not enabled:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
