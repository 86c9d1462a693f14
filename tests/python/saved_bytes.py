"""What autograd keeps of a call until the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], Any], weights: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """What the call returns, and the bytes of the storages that are kept of it; those of weights count as none."""
    held = {weight.untyped_storage().data_ptr(): 0 for weight in weights}

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = call()  # holds the graph, so that no memory is taken twice
    return outputs, sum(held.values())
