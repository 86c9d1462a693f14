"""A model's blocks of each kind, alone and ready to run, and their times over a range of lengths; and the whole model,
sharded over the ranks. Needs torch.

One block of a kind stands for all, since they are alike. For each kind a model with as few blocks as possible is built,
so that a model whose blocks would fill many devices fits on one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from knapformer.adapters.drawn import Draw
from knapformer.adapters.named import ModelConfig, PackedModel, build_model, materialize
from knapformer.checkpointing import set_checkpointing
from knapformer.models.packed_step import PackedStep
from knapformer.models.training import init_weights, shard_model, train_adapters
from knapformer.tools.measure.timing import Work, measured_rounds, relative_spread

# Several short sequences are packed and measured together, as they run in training.
_TOKENS_PER_RUN = {"cpu": 1024, "cuda": 8192}


def packed_lengths(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """For each length, the lengths of the sequences that are packed into a run."""
    return [[n] * max(1, _TOKENS_PER_RUN[device.type] // n) for n in lengths]


@dataclass(frozen=True)
class BlockKind:
    name: str
    count: int  # how many of them the model has
    model: PackedModel  # whose first block is one of them

    @property
    def block(self) -> nn.Module:
        return next(block for blocks in self.model.block_lists() for block in blocks)

    def work(self, step: PackedStep, text_lens: Sequence[int], checkpointing: bool) -> Work:
        """A forward (and recompute) and backward pass of the block over the chunks of `step`, ready to run.

        text_lens: as in PackedModel.block_inputs.
        """
        weight = next(self.model.parameters())
        draw = Draw(torch.Generator(weight.device).manual_seed(0), weight.device, weight.dtype)

        def leaf(value: Any) -> Any:
            is_numbers = isinstance(value, Tensor) and value.is_floating_point()
            return value.detach().requires_grad_() if is_numbers else value

        inputs = map(leaf, self.model.block_inputs(step, text_lens, draw))
        return passes(self.block, tuple(inputs), checkpointing)


def passes(block: Callable[..., Any], inputs: tuple[Any, ...], checkpointing: bool) -> Work:
    """A forward (and recompute) and backward pass, ready to run. block: a module, or a function; it returns a tensor,
    or a tuple of them."""
    if isinstance(block, nn.Module):
        block.zero_grad(set_to_none=True)

    def run() -> None:
        if checkpointing:
            outputs = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = block(*inputs)
        tensors = [of for of in (outputs if isinstance(outputs, tuple) else (outputs,)) if of.requires_grad]
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])

    return run


def kinds_of(config: ModelConfig, device: torch.device, dtype: torch.dtype, mode: str = "training") -> list[BlockKind]:
    """mode: "training", or "lora", adapters on a frozen base."""
    kinds = []
    for name, count in config.block_counts.items():
        kind = BlockKind(name, count, build_model(config.alone(name), dtype, device))
        if mode == "lora":
            train_adapters(kind.model, [kind.block])
        init_weights(kind.model)
        kinds.append(kind)
    return kinds


def sharded_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, checkpointing: bool, mode: str = "training", *,
    keep_exchanges: bool = False, seed: int = 0,
) -> PackedModel:  # fmt: skip
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


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of forward, recompute and backward over one sequence, [kind][length][round]."""

    kinds: list[tuple[str, int]]  # name, and how many blocks of it the model has
    lengths: list[int]
    seconds: list[list[list[float]]]

    def per_block(self) -> list[float]:
        """For each length the mean over the model's blocks, of medians over the rounds."""
        num_blocks = sum(count for _, count in self.kinds)
        return [
            sum(count * statistics.median(times) for (_, count), times in zip(self.kinds, column, strict=True))
            / num_blocks
            for column in zip(*self.seconds, strict=True)
        ]

    def spreads(self) -> list[float]:
        """For each length the relative spread of its rounds: the largest over the kinds."""
        return [max(relative_spread(times) for times in column) for column in zip(*self.seconds, strict=True)]


def time_blocks(
    kinds: Sequence[BlockKind], work: Callable[[BlockKind, list[int]], Work], lengths: Sequence[int],
    device: torch.device, num_rounds: int, num_warmup_rounds: int = 1, on_done: Callable[[], None] = lambda: None,
) -> BlockTimes:  # fmt: skip
    """work: prepares the passes of a kind's block over packed sequences.

    on_done is called after each of kinds x lengths x rounds measurements.
    """
    packed = packed_lengths(lengths, device)
    counts = [len(seq_lens) for seq_lens in packed]
    prepare = [partial(work, kind, seq_lens) for kind in kinds for seq_lens in packed]
    rounds = measured_rounds(prepare, device, num_rounds, num_warmup_rounds, on_done)
    per_sequence = [[s / counts[i % len(counts)] for s in times] for i, times in enumerate(rounds)]
    return BlockTimes(
        [(kind.name, kind.count) for kind in kinds],
        list(lengths),
        [per_sequence[i : i + len(counts)] for i in range(0, len(per_sequence), len(counts))],
    )
