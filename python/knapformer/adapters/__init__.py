"""Models of diffusers, balanced as they are: `knapformer.balance(transformer, balancer)`.

An adapter is what a packed call needs to know of a class of models; docs/integration.md shows how to write one.
"""

from __future__ import annotations

from knapformer.adapters.adapter import Adapter
from knapformer.adapters.balance import balance, unbalance
from knapformer.adapters.chunks import Chunks, Home
from knapformer.adapters.parity import check
from knapformer.adapters.predictions import Predictions
from knapformer.adapters.registry import names, register
from knapformer.adapters.samples import Samples

__all__ = ["Adapter", "Chunks", "Home", "Predictions", "Samples", "balance", "check", "names", "register", "unbalance"]
