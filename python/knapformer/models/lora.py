"""PEFT's low-rank adapters on a frozen base, as LoRA trains them: for measuring what such a step costs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from knapformer import ArgumentError

RANK = 16


def train_adapters(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Freezes the model, and gives every linear layer of its blocks an adapter of rank 16. In place.

    Works on the device "meta", too. Raises ArgumentError where PEFT is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ArgumentError("mode: got 'lora', which takes PEFT: pip install peft") from None
    model.requires_grad_(False)
    for block in blocks:
        linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        weight = next(block.parameters())
        inject_adapter_in_model(LoraConfig(r=RANK, target_modules=linear), block, low_cpu_mem_usage=weight.is_meta)
        block.to(weight.dtype)  # on "meta" PEFT leaves adapters in float32
