"""Copies from the host to a device, which the host does not wait for. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copies a CPU tensor to `device` (None: the CPU). The host does not wait: an accelerator reads pinned memory, and
    torch keeps this memory until then. A "non-blocking" copy from any other memory blocks."""
    if device is None or device.type in ("cpu", "meta"):
        return tensor if device is None else tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
