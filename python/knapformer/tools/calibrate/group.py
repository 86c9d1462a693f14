"""What a group of ranks takes: the balancer's exchanges, and whole steps of a sharded model. Needs torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from knapformer import Sample, SequenceBalancer
from knapformer.adapters.named import ModelConfig, build_model, random_batch
from knapformer.tools.measure.blocks import packed_lengths, sharded_model
from knapformer.tools.measure.timing import Work, measured_rounds

# What a rank receives of a token: three heads of 128 numbers in bfloat16, as with FLUX in a bag of 8.
_HEADS_PER_RANK, _HEAD_DIM, _DTYPE = 3, 128, torch.bfloat16
_MEAN_TENSORS = 2  # the mean of three on the way there and one on the way back


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


def node_groups(num_local: int, device: torch.device) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's group inside its node, and its group with one rank of each node; None where it would be alone.

    Collective over the world, whose nodes have `num_local` consecutive ranks each.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size() // num_local, num_local))
    node, network = (mesh.get_group(dim) if mesh.size(dim) > 1 else None for dim in (1, 0))
    return node, network


def fits(config: ModelConfig, device: torch.device) -> bool:
    """Whether parameters and their gradients, sharded over the world, take at most half of each rank's memory.
    Collective."""
    num_parameters = sum(p.numel() for p in build_model(config, torch.float32, "meta").parameters())
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:  # a rank's share of the host's
        memory_bytes = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
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
    """Steps over about these lengths, short ones packed as `time_works` packs them. Collective over the world."""
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
