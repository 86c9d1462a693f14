"""What one rank of a calibration does. Needs torch."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Group

from knapformer import Cluster, StateError, TrainedModel, predict_step
from knapformer.adapters.named import ModelConfig
from knapformer.calibration import Calibration, ExchangeCost
from knapformer.models.parallel import DTYPES
from knapformer.models.step import PackedStep
from knapformer.tools.calibrate.fit import MAX_EXCHANGE_ERROR, calibration_of, error_warnings, fit_exchange, fit_fixed
from knapformer.tools.calibrate.group import ExchangeTimes, StepTimes, fits, node_groups, time_exchanges, time_steps
from knapformer.tools.cost_args import trained_model
from knapformer.tools.files import Progress, show, table_of, write_json
from knapformer.tools.measure.blocks import BlockKind, BlockTimes, KindOfWork, build_kinds, time_works
from knapformer.tools.measure.environment import default_dtype, device_name, environment
from knapformer.tools.measure.timing import Work
from knapformer.tools.ways import Planning

_NUM_STEP_LENGTHS = 5
_EXCHANGE_ROUNDS = 20
# Bytes of a rank's rows: from sizes whose time is mostly latency to sizes whose time is mostly the transfer.
_EXCHANGE_SIZES = {"cpu": [1 << e for e in range(14, 23, 2)], "cuda": [1 << e for e in range(16, 29, 2)]}


def calibrate(args: argparse.Namespace, config: ModelConfig, lengths: Sequence[int], device: torch.device) -> None:
    """Collective where torch.distributed is initialised; alone otherwise. Rank 0 reports.

    All ranks measure at the same time, as in a run, where they share memory and power; their times are averaged.
    """
    dtype = args.dtype or default_dtype(device)
    mask = args.mask or config.mask
    mode, num_ranks = args.mode or "training", dist.get_world_size() if dist.is_initialized() else 1
    first = num_ranks == 1 or dist.get_rank() == 0
    works = _works(config, device, DTYPES[dtype], mode, mask, args.recomputes)
    with Progress((args.repeats + args.warmup) * len(works) * len(lengths), enabled=first) as progress:
        progress.describe("measuring blocks")
        rounds = (args.repeats, args.warmup)
        times = time_works(works, lengths, device, *rounds, progress.advance)
        exchanges: dict[str, ExchangeTimes] = {}
        steps: StepTimes | None = None
        if dist.is_initialized():
            seconds = torch.tensor(times.seconds, dtype=torch.float64)
            dist.all_reduce(seconds)
            times = dataclasses.replace(times, seconds=(seconds / num_ranks).tolist())
            progress.describe("measuring exchanges")
            exchanges = _time_exchanges(device)
            # A model computes one mask: steps of another one say nothing.
            if mask == config.mask and fits(config, device):
                progress.describe("measuring whole steps")
                # At most _NUM_STEP_LENGTHS of the lengths, evenly picked from the shortest on.
                every = sorted(set(lengths))[:: max(1, -(-len(set(lengths)) // _NUM_STEP_LENGTHS))]
                steps = time_steps(config, every, device, DTYPES[dtype], args.recomputes, mode, *rounds)
    if not first:
        return
    calibration = _with_exchanges(
        calibration_of(
            lengths, times.per_block(), times.spreads(), config.d_model, recomputes=args.recomputes, mode=mode,
            mask=mask, device=device_name(device),
        ),
        exchanges,
    )  # fmt: skip
    if steps is not None:
        trained = trained_model(config, DTYPES[dtype], args.recomputes, of=TrainedModel(mode=mode))
        calibration = _with_steps(calibration, config, steps, trained)
    write_json(args.json, {
        **calibration.to_dict(),
        "model": config.to_dict(),
        "dtype": dtype,
        "num_ranks": num_ranks,
        "measured_blocks": [
            {"kind": name, "count": count, "lengths": times.lengths, "seconds": seconds}
            for (name, count), seconds in zip(times.kinds, times.seconds, strict=True)
        ],
        "measured_exchanges": {name: dataclasses.asdict(measured) for name, measured in exchanges.items()},
        "measured_steps": steps and dataclasses.asdict(steps),
        "environment": environment(device),
    })  # fmt: skip
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    head = f"{args.model} in {dtype} on {device_name(device)}, {ranks}"
    show(head, _table(calibration, times), *_sentences(calibration))


def _works(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, mode: str, mask: str, recomputes: bool
) -> list[KindOfWork]:
    def work(kind: BlockKind, seq_lens: list[int]) -> Work:
        step = PackedStep(seq_lens, config.d_model, mask=mask)
        return kind.work(step, list(map(config.text_tokens, seq_lens)), recomputes)

    return [(kind.name, kind.count, partial(work, kind)) for kind in build_kinds(config, device, dtype, mode)]


def _time_exchanges(device: torch.device) -> dict[str, ExchangeTimes]:
    """Exchanges inside the node and between nodes, where this world has them, by Calibration's field. Collective."""
    groups = zip(("node", "network"), node_groups(int(os.environ["LOCAL_WORLD_SIZE"]), device), strict=True)
    sizes = _EXCHANGE_SIZES[device.type]
    return {name: time_exchanges(sizes, device, _EXCHANGE_ROUNDS, group) for name, group in groups if group is not None}


