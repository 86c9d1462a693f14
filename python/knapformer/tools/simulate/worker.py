"""What one rank of a simulation does.

The loop of the paper: forward, mean loss, backward, gradients dropped; no optimizer. Every step runs in all variants on
the same weights, and on the same samples where the variant allows it. Variants run one after another and take turns in
going first, so that a temporary disturbance of the machine hits them all.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from knapformer import Plan, SequenceBalancer
from knapformer.adapters.named import ModelConfig, PackedModel, random_batch
from knapformer.losses import count_over_ranks, global_mean, token_mean
from knapformer.models.training import DTYPES
from knapformer.tools.files import Progress
from knapformer.tools.measure.blocks import sharded_model
from knapformer.tools.measure.environment import default_dtype, environment
from knapformer.tools.measure.timing import synchronize
from knapformer.tools.simulate.output import Measured, Variant, report
from knapformer.tools.simulate.variants import SeededSample, Simulation


def simulate(simulation: Simulation, device: torch.device) -> None:
    """Collective over the world. Rank 0 reports."""
    args = simulation.args
    rank, config, trained = dist.get_rank(), simulation.model, simulation.planning.model
    dtype = DTYPES[args.dtype or default_dtype(device)]
    of_steps = simulation.variants()
    first = next(of_steps)
    variants = [Variant(name, same_samples=way.same_samples) for name, way in first.items()]
    with Progress((args.warmup + args.steps * args.repeats) * len(variants), enabled=rank == 0) as progress:
        progress.describe("building the model")
        model = sharded_model(
            config, device, dtype, args.recomputes, trained.mode, keep_exchanges=args.keep_exchanges, seed=args.seed
        )
        balancers = {topology: balancer_of(simulation, topology, simulation.limit) for topology in args.topology}
        balancers |= {
            name: balancer_of(simulation, str(way.step.plans[0].topology))
            for name, way in first.items() if way.followed
        }  # fmt: skip
        for number, ways in enumerate(itertools.chain([first], of_steps)):
            is_timed = number >= args.warmup
            progress.describe("measuring" if is_timed else "warming up")
            # Variants that compute the same samples in the same place share their tensors.
            data = {id(way.data): way.data for way in ways.values()}
            batches = {key: _batches(config, of[rank], device, dtype) for key, of in data.items()}
            measured: list[list[Measured]] = [[] for _ in variants]
            for turn in range(len(variants) * (args.repeats if is_timed else 1)):
                k = (turn + number) % len(variants)
                way, balancer = ways[variants[k].name], balancers.get(variants[k].name)
                followed = way.step.plans if way.followed else None
                measured[k].append(_timed_step(model, batches[id(way.data)], balancer, followed, device))
                progress.count()
            if is_timed:
                for variant, way, repeats in zip(variants, ways.values(), measured, strict=True):
                    variant.steps.append(way.step)
                    variant.measured.append(min(repeats))
        num_parameters = sum(p.numel() for blocks in model.block_lists() for p in blocks.parameters())
    if rank != 0:
        return
    on = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "environment": environment(device)}
    ran = trained.replace(num_parameters=float(num_parameters), element_size=dtype.itemsize)
    # Variants may differ by the rounding of sums in another order.
    report(simulation, ran, variants, math.sqrt(torch.finfo(dtype).eps), on)


def balancer_of(simulation: Simulation, topology: str, max_tokens_per_rank: int = 0) -> SequenceBalancer:
    """Plans as the simulation does. Collective over the world."""
    of = simulation.planning
    return SequenceBalancer(topology, of, solver=of.solver, max_tokens_per_rank=max_tokens_per_rank)


Batches = list[tuple[Any, torch.Tensor]]  # of each micro-batch, with its target


def _batches(
    config: ModelConfig, micro_batches: Sequence[Sequence[SeededSample]], device: torch.device, dtype: torch.dtype
) -> Batches:
    """The batches of one rank. Each sample is drawn by itself, from its seed."""
    return [
        random_batch(config, [of.size for of in samples], [of.seed for of in samples], device, dtype)
        for samples in micro_batches
    ]


def _timed_step(
    model: PackedModel, batches: Batches, balancer: SequenceBalancer | None, plans: Sequence[Plan] | None,
    device: torch.device,
) -> Measured:  # fmt: skip
    """Runs an optimizer step without the optimizer, from a common start to the end of the last backward pass.

    plans: per micro-batch, for the balancer to follow; None: it makes its own."""
    total = count_over_ranks(sum(len(target) for _, target in batches))
    whole_loss = torch.zeros((), device=device)
    gc.collect()  # now, not within the timed part
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    for k, (batch, target) in enumerate(batches):
        if plans is not None and balancer is not None:
            balancer.follow(plans[k])
        error = model(batch, balancer, planned=plans is not None) - target
        loss = token_mean(error.square().mean(-1), total=total)
        loss.backward()
        whole_loss = whole_loss + loss.detach()
    synchronize(device)
    latency_s = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(latency_s, op=dist.ReduceOp.MAX)
    loss_of_step, gradient_norm = global_mean(whole_loss).item(), _gradient_norm(model)
    if not math.isfinite(loss_of_step):
        raise RuntimeError(f"the loss is {loss_of_step}: the model's numbers leave the range of {target.dtype}")
    for parameter in model.parameters():
        parameter.grad = None
    return Measured(latency_s.item(), loss_of_step, gradient_norm)


def _gradient_norm(model: PackedModel) -> float:
    """Over the shards of all ranks."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    shards = [cast(DTensor, parameter.grad).to_local() for parameter in trained]
    squares = torch.stack([shard.double().square().sum() for shard in shards]).sum()
    dist.all_reduce(squares)
    return math.sqrt(squares.item())
