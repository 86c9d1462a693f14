"""What one rank of a calibration does. Needs torch."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from knapformer import Cluster, Plan, StateError
from knapformer.calibration import Calibration, ExchangeCost
from knapformer.models.lora import train_adapters
from knapformer.models.parallel import DTYPES
from knapformer.tools.calibrate.fit import (
    MeasuredSteps,
    calibration_of,
    exchange_warnings,
    fit_exchange,
    token_backward,
    with_steps,
)
from knapformer.tools.calibrate.report import write_report
from knapformer.tools.calibrate.settings import CalibrationSettings
from knapformer.tools.cost_args import trained_model
from knapformer.tools.measure.blocks import BlockTimes, KindOfWork, block_works, passes, time_works
from knapformer.tools.measure.device import default_dtype, joined_group
from knapformer.tools.measure.environment import environment
from knapformer.tools.measure.exchange import node_groups, time_exchanges
from knapformer.tools.measure.own_block import load_own_block
from knapformer.tools.measure.progress import Progress
from knapformer.tools.measure.steps import StepTimes, equal_plan, fits, time_steps

_EXCHANGE_ROUNDS = 20
# Bytes of a rank's rows: from sizes whose time is mostly latency to sizes whose time is mostly the transfer.
_EXCHANGE_SIZES = {"cpu": [1 << e for e in range(14, 23, 2)], "cuda": [1 << e for e in range(16, 29, 2)]}


def run_rank(settings: CalibrationSettings) -> None:
    """Collective over the world that torchrun's environment variables describe. Rank 0 reports."""
    with joined_group(settings.device, settings.threads, settings.num_ranks) as device:
        calibrate(settings, device)


def calibrate(settings: CalibrationSettings, device: torch.device) -> None:
    """Collective where torch.distributed is initialised; alone otherwise. Rank 0 reports.

    All ranks measure at the same time, as in a run, where they share memory and power; their times are averaged.
    """
    dtype = settings.dtype or default_dtype(device)
    joined = dist.is_initialized()
    first = not joined or dist.get_rank() == 0
    # Adapters on a frozen base are measured beside the same blocks whose parameters all train.
    works = [_works(settings, device, DTYPES[dtype], mode) for mode in dict.fromkeys((settings.mode, "training"))]
    num_works = sum(map(len, works)) * len(settings.lengths)
    with Progress((settings.num_rounds + settings.num_warmup_rounds) * num_works, enabled=first) as progress:
        progress.describe("measuring blocks")
        rounds = (settings.num_rounds, settings.num_warmup_rounds, progress.advance)
        times = time_works([work for of_mode in works for work in of_mode], settings.lengths, device, *rounds)
        exchanges: dict[str, _ExchangeTimes] = {}
        steps: StepTimes | None = None
        if joined:
            seconds = torch.tensor(times.seconds, dtype=torch.float64)
            dist.all_reduce(seconds)
            times = dataclasses.replace(times, seconds=(seconds / dist.get_world_size()).tolist())
            progress.describe("measuring exchanges")
            exchanges = _time_exchanges(device)
            if settings.measures_steps and fits(settings.model, device):
                progress.describe("measuring whole steps")
                steps = time_steps(
                    settings.model, settings.step_lengths, device, DTYPES[dtype], settings.checkpointing, settings.mode,
                    *rounds[:2], _sharing(settings),
                )  # fmt: skip
    if not first:
        return
    num_kinds = len(works[0])
    calibration = _calibration(settings, times.kinds_from(0, num_kinds), exchanges, device)
    if settings.mode == "lora":
        all_train = _calibration(settings, times.kinds_from(num_kinds, num_kinds), {}, device, "training")
        calibration = dataclasses.replace(calibration, token_backward=token_backward(calibration, all_train))
    if steps is not None:
        calibration = _with_steps(calibration, settings, steps, DTYPES[dtype])
    times = times.kinds_from(0, num_kinds)
    write_report(settings, calibration, times, {
        "model": settings.model.to_dict() if settings.block is None else {"block": settings.block},
        "dtype": dtype,
        "num_ranks": settings.num_ranks,
        "measured_blocks": [
            {"kind": name, "count": count, "lengths": times.lengths, "seconds": seconds}
            for (name, count), seconds in zip(times.kinds, times.seconds, strict=True)
        ],
        "measured_exchanges": {name: dataclasses.asdict(measured) for name, measured in exchanges.items()},
        "measured_steps": steps and dataclasses.asdict(steps),
        "environment": environment(device),
    })  # fmt: skip


