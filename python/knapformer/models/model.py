"""A model that can be simulated, calibrated and replayed, and the random numbers that it is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from knapformer.models.step import PackedStep

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer


@dataclass(frozen=True)
class Draw:
    """Random tensors of a batch, drawn on the generator's device.

    On the CPU a seed gives the same numbers for every device; on an accelerator drawing needs no host and no copy.
    """

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def each(self, count: int, seeds: Sequence[int] | None) -> list[Draw]:
        """For each of so many samples itself, or a draw of the sample's own seed."""
        if seeds is None:
            return [self] * count
        return [replace(self, generator=torch.Generator(self.generator.device).manual_seed(seed)) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.generator.device, dtype=torch.float32)
        return drawn.to(self.device, self.dtype)

    def time(self) -> Tensor:
        """(1,) float32, a power of two up to 1: FLUX embeds 1000 t in its dtype, and bfloat16 would round 1000 t
        of other numbers t by up to 2."""
        drawn = torch.randint(8, (1,), generator=self.generator, device=self.generator.device)
        return torch.exp2(-drawn).to(self.device, torch.float32)


class PackedModel(nn.Module):
    """Made from a configuration (`config`). With a balancer a forward pass is collective: every rank of its group calls
    it, also one without samples, and every parameter takes part in forward and backward on every rank."""

    config: Any

    def forward(self, batch: Any, balancer: SequenceBalancer | None = None, *, planned: bool = False) -> Tensor:
        """A batch of samples -> (rows, channels) of all of them, packed.

        planned: the balancer holds the plan of this batch already, as in a loop over a BalancedLoader.
        """
        raise NotImplementedError

    def block_lists(self) -> list[nn.ModuleList]:
        """All blocks in the order in which they run; each is a unit of FSDP and of checkpointing."""
        raise NotImplementedError

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], draw: Draw) -> tuple[Any, ...]:
        """Random arguments of the first block over the chunks of `step`.

        text_lens: for each chunk, how many of its first tokens are text; with `text_beside`, the tokens of its text.
        """
        raise NotImplementedError
