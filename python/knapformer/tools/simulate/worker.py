"""What one rank of a simulation does.

The loop of the paper: forward, mean loss, backward, gradients dropped; no optimizer. Every step runs in all variants
(see variant_names) on the same weights, and on the same samples where the variant allows it. Variants run one after
another and take turns in going first, so that a temporary disturbance of the machine hits them all.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from knapformer import Plan, SequenceBalancer
from knapformer.adapters.named import random_batch
from knapformer.losses import count_over_ranks, global_mean, token_mean
from knapformer.models.model import PackedModel
from knapformer.models.parallel import DTYPES
from knapformer.tools.measure.device import default_dtype, joined_group
from knapformer.tools.measure.progress import Progress
from knapformer.tools.measure.steps import sharded_model
from knapformer.tools.measure.timing import synchronize
from knapformer.tools.simulate.data import SeededSample
from knapformer.tools.simulate.report import write_report
from knapformer.tools.simulate.results import Measured
from knapformer.tools.simulate.settings import SimulationSettings
from knapformer.tools.simulate.variants import Variants, variant_names


def run_rank(settings: SimulationSettings) -> None:
    """Collective over the world that torchrun's environment variables describe. Rank 0 reports."""
    with joined_group(settings.device, settings.threads, settings.num_ranks) as device:
        _simulate(settings, device)


def _simulate(settings: SimulationSettings, device: torch.device) -> None:
    rank = dist.get_rank()
    dtype = DTYPES[settings.dtype or default_dtype(device)]
    num_rounds = settings.num_warmup_steps + settings.num_steps * settings.num_repeats
    names = variant_names(settings)
    with Progress(num_rounds * len(names), enabled=rank == 0) as progress:
        progress.describe("building the model")
        model = sharded_model(
            settings.model, device, dtype, settings.checkpointing, settings.mode,
            keep_exchanges=settings.keep_exchanges, seed=settings.seed,
        )  # fmt: skip
        variants = Variants(settings)
        balancers = {topology: balancer_of(settings, topology) for topology in settings.topologies}
        balancers |= {
            name: balancer_of(settings, str(way.followed[0].topology), max_tokens_per_rank=0)
            for name, way in variants.ways(0).items()
            if way.followed is not None
        }
        times: list[list[float]] = [[] for _ in names]  # of this rank, one per timed step and repeat
        outcomes: list[list[_Outcome]] = [[] for _ in names]  # one per timed step
        progress.describe("warming up")
        for step in range(settings.num_warmup_steps + settings.num_steps):
            timed = step >= settings.num_warmup_steps
            if timed:
                progress.describe("measuring")
            ways = variants.ways(step)
            # Variants that compute the same samples in the same place share their tensors.
            data = {id(way.data): way.data for way in ways.values()}
            batches = {key: _batches(settings, of.samples[rank], device, dtype) for key, of in data.items()}
            for turn in range(len(names) * (settings.num_repeats if timed else 1)):
                variant = (turn + step) % len(names)
                name = names[variant]
                of = batches[id(ways[name].data)], balancers.get(name), ways[name].followed
                seconds, outcome = _timed_step(model, *of, device)
                if timed:
                    times[variant].append(seconds)
                    if turn < len(names):
                        outcomes[variant].append(outcome)
                progress.advance()
        latencies_s = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(latencies_s, op=dist.ReduceOp.MAX)
        latencies_s = latencies_s.unflatten(1, (settings.num_steps, settings.num_repeats)).amin(2)
        num_parameters = sum(p.numel() for blocks in model.block_lists() for p in blocks.parameters())
    if rank == 0:
        measured = [
            Measured(seconds, [of.loss for of in of_steps], [of.gradient_norm for of in of_steps])
            for seconds, of_steps in zip(latencies_s.tolist(), outcomes, strict=True)
        ]
        write_report(settings, device, dtype, measured, num_parameters)


def balancer_of(settings: SimulationSettings, topology: str, **others: Any) -> SequenceBalancer:
    """Plans as settings.plan does, with `others` too. Collective over the world."""
    return SequenceBalancer(topology, mask=settings.model.mask, **(settings.planning() | others))


Batches = list[tuple[Any, torch.Tensor]]  # of each micro-batch, with its target


def _batches(
    settings: SimulationSettings,
    micro_batches: Sequence[Sequence[SeededSample]],
    device: torch.device,
    dtype: torch.dtype,
) -> Batches:
    """The batches of one rank. Each sample is drawn by itself, from its seed."""

    def drawn(samples: Sequence[SeededSample]) -> tuple[Any, torch.Tensor]:
        nothing = random_batch(settings.model, [], 0, device, dtype)
        alone = [random_batch(settings.model, [sample.size], sample.seed, device, dtype) for sample in samples]
        batches, targets = zip(nothing, *alone, strict=True)
        return joined(batches), torch.cat(targets)

    return [drawn(samples) for samples in micro_batches]


def joined(batches: Sequence[Any]) -> Any:
    """Joins several batches of a model into one: concatenates tensors by row, and lists; None stays None."""

    def field_of(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        return None if values[0] is None else [entry for value in values for entry in value]

    return type(batches[0])(**{field.name: field_of(field.name) for field in dataclasses.fields(batches[0])})


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
