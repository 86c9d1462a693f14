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
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from knapformer import Plan, SequenceBalancer
from knapformer.adapters.named import ModelConfig, PackedModel, random_batch
from knapformer.losses import count_over_ranks, global_mean, token_mean
from knapformer.models.parallel import DTYPES
from knapformer.tools.files import Progress
from knapformer.tools.measure.blocks import sharded_model
from knapformer.tools.measure.environment import default_dtype, environment
from knapformer.tools.measure.timing import synchronize
from knapformer.tools.simulate.results import Variant, report
from knapformer.tools.simulate.steps import SeededSample, Simulation, VariantStep


def simulate(simulation: Simulation, device: torch.device) -> None:
    """Collective over the world. Rank 0 reports."""
    args = simulation.args
    rank, config, trained = dist.get_rank(), simulation.model, simulation.planning.model
    dtype = DTYPES[args.dtype or default_dtype(device)]
    of_steps = simulation.variants()
    first = next(of_steps)
    names = list(first)
    kept: list[dict[str, VariantStep]] = []  # of timed steps
    with Progress((args.warmup + args.steps * args.repeats) * len(names), enabled=rank == 0) as progress:
        progress.describe("building the model")
        model = sharded_model(
            config, device, dtype, args.recomputes, trained.mode, keep_exchanges=args.keep_exchanges, seed=args.seed
        )
        balancers = {topology: balancer_of(simulation, topology, simulation.limit) for topology in args.topology}
        balancers |= {
            name: balancer_of(simulation, str(way.step.plans[0].topology))
            for name, way in first.items() if way.followed
        }  # fmt: skip
        times: list[list[float]] = [[] for _ in names]  # of this rank, one per timed step and repeat
        outcomes: list[list[_Outcome]] = [[] for _ in names]  # one per timed step
        progress.describe("warming up")
        for step, ways in enumerate(itertools.chain([first], of_steps)):
            timed = step >= args.warmup
            if timed:
                progress.describe("measuring")
                kept.append(ways)
            # Variants that compute the same samples in the same place share their tensors.
            data = {id(way.data): way.data for way in ways.values()}
            batches = {key: _batches(config, of[rank], device, dtype) for key, of in data.items()}
            for turn in range(len(names) * (args.repeats if timed else 1)):
                variant = (turn + step) % len(names)
                way = ways[names[variant]]
                followed = way.step.plans if way.followed else None
                of = batches[id(way.data)], balancers.get(names[variant]), followed
                seconds, outcome = _timed_step(model, *of, device)
                if timed:
                    times[variant].append(seconds)
                    if turn < len(names):
                        outcomes[variant].append(outcome)
                progress.advance()
        latencies_s = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(latencies_s, op=dist.ReduceOp.MAX)
        latencies_s = latencies_s.unflatten(1, (args.steps, args.repeats)).amin(2)
        num_parameters = sum(p.numel() for blocks in model.block_lists() for p in blocks.parameters())
    if rank != 0:
        return
    variants = [
        Variant(
            name, [ways[name].step for ways in kept], seconds, [of.loss for of in results],
            [of.gradient_norm for of in results], first[name].same_samples,
        )
        for name, seconds, results in zip(names, latencies_s.tolist(), outcomes, strict=True)
    ]  # fmt: skip
    on = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "environment": environment(device)}
    measured = trained.replace(num_parameters=float(num_parameters), element_size=dtype.itemsize)
    # Variants may differ by the rounding of sums in another order.
    report(simulation, measured, variants, math.sqrt(torch.finfo(dtype).eps), on)


def balancer_of(simulation: Simulation, topology: str, max_tokens: int = 0) -> SequenceBalancer:
    """Plans as the simulation does. Collective over the world."""
    of = simulation.planning
    return SequenceBalancer(topology, of, solver=of.solver, max_tokens_per_rank=max_tokens)


Batches = list[tuple[Any, torch.Tensor]]  # of each micro-batch, with its target


def _batches(
    config: ModelConfig, micro_batches: Sequence[Sequence[SeededSample]], device: torch.device, dtype: torch.dtype
) -> Batches:
    """The batches of one rank. Each sample is drawn by itself, from its seed."""
    return [
        random_batch(config, [of.size for of in samples], [of.seed for of in samples], device, dtype)
        for samples in micro_batches
    ]


class _Outcome(NamedTuple):
    """The result over all ranks: what one process with all samples of the step would compute."""

    loss: float
    gradient_norm: float


def _timed_step(
    model: PackedModel,
    batches: Batches,
    balancer: SequenceBalancer | None,
    plans: Sequence[Plan] | None,
    device: torch.device,
) -> tuple[float, _Outcome]:
    """Runs an optimizer step without the optimizer. Returns the seconds from a common start to the end of this rank's
    last backward pass, and the outcome. plans: per micro-batch, for the balancer to follow; None: it makes its own."""
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
    latency_s = time.perf_counter() - start
    gc.enable()
    outcome = _Outcome(global_mean(whole_loss).item(), _gradient_norm(model))
    if not math.isfinite(outcome.loss):
        raise RuntimeError(f"the loss is {outcome.loss}: the model's numbers leave the range of {target.dtype}")
    for parameter in model.parameters():
        parameter.grad = None
    return latency_s, outcome


def _gradient_norm(model: PackedModel) -> float:
    """Over the shards of all ranks."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    shards = [cast(DTensor, parameter.grad).to_local() for parameter in trained]
    squares = torch.stack([shard.double().square().sum() for shard in shards]).sum()
    dist.all_reduce(squares)
    return math.sqrt(squares.item())
