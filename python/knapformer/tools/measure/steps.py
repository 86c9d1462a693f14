"""A model as it is trained, sharded over the ranks, and the times of whole steps. Needs torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from knapformer import Sample
from knapformer.adapters.config import ModelConfig
from knapformer.adapters.model import PackedModel
from knapformer.adapters.named import build_model, materialize, random_batch
from knapformer.models.parallel import init_weights, set_checkpointing, shard_model, train_adapters
from knapformer.tools.measure.blocks import packed_lengths
from knapformer.tools.measure.timing import Work, measured_rounds


def sharded_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    mode: str = "training",
    *,
    keep_exchanges: bool = False,
    seed: int = 0,
) -> PackedModel:
    """A model sharded over all ranks, never whole on any: built without memory, sharded, then filled. Collective.

    mode: "training", or "lora" with adapters on a frozen base.
    """
    # Where the model computes in bfloat16, its parameters are kept in float32.
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    model = build_model(config, kept, "meta")
    if mode == "lora":
        train_adapters(model, (block for blocks in model.block_lists() for block in blocks))
    set_checkpointing(model, checkpointing, keep_exchanges=keep_exchanges)
    shard_model(model, init_device_mesh(device.type, (dist.get_world_size(),)), dtype if dtype != kept else None)
    materialize(model, device)
    init_weights(model, seed)
    return model


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
