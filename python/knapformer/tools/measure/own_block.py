"""A block of the user's own, to be measured. Needs torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knapformer import ArgumentError
from knapformer.tools.measure.timing import Work

MakeInputs = Callable[[list[int]], tuple[Any, ...]]


def load_own_block(spec: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, MakeInputs]:
    """spec: "module:function", found as Python finds modules, the working directory among them.

    function(device, dtype) returns the block and a function from the lengths of packed sequences, in tokens, to the
    arguments of its forward pass. The block returns a tensor, or a tuple of them. Raises ArgumentError where there is
    no such function, or it returns something else.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise ArgumentError(f"--block: got {spec!r}, expected module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"--block: got {spec!r}: {error}") from None
    made = make(device, dtype)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ArgumentError(f"--block: {spec}: got {type(made).__name__}, expected (block, function of lengths)")
    return made


def passes_of(block: nn.Module, make_inputs: MakeInputs, checkpointing: bool) -> Callable[[list[int]], Work]:
    """What prepares a forward (and recompute) and backward pass over packed sequences of these lengths."""

    def prepare(seq_lens: list[int]) -> Work:
        inputs = make_inputs(seq_lens)
        block.zero_grad(set_to_none=True)

        def run() -> None:
            if checkpointing:
                outputs = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                outputs = block(*inputs)
            tensors = _tensors(outputs)
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])

        return run

    return prepare


def _tensors(outputs: object) -> Sequence[Tensor]:
    found = [outputs] if isinstance(outputs, Tensor) else list(outputs) if isinstance(outputs, (tuple, list)) else []
    found = [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not found:
        raise ArgumentError(f"--block: got an output of {type(outputs).__name__}, expected tensors that need gradients")
    return found
