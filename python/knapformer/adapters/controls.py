"""Residuals of a ControlNet: what it adds to the tokens of an image behind the blocks of the model that it controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.chunks import Home, RunBlock
from knapformer.adapters.samples import Samples, check_shape


def residual_rows(adapter: Adapter, samples: Samples, home: Home) -> list[Tensor]:
    """For each argument that balance() was told of: (tokens, residuals, width), zeros for text and for samples that
    have none. They travel with their tokens, and their gradients back."""
    found = []
    for name in adapter.controls:
        count = adapter.num_controls.get(name, 0)
        for i, given in enumerate(samples.values(name)):
            if given is not None and (not isinstance(given, list | tuple) or len(given) != count):
                got = len(given) if isinstance(given, list | tuple) else type(given).__name__
                expected = f"a list of {count} residuals, as controls= of knapformer.balance says"
                raise ArgumentError(f"samples[{i}][{name!r}]: got {got}, expected {expected}")
        if count:
            found.append(_packed(name, count, samples, home))
    return found


def _packed(name: str, count: int, samples: Samples, home: Home) -> Tensor:
    (streams, image_lens, *_), width = home.rest, home.x.shape[1]
    parts = [home.x.new_zeros(0, count, width)]
    for i, (given, length) in enumerate(zip(samples.values(name), image_lens, strict=True)):
        for k, residual in enumerate(given or ()):
            check_shape(f"samples[{i}][{name!r}][{k}]", residual, (1, length, width))
        parts.append(torch.cat(given).transpose(0, 1) if given else home.x.new_zeros(length, count, width))
    image = torch.cat(parts).to(home.x.dtype)
    rows: Tensor = streams.join(image.new_zeros(len(streams.text_rows), count, width), image)
    # On all ranks alike, also where no sample has any: a ControlNet may train.
    return rows.requires_grad_() if torch.is_grad_enabled() and rows.is_leaf else rows


def controlled(adapter: Adapter, model: Any, rows: Sequence[Tensor], run: RunBlock) -> RunBlock:
    """run, with the residuals of this rank's chunks added behind the blocks. rows: as of residual_rows."""
    residuals: dict[Any, Tensor] = {}
    names = [name for name in adapter.controls if name in adapter.num_controls]
    for name, of_argument in zip(names, rows, strict=True):
        each, blocks = of_argument.unbind(1), model.get_submodule(adapter.controls[name])
        for i, block in enumerate(blocks):
            residuals[block] = each[adapter.control_of(i, len(blocks), len(each))]

    def run_controlled(block: Any, *args: Any) -> Any:
        out = run(block, *args)
        if block not in residuals or getattr(block, "context_pre_only", False):  # SD3's last block has none
            return out
        if isinstance(out, Tensor):
            return out + residuals[block]
        text, image = out
        return text, image + args[-1].streams.split(residuals[block])[1]

    return run_controlled
