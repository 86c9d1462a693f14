"""What a packed call returns, and which of its numbers are NaN, as other ranks have computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


@dataclass(eq=False)
class Predictions(Sequence[Any]):
    """What diffusers' forward would have returned for each sample, in order; each with its batch of one: a tensor, or a
    tuple of tensors where a model predicts video and audio.

    zero: a scalar 0 to add to the loss. It carries the graph. So backward runs, with its collectives, and every
    parameter gets its (zero) gradient, on a rank without samples, or one that drops the losses of its samples:

        loss = sum((weigh(prediction, sample) for prediction, sample in zip(predictions, samples)), predictions.zero)

    own: of a call with placed=True, for each prediction a tensor of flags of its shape (or a tuple of them): which
    numbers this rank has computed. The others are NaN, and carry no gradient; each number is some rank's own. So the
    parts of a loss on all ranks add up to that of whole samples, where each sums over its own numbers:

        torch.where(own, (prediction - target).square(), 0).sum() / prediction.numel()

    It is a dataclass and registered with pytree, so that FSDP and DDP find the tensors inside for their backward hooks.
    accelerate's mixed precision makes outputs float32 that have a dtype and `float()`.
    """

    tensors: list[Any]
    zero: Tensor
    own: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    @property
    def dtype(self) -> torch.dtype:
        return self.zero.dtype

    def float(self) -> Predictions:
        return Predictions(pytree.tree_map(torch.Tensor.float, self.tensors), self.zero.float(), self.own)


pytree.register_pytree_node(
    Predictions,
    lambda predictions: ([*predictions.tensors, predictions.zero], predictions.own),
    lambda parts, own: Predictions(list(parts)[:-1], list(parts)[-1], own),
    serialized_type_name="knapformer.adapters.Predictions",
)


def predictions_of(parts: list[list[Tensor]], zero: Tensor, own: list[list[Tensor]]) -> Predictions:
    """parts: a list for each part of a prediction, such as video and audio. own: like parts, or empty if not placed."""
    for of_part, is_own in zip(parts, own, strict=True) if own else ():
        of_part[:] = [torch.where(flags, of, torch.nan) for flags, of in zip(is_own, of_part, strict=True)]
    return Predictions(_of_samples(parts), zero, _of_samples(own) if own else None)


def _of_samples(parts: list[list[Tensor]]) -> list[Any]:
    """For each sample a tensor, or a tuple of its parts."""
    return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
