"""What one rank of a simulation does.

The loop of the paper: forward, mean loss, backward, gradients dropped; no optimizer. Every step runs once per variant
("no balancer" and each topology), on the same data and weights, one after another and in turns first: what disturbs the
machine for a while disturbs them all.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from knapformer import SequenceBalancer
from knapformer._core import DEFAULT_GAMMA
from knapformer.losses import token_mean
from knapformer.models.model import PackedModel
from knapformer.models.parallel import DTYPES, init_weights, set_checkpointing, shard_model
from knapformer.models.registry import build_model, random_batch
from knapformer.tools.measure.device import default_dtype, joined_group
from knapformer.tools.measure.figures import plausible
from knapformer.tools.measure.progress import Progress
from knapformer.tools.simulate.calibrate import fit_blocks
from knapformer.tools.simulate.report import write_report
from knapformer.tools.simulate.settings import SimulationSettings


def run_rank(settings: SimulationSettings) -> None:
    """Collective over the world that torchrun's environment variables describe. Rank 0 reports."""
    with joined_group(settings.device, settings.threads, settings.num_ranks) as device:
        _simulate(settings, device)


def _simulate(settings: SimulationSettings, device: torch.device) -> None:
    rank = dist.get_rank()
    mix = settings.mix()
    dtype = DTYPES[settings.dtype or default_dtype(device)]
    num_rounds = settings.num_warmup_steps + settings.num_steps * settings.num_repeats
    with Progress(num_rounds * (1 + len(settings.topologies)), enabled=rank == 0) as progress:
        gamma, fit = settings.gamma, None
        if gamma is None:
            progress.describe("fitting gamma to this machine")
            seq_lens = [n for lens in settings.seq_lens(0) for n in lens]
            fit = fit_blocks(settings.model, seq_lens, device, dtype, settings.checkpointing)
            if plausible(fit.gamma):
                gamma = fit.gamma
            else:
                gamma = DEFAULT_GAMMA
                progress.describe(f"the fitted gamma {fit.gamma:.3g} is implausible, going on with {gamma}")
        progress.describe("building the model")
        model = _sharded_model(settings, device, dtype)
        balancers = [None, *(balancer_of(settings, topology, gamma) for topology in settings.topologies)]
        # Of this rank, for each variant one per timed step and repeat.
        times: list[list[float]] = [[] for _ in balancers]
        progress.describe("warming up")
        for step in range(settings.num_warmup_steps + settings.num_steps):
            timed = step >= settings.num_warmup_steps
            if timed:
                progress.describe("measuring")
            seed = ((settings.seed * 1_000_003 + step) * 65_537 + rank) % (1 << 63)
            batch, target = random_batch(settings.model, mix.draw(settings.seed, step, rank), seed, device, dtype)
            for turn in range(len(balancers) * (settings.num_repeats if timed else 1)):
                variant = (turn + step) % len(balancers)
                seconds = _timed_step(model, batch, target, balancers[variant], device)
                if timed:
                    times[variant].append(seconds)
                progress.advance()
        latencies_s = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(latencies_s, op=dist.ReduceOp.MAX)
        latencies_s = latencies_s.unflatten(1, (settings.num_steps, settings.num_repeats)).amin(2)
    if rank == 0:
        write_report(settings, device, dtype, gamma, fit, latencies_s.tolist())


def balancer_of(settings: SimulationSettings, topology: str, gamma: float) -> SequenceBalancer:
    """Plans as settings.plan does. Collective over the world."""
    return SequenceBalancer(topology, mask=settings.model.mask, **settings.planning(gamma))


def _sharded_model(settings: SimulationSettings, device: torch.device, dtype: torch.dtype) -> PackedModel:
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
    model: PackedModel, batch: Any, target: torch.Tensor, balancer: SequenceBalancer | None, device: torch.device
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
