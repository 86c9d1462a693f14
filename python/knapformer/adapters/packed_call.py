"""What a balanced model does with a list of samples, and when a call must say `placed=` or `planned=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from knapformer import StateError
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.checks import STATE, check_blocks, check_model
from knapformer.adapters.chunks import Moved
from knapformer.adapters.controls import controlled, residual_rows
from knapformer.adapters.predictions import Predictions, predictions_of
from knapformer.adapters.samples import Sample
from knapformer.balancer import SequenceBalancer
from knapformer.models.packed_step import PackedStep
from knapformer.shared_samples import source_of_shared_samples


@dataclass(eq=False)
class Balanced:
    """What a packed call needs of a model, which holds it. A deep copy of the model shares it."""

    adapter: Adapter
    balancer: SequenceBalancer | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Balanced:
        return self


def packed_call(
    model: Any, samples: Sequence[Sample], *, planned: bool = False, placed: bool | None = None
) -> Predictions:
    state: Balanced = model.__dict__[STATE]
    adapter, balancer = state.adapter, state.balancer
    try:
        if placed is None and not planned and (source := source_of_shared_samples()):
            raise StateError(f"placed: got none, in a process with {source}, or placed=False for other samples")
        check_model(adapter, model)
        check_blocks(adapter, model)
        of_samples = adapter.read(model, samples)
        home = adapter.embed(model, of_samples)
        residuals = residual_rows(adapter, of_samples, home)
    except Exception as error:
        if balancer is not None:  # other ranks wait for this one's lengths
            balancer.report(str(error))
        raise

    def run_alone(block: torch.nn.Module, *args: Any) -> Any:
        if torch.is_grad_enabled() and getattr(model, "gradient_checkpointing", False):
            return model._gradient_checkpointing_func(block, *args)
        return block(*args)

    step = PackedStep(home.seq_lens, home.x.shape[1], balancer, adapter.mask(model), planned, bool(placed))
    x, features, of_chunk = step.enter(home.x, [*residuals, *home.features], home.sequence_features)
    moved = Moved(step, x, features[len(residuals) :], of_chunk)
    run = controlled(adapter, model, features[: len(residuals)], run_alone)
    parts = adapter.head(model, step.leave(adapter.compute(model, moved, run)), home)
    zero = torch.stack([part.out[:0].sum() for part in parts]).sum()
    predictions = [adapter.predictions(model, part.out, part.lens, home) for part in parts]
    own = [adapter.predictions(model, step.is_own(part.out, part.rows), part.lens, home) for part in parts if placed]
    return predictions_of(predictions, zero, own)