def _sharing(settings: CalibrationSettings) -> int:
    """How many ranks share sequences in whole steps: the largest divisor of a node's ranks with a head for each."""
    num_local, num_heads = int(os.environ["LOCAL_WORLD_SIZE"]), settings.model.num_kv_heads or settings.model.num_heads
    return max(of for of in range(1, num_local + 1) if num_local % of == 0 and of <= num_heads)


def _works(settings: CalibrationSettings, device: torch.device, dtype: torch.dtype, mode: str) -> list[KindOfWork]:
    if settings.block is None:
        return block_works(settings.model, device, dtype, settings.checkpointing, mode)
    block, inputs = load_own_block(settings.block, device, dtype)
    if mode == "lora":
        train_adapters(block, [block])
    return [(settings.block, 1, lambda seq_lens: passes(block, inputs(seq_lens), settings.checkpointing))]


@dataclass(frozen=True)
class _ExchangeTimes:
    num_ranks: int
    num_bytes: list[float]  # that a rank sends
    seconds: list[float]


def _time_exchanges(device: torch.device) -> dict[str, _ExchangeTimes]:
    """Exchanges inside the node and between nodes, where this world has them, by Calibration's field. Collective."""
    measured = {}
    for name, group in zip(("node", "network"), node_groups(int(os.environ["LOCAL_WORLD_SIZE"])), strict=True):
        if group is not None:
            num_bytes, seconds = time_exchanges(_EXCHANGE_SIZES[device.type], device, _EXCHANGE_ROUNDS, group)
            measured[name] = _ExchangeTimes(dist.get_world_size(group), num_bytes, seconds)
    return measured


def _calibration(
    settings: CalibrationSettings,
    times: BlockTimes,
    exchanges: Mapping[str, _ExchangeTimes],
    device: torch.device,
    mode: str | None = None,
) -> Calibration:
    """mode: default settings.mode."""
    on = environment(device)
    calibration = calibration_of(
        settings.lengths,
        times.per_block(),
        times.spreads(),
        settings.d_model,
        recomputes=settings.checkpointing,
        mode=mode or settings.mode,
        mask=settings.mask,
        device=str(on["accelerator"] or on["processor"]),
    )
    warnings = list(calibration.warnings)
    costs: dict[str, ExchangeCost] = {}
    for name, measured in exchanges.items():
        try:
            costs[name] = fit_exchange(measured.num_bytes, measured.seconds, measured.num_ranks)
        except StateError as error:
            warnings.append(f"poor fit: {error}")
        else:
            warnings += exchange_warnings(name, costs[name])
    return dataclasses.replace(
        calibration, node=costs.get("node"), network=costs.get("network"), warnings=tuple(warnings)
    )


def _with_steps(
    calibration: Calibration, settings: CalibrationSettings, steps: StepTimes, dtype: torch.dtype
) -> Calibration:
    cluster = calibration.cluster(Cluster("cpu")).replace(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    model = trained_model(settings.model, dtype, settings.checkpointing).replace(
        num_parameters=float(steps.num_parameters), shard_ranks=settings.num_ranks, mode=settings.mode
    )

    def plans(shared_by: int) -> list[Plan]:
        return [
            equal_plan(
                lens, settings.num_ranks, shared_by, settings.d_model, gamma=calibration, masks=settings.mask,
                cluster=cluster, model=model,
            )
            for lens in steps.seq_lens
        ]  # fmt: skip

    measured = MeasuredSteps(plans(1), list(map(statistics.median, steps.seconds)))
    if steps.shared_by > 1:
        shared_s = list(map(statistics.median, steps.shared_seconds))
        measured = dataclasses.replace(measured, shared=plans(steps.shared_by), shared_s=shared_s)
    return with_steps(calibration, measured, cluster)
