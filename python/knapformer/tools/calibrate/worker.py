"""What one rank of a calibration does. Needs torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from knapformer import StateError
from knapformer.calibration import Calibration, ExchangeCost, fit_exchange
from knapformer.models.parallel import DTYPES
from knapformer.tools.calibrate.fit import calibration_of, exchange_warnings
from knapformer.tools.calibrate.report import write_report
from knapformer.tools.calibrate.settings import CalibrationSettings
from knapformer.tools.measure.blocks import BlockTimes, passes, time_blocks, time_works
from knapformer.tools.measure.device import default_dtype, joined_group
from knapformer.tools.measure.environment import environment
from knapformer.tools.measure.exchange import node_groups, time_exchanges
from knapformer.tools.measure.own_block import load_own_block
from knapformer.tools.measure.progress import Progress
from knapformer.tools.measure.timing import Work

# Bytes of a rank's rows: from what latency decides to what the rate does.
_EXCHANGE_ROUNDS = 20
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
    num_rounds = settings.num_rounds + settings.num_warmup_rounds
    num_kinds = 1 if settings.block is not None else len(settings.model.block_counts)
    with Progress(num_rounds * num_kinds * len(settings.lengths), enabled=first) as progress:
        progress.describe("measuring blocks")
        rounds = (settings.num_rounds, settings.num_warmup_rounds, progress.advance)
        if settings.block is not None:
            block, inputs = load_own_block(settings.block, device, DTYPES[dtype])

            def own(seq_lens: list[int]) -> Work:
                return passes(block, inputs(seq_lens), settings.checkpointing)

            times = time_works([(settings.block, 1, own)], settings.lengths, device, *rounds)
        else:
            times = time_blocks(
                settings.model, settings.lengths, device, DTYPES[dtype], settings.checkpointing, *rounds
            )  # fmt: skip
        exchanges: dict[str, _ExchangeTimes] = {}
        if joined:
            seconds = torch.tensor(times.seconds, dtype=torch.float64)
            dist.all_reduce(seconds)
            times = dataclasses.replace(times, seconds=(seconds / dist.get_world_size()).tolist())
            progress.describe("measuring exchanges")
            exchanges = _time_exchanges(device)
    if first:
        write_report(settings, _calibration(settings, times, exchanges, device), times, {
            "model": settings.model.to_dict() if settings.block is None else {"block": settings.block},
            "dtype": dtype,
            "num_ranks": settings.num_ranks,
            "measured_blocks": [
                {"kind": name, "count": count, "lengths": times.lengths, "seconds": seconds}
                for (name, count), seconds in zip(times.kinds, times.seconds, strict=True)
            ],
            "measured_exchanges": {name: dataclasses.asdict(measured) for name, measured in exchanges.items()},
            "environment": environment(device),
        })  # fmt: skip


@dataclass(frozen=True)
class _ExchangeTimes:
    num_ranks: int
    num_bytes: list[float]  # that a rank sends
    seconds: list[float]


def _time_exchanges(device: torch.device) -> dict[str, _ExchangeTimes]:
    """Inside the node and between nodes, as far as this world has them, by Calibration's field. Collective."""
    measured = {}
    for name, group in zip(("node", "network"), node_groups(int(os.environ["LOCAL_WORLD_SIZE"])), strict=True):
        if group is not None:
            num_bytes, seconds = time_exchanges(_EXCHANGE_SIZES[device.type], device, _EXCHANGE_ROUNDS, group)
            measured[name] = _ExchangeTimes(dist.get_world_size(group), num_bytes, seconds)
    return measured


def _calibration(
    settings: CalibrationSettings, times: BlockTimes, exchanges: Mapping[str, _ExchangeTimes], device: torch.device
) -> Calibration:
    on = environment(device)
    calibration = calibration_of(
        settings.lengths,
        times.per_block(),
        times.spreads(),
        settings.d_model,
        recomputes=settings.checkpointing,
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
