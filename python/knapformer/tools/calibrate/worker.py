"""What one rank of a calibration does: it measures blocks, and with others the balancer's exchanges and whole steps.
Needs torch."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Group
from torch.distributed.device_mesh import init_device_mesh

from knapformer import Cluster, Sample, SequenceBalancer, StateError, TrainedModel, predict_micro_batch
from knapformer.adapters.named import ModelConfig, build_model, random_batch
from knapformer.calibration import Calibration, ExchangeCost
from knapformer.models.packed_step import PackedStep
from knapformer.models.training import DTYPES
from knapformer.tools.calibrate.fit import MAX_EXCHANGE_ERROR, calibration_of, error_warnings, fit_exchange, fit_fixed
from knapformer.tools.files import Progress, show, table_of, write_json
from knapformer.tools.measure.blocks import BlockKind, BlockTimes, kinds_of, packed_lengths, sharded_model, time_blocks
from knapformer.tools.measure.environment import default_dtype, device_name, environment
from knapformer.tools.measure.timing import Work, measured_rounds
from knapformer.tools.settings import trained_model
from knapformer.tools.ways import PlanCost

_NUM_STEP_LENGTHS = 5
_EXCHANGE_ROUNDS = 20
# Bytes of a rank's rows: from sizes whose time is mostly latency to sizes whose time is mostly the transfer.
_EXCHANGE_SIZES = {"cpu": [1 << e for e in range(14, 23, 2)], "cuda": [1 << e for e in range(16, 29, 2)]}
# What a rank receives of a token: three heads of 128 numbers in bfloat16, as with FLUX in a bag of 8.
_HEADS_PER_RANK, _HEAD_DIM, _DTYPE = 3, 128, torch.bfloat16
_MEAN_TENSORS = 2  # the mean of three on the way there and one on the way back


def calibrate(args: argparse.Namespace, config: ModelConfig, lengths: Sequence[int], device: torch.device) -> None:
    """Collective where torch.distributed is initialised; alone otherwise. Rank 0 reports.

    All ranks measure at the same time, as in a run, where they share memory and power; their times are averaged.
    """
    dtype = args.dtype or default_dtype(device)
    mask = args.mask or config.mask
    mode, num_ranks = args.mode or "training", dist.get_world_size() if dist.is_initialized() else 1
    first = num_ranks == 1 or dist.get_rank() == 0
    kinds = kinds_of(config, device, DTYPES[dtype], mode)

    def work(kind: BlockKind, seq_lens: list[int]) -> Work:
        step = PackedStep(seq_lens, config.d_model, mask=mask)
        return kind.work(step, list(map(config.text_tokens, seq_lens)), args.recomputes)

    with Progress((args.repeats + args.warmup) * len(kinds) * len(lengths), enabled=first) as progress:
        progress.describe("measuring blocks")
        rounds = (args.repeats, args.warmup)
        times = time_blocks(kinds, work, lengths, device, *rounds, progress.count)
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
            mask=mask, device=device_name(device), overlaps_attention=device.type != "cpu",
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


def _time_exchanges(device: torch.device) -> dict[str, ExchangeTimes]:
    """Exchanges inside the node and between nodes, where this world has them, by Calibration's field. Collective."""
    num_local, sizes = int(os.environ["LOCAL_WORLD_SIZE"]), _EXCHANGE_SIZES[device.type]
    mesh = init_device_mesh(device.type, (dist.get_world_size() // num_local, num_local))
    groups = {name: mesh.get_group(dim) for name, dim in (("node", 1), ("network", 0)) if mesh.size(dim) > 1}
    return {name: time_exchanges(sizes, device, _EXCHANGE_ROUNDS, group) for name, group in groups.items()}


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
    planning = PlanCost(d_model=config.d_model, gamma=calibration.gamma, mask=config.mask, cluster=cluster, model=model)
    predicted_s = [predict_micro_batch(planning.home([lens] * num_ranks)).total_s for lens in steps.seq_lens]
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
        f"gamma {calibration.gamma:.3f} (the time of a FLOP of attention over that of another one), k "
        f"{calibration.seconds_per_flop:.3e} s per FLOP (forward), which is "
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


@dataclass(frozen=True)
class ExchangeTimes:
    num_ranks: int
    num_bytes: list[float]  # that a rank sends
    seconds: list[float]  # medians, of the slowest rank


def time_exchanges(
    sizes: Sequence[int], device: torch.device, num_rounds: int, group: dist.ProcessGroup | None = None
) -> ExchangeTimes:
    """For each size, what a rank sends in an all-to-all, and its time.

    An all-to-all is what attention exchanges in one bag of all ranks of `group`, packing included, as the cluster model
    counts it: the mean of the way there (queries, keys and values) and the way back (outputs), which pack differently.
    sizes: bytes of a rank's rows in that mean, rounded down to whole rows, at least one for each rank. Collective over
    `group`.
    """
    num_ranks = dist.get_world_size(group)
    balancer = SequenceBalancer(f"g{num_ranks}n1", group=group, solver="greedy")  # even chunks
    d_model = num_ranks * _HEADS_PER_RANK * _HEAD_DIM
    row_bytes = d_model * _DTYPE.itemsize
    tokens = [max(num_ranks, size // (_MEAN_TENSORS * row_bytes)) for size in sizes]

    def prepare(num_tokens: int) -> Work:
        balancer.plan_routing([num_tokens], d_model)
        _, x, _ = balancer.route(torch.zeros(num_tokens, d_model, device=device, dtype=_DTYPE))
        q = x.unflatten(1, (-1, _HEAD_DIM))
        dist.barrier(group)
        return lambda: balancer.post_attn(balancer.pre_attn(q, q, q)[1])

    with torch.no_grad():
        rounds = measured_rounds([partial(prepare, n) for n in tokens], device, num_rounds)
    slowest = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    sent = [_MEAN_TENSORS * n * row_bytes * (num_ranks - 1) / num_ranks for n in tokens]
    return ExchangeTimes(num_ranks, sent, (slowest.median(1).values / 2).tolist())


def fits(config: ModelConfig, device: torch.device) -> bool:
    """Whether parameters and their gradients, sharded over the world, take at most half of each rank's memory.
    Collective."""
    num_parameters = sum(p.numel() for p in build_model(config, torch.float32, "meta").parameters())
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:  # a rank's share of the host's
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ["LOCAL_WORLD_SIZE"])
    smallest = torch.tensor(memory_bytes)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return 2 * 4 * num_parameters / dist.get_world_size() <= smallest.item() / 2


@dataclass(frozen=True)
class StepTimes:
    """Times of steps of one micro-batch in which every rank computes its own sequences, of the same lengths on all
    ranks, so that none waits for another."""

    num_parameters: int  # of the blocks
    seq_lens: list[list[int]]  # for each step, those of a rank
    seconds: list[list[float]]  # by step and round: forward, recompute and backward of the slowest rank


def time_steps(
    config: ModelConfig, lengths: Sequence[int], device: torch.device, dtype: torch.dtype, checkpointing: bool,
    mode: str, num_rounds: int, num_warmup_rounds: int = 1,
) -> StepTimes:  # fmt: skip
    """Steps over about these lengths, short ones packed as `time_blocks` packs them. Collective over the world."""
    model = sharded_model(config, device, dtype, checkpointing, mode)

    def sample(length: int) -> Sample:
        return config.possible(config.sample_of(length, config.text_tokens(length)))

    def step(samples: Sequence[Sample]) -> Work:
        batch, target = random_batch(config, samples, dist.get_rank(), device, dtype)
        model.zero_grad(set_to_none=True)
        dist.barrier()
        return lambda: (model(batch, None) - target).square().mean().backward()

    drawn = [[sample(n) for n in packed] for packed in packed_lengths(lengths, device)]
    rounds = measured_rounds([partial(step, of) for of in drawn], device, num_rounds, num_warmup_rounds)
    seconds = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return StepTimes(
        sum(p.numel() for blocks in model.block_lists() for p in blocks.parameters()),
        [[config.planned_tokens(size) for size in of] for of in drawn],
        seconds.tolist(),
    )
