"""What a model tells of itself, so that whatever builds, shards, feeds or measures models knows none by name.

A new model is a file of its own, with a BaseConfig and a PackedModel, and its line in registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from knapformer import Sample
from knapformer.models.config import BaseConfig

if TYPE_CHECKING:
    from knapformer.models.step import PackedStep

Rows = Callable[[int], Tensor]  # n -> random rows (n, d_model) that want a gradient
BlockInputs = tuple[tuple[Tensor, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Draw:
    """Random tensors of a batch. Drawn on the CPU: a seed gives the same numbers on every device."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self.generator, dtype=torch.float32)
        return drawn.to(self.device, self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """In float32, from 0 to 1."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32).to(self.device)


class PackedModel(nn.Module):
    """Base of the models: made of a configuration, called as model(batch, balancer=None, *, planned=False).

    With a balancer a forward pass is collective: every rank of its group calls it, also one without samples, and every
    parameter takes part in forward and backward on every rank.
    planned: the balancer holds the plan of this batch already, as in a loop over a BalancedLoader.
    """

    config_class: ClassVar[type[Any]]
    named_configs: ClassVar[dict[str, BaseConfig]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def block_lists(self) -> list[nn.ModuleList]:
        """All blocks in the order in which they run; each is a unit of FSDP and of checkpointing."""
        raise NotImplementedError

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], rows: Rows) -> BlockInputs:
        """What a block is called with over the chunks of `step`, of a model with blocks of one kind: the streams that
        it returns anew, and the rest.

        text_lens: of each chunk how many tokens, its first ones, are text; with `text_beside` the tokens of its text.
        """
        raise NotImplementedError

    @staticmethod
    def random_batch(config: Any, samples: Sequence[Sample], draw: Draw) -> tuple[Any, Tensor]:
        """A batch of samples of these sizes, and a target in the shape of what the model returns for it."""
        raise NotImplementedError
