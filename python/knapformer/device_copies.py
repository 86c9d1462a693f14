"""Copies from the host that it does not wait for. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A CPU tensor on `device` (None: the CPU). The host does not wait: an accelerator reads pinned memory, which
    torch keeps until it has been read. From any other memory a "non-blocking" copy blocks."""
    if device is None or device.type in ("cpu", "meta"):
        return tensor if device is None else tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
