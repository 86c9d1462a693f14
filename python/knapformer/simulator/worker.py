"""What one rank of a simulation does.

The loop of the paper: forward, mean loss, backward, gradients dropped; no optimizer. Every step runs once per variant
("no balancer" and each topology), on the same data and weights, one after another and in turns first: what disturbs the
machine for a while disturbs them all.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from knapformer import DataMix, SequenceBalancer, WorkloadModel
from knapformer.calibrate.fit import plausible
from knapformer.losses import token_mean
from knapformer.measure.device import default_dtype, joined_group
from knapformer.measure.environment import environment
from knapformer.measure.progress import Progress
from knapformer.models.parallel import DTYPES, Model, build_model, init_weights, set_checkpointing, shard_model
from knapformer.simulator.batches import Batch, random_batch
from knapformer.simulator.calibrate import fit_blocks
from knapformer.simulator.report import write_report
from knapformer.simulator.results import Variant, figures
from knapformer.simulator.settings import SimulationSettings


@dataclass
class _Run:
    """A variant while it is measured."""

    topology: str | None
    balancer: SequenceBalancer | None
    latencies_s: list[float] = field(default_factory=list)  # of this rank, one per timed step and repeat


def run_rank(settings_json: str) -> None:
    """Collective over the world that torchrun's environment variables describe. Rank 0 reports."""
    settings = SimulationSettings.from_json(settings_json)
    with joined_group(settings.device, settings.threads, settings.num_ranks) as device:
        _simulate(settings, device)


def _simulate(settings: SimulationSettings, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mix = settings.mix()
    dtype = DTYPES[settings.dtype or default_dtype(device)]
    num_rounds = settings.num_warmup_steps + settings.num_steps * settings.num_repeats
    with Progress(num_rounds * (1 + len(settings.topologies)), enabled=rank == 0) as progress:
        gamma, fit = settings.gamma, None
        if gamma is None:
            progress.describe("fitting gamma to this machine")
            seq_lens = [n for lens in mix.draw_lengths(settings.seed, 0, world) for n in lens]
            fit = fit_blocks(settings.model, seq_lens, device, dtype, settings.checkpointing)
            if plausible(fit.gamma):
                # The fit sees the masked attention at work; the planner multiplies by the mask's share on its own.
                gamma = fit.gamma / settings.mask_factor
            else:
                gamma = 1.0
                progress.describe(f"the fitted gamma {fit.gamma:.3g} is implausible, going on with 1")
        progress.describe("building the model")
        model = _sharded_model(settings, device, dtype)
        runs = [_Run(None, None)]
        runs += [_Run(topology, balancer_of(settings, topology, gamma)) for topology in settings.topologies]
        progress.describe("warming up")
        for step in range(settings.num_warmup_steps + settings.num_steps):
            timed = step >= settings.num_warmup_steps
            if timed:
                progress.describe("measuring")
            seed = ((settings.seed * 1_000_003 + step) * 65_537 + rank) % (1 << 63)
            batch, target = random_batch(mix.draw(settings.seed, step, rank), settings.model, seed, device, dtype)
            for turn in range(len(runs) * (settings.num_repeats if timed else 1)):
                run = runs[(turn + step) % len(runs)]
                latency_s = _timed_step(model, batch, target, run.balancer, device)
                if timed:
                    run.latencies_s.append(latency_s)
                progress.advance()
        latencies_s = torch.tensor([run.latencies_s for run in runs], dtype=torch.float64)
        dist.all_reduce(latencies_s, op=dist.ReduceOp.MAX)
        latencies_s = latencies_s.unflatten(1, (settings.num_steps, settings.num_repeats)).amin(2)
    if rank == 0:
        variants = _variants(settings, mix, gamma, latencies_s.tolist())
        write_report(settings, _results(settings, mix, variants, gamma, fit, device, dtype))
        if settings.report_path is not None:
            _write_html(settings.report_path, settings, variants, dtype)


def balancer_of(settings: SimulationSettings, topology: str, gamma: float) -> SequenceBalancer:
    """Plans as settings.plan does. Collective over the world."""
    return SequenceBalancer(
        topology, gamma=gamma, mask_factor=settings.mask_factor, solver=settings.solver, cluster=settings.cluster
    )


def _sharded_model(settings: SimulationSettings, device: torch.device, dtype: torch.dtype) -> Model:
    """Never whole on a rank: built without memory, sharded, then filled."""
    # Parameters are kept in float32 where bfloat16 is computed in.
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    model = build_model(settings.model, kept, "meta")
    set_checkpointing(model, settings.checkpointing, keep_exchanges=settings.keep_exchanges)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shard_model(model, mesh, dtype if dtype != kept else None)
    model.to_empty(device=device)
    init_weights(model, settings.seed)
    return model


def _timed_step(
    model: Model, batch: Batch, target: torch.Tensor, balancer: SequenceBalancer | None, device: torch.device
) -> float:
    """Seconds from a common start to the end of this rank's backward pass."""
    gc.collect()  # now, and not in the middle
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    error = model(batch, balancer) - target
    loss = token_mean(error.square().mean(-1))
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    latency_s = time.perf_counter() - start
    gc.enable()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}: the model's numbers leave the range of {target.dtype}")
    for parameter in model.parameters():
        parameter.grad = None
    return latency_s


def _variants(
    settings: SimulationSettings, mix: DataMix, gamma: float, latencies_s: list[list[float]]
) -> list[Variant]:
    """With the plans that the ranks made: the same input gives the same plan anywhere."""
    steps = range(settings.num_warmup_steps, settings.num_warmup_steps + settings.num_steps)
    lengths = [mix.draw_lengths(settings.seed, step, settings.num_ranks) for step in steps]
    plans = [[settings.plan(lens, topology, gamma) for lens in lengths] for topology in settings.topologies]
    names: list[str | None] = [None, *settings.topologies]
    return [
        Variant(name, times, made) for name, times, made in zip(names, latencies_s, [plans[0], *plans], strict=True)
    ]


def _write_html(path: str, settings: SimulationSettings, variants: list[Variant], dtype: torch.dtype) -> None:
    from knapformer.predict import TrainedModel
    from knapformer.report import write_report as write_html

    model = TrainedModel(
        num_blocks=settings.model.depth, recomputes=settings.checkpointing, bytes_per_number=dtype.itemsize
    )
    measured_s = {variant.name: variant.latencies_s for variant in variants}
    # Not predicted: the cluster model's hardware is not this machine.
    write_html(path, variants[-1].plans[0], model=model, measured_s=measured_s, predicts=False)


def _results(
    settings: SimulationSettings,
    mix: DataMix,
    variants: list[Variant],
    gamma: float,
    fit: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    flops = WorkloadModel(gamma=1.0, mask_factor=settings.mask_factor)
    d_model = settings.model.d_model
    forward_flops = [sum(flops.work(n, d_model) for lens in made.seq_lens for n in lens) for made in variants[0].plans]
    return {
        "format": "knapformer-simulation/1",
        "settings": settings.to_dict(),
        "data_codes": str(mix),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "gamma": gamma,
        "fit": fit
        and {
            "seconds_per_flop": fit.seconds_per_flop,
            "gamma": fit.gamma,
            "relative_rms_error": fit.relative_rms_error,
        },
        "variants": [
            figures(
                variant, variants[0], forward_flops, settings.model.depth, settings.peak_tflops, settings.checkpointing
            )
            for variant in variants
        ],
        "environment": environment(device),
    }