def _with_exchanges(calibration: Calibration, exchanges: Mapping[str, ExchangeTimes]) -> Calibration:
    warnings, costs = list(calibration.warnings), dict[str, ExchangeCost]()
    for name, measured in exchanges.items():
        try:
            costs[name] = fit_exchange(measured.num_bytes, measured.seconds, measured.num_ranks)
        except StateError as error:
            warnings.append(f"poor fit: {error}")
        else:
            what = f"the {name}'s all-to-all, from latency and rate, is"
            warnings += error_warnings(what, costs[name].relative_rms_error, MAX_EXCHANGE_ERROR)
    return dataclasses.replace(
        calibration, node=costs.get("node"), network=costs.get("network"), warnings=tuple(warnings)
    )


def _with_steps(calibration: Calibration, config: ModelConfig, steps: StepTimes, trained: TrainedModel) -> Calibration:
    """`calibration` with the fixed time that whole steps took beyond the prediction from its blocks and exchanges."""
    num_ranks = dist.get_world_size()
    cluster = calibration.cluster(Cluster("cpu")).replace(
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]), fixed_s=0.0
    )
    model = trained.replace(num_parameters=float(steps.num_parameters), shard_ranks=num_ranks)
    planning = Planning(d_model=config.d_model, gamma=calibration.gamma, mask=config.mask, cluster=cluster, model=model)
    predicted_s = [predict_step(planning.home([lens] * num_ranks)).total_s for lens in steps.seq_lens]
    fixed = fit_fixed(predicted_s, list(map(statistics.median, steps.seconds)), num_ranks)
    warnings = error_warnings("whole steps are", fixed.relative_rms_error)
    return dataclasses.replace(calibration, fixed=fixed, warnings=(*calibration.warnings, *warnings))


def _table(calibration: Calibration, times: BlockTimes) -> Group:
    passes = "forward, recompute and backward" if calibration.recomputes else "forward and backward"
    rows = zip(times.lengths, zip(*times.seconds, strict=True), times.per_block(), times.spreads(), strict=True)
    cells = []
    for length, kinds, block_s, spread in rows:
        expected_s = calibration.block_s(length)
        of_kinds = {
            f"{count} x {name}": f"{statistics.median(seconds) * 1e3:.3f}"
            for (name, count), seconds in zip(times.kinds, kinds, strict=True)
        }
        cells.append({
            "tokens": f"{length:,}", **of_kinds, "mean block": f"{block_s * 1e3:.3f}", "spread": f"{spread:.1%}",
            "predicted": f"{expected_s * 1e3:.3f}", "error": f"{expected_s / block_s - 1:+.1%}",
        })  # fmt: skip
    num_rounds = len(times.seconds[0][0])
    caption = f"ms for one sequence: {passes} of one block, medians of {num_rounds} rounds"
    return table_of(cells, keys=("tokens",), caption=caption)


def _sentences(calibration: Calibration) -> list[str]:
    found = [
        f"gamma {calibration.gamma:.3f}, k {calibration.seconds_per_flop:.3e} s per FLOP (forward), which is "
        f"{calibration.flops_per_s / 1e12:.3g} TFLOP/s. The fit is off by {calibration.relative_rms_error:.1%} (RMS), "
        f"without gamma by {calibration.relative_rms_error_without_gamma:.1%}."
    ]
    for name, cost in (("inside the node", calibration.node), ("between nodes", calibration.network)):
        if cost is not None:
            found.append(
                f"All-to-all {name}, {cost.num_ranks} ranks: {cost.latency_s * 1e6:.3g} us and "
                f"{cost.bytes_per_s / 1e9:.3g} GB/s that a rank sends, packing included; the fit is off by "
                f"{cost.relative_rms_error:.1%} (RMS)."
            )
    if (fixed := calibration.fixed) is not None:
        found.append(
            f"A micro-batch takes {fixed.seconds * 1e3:.3g} ms beside its blocks, on {fixed.num_ranks} ranks that "
            f"shard the model; with it whole steps are predicted to {fixed.relative_rms_error:.1%} (RMS)."
        )
    return found + [warning[0].upper() + warning[1:] + "." for warning in calibration.warnings]
