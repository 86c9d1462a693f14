"""A block of the user's own, to be measured. Needs torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from knapformer import ArgumentError

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
