"""Activation checkpointing, also with the results of exchanges kept: no all-to-all is repeated. Needs torch.

    from torch.utils.checkpoint import checkpoint
    checkpoint(block, x, use_reentrant=False, context_fn=keep_exchanges)

For each attention it keeps this rank's share of queries, keys and values as attention sees them, and the output. For
each token of a shared sequence that is four times the width where all heads have keys of their own. The output of whole
sequences beside shared ones is kept too, as it is rows of the same tensor. The rest is computed again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import knapformer._torch  # registers the ops

#: The ops that move tensors between ranks, for selective checkpointing policies of your own.
EXCHANGES = (
    torch.ops.knapformer.exchange.default,
    torch.ops.knapformer.exchange_start.default,
    torch.ops.knapformer.exchange_finish.default,
)


def keep_exchanges() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `checkpoint(..., context_fn=keep_exchanges)`. Every rank uses it, or none: it changes the order of
    collectives.

    To keep more than exchanges, write a policy of your own that also saves the ops in EXCHANGES.
    """
    return create_selective_checkpoint_contexts(list(EXCHANGES))  # type: ignore[no-any-return]


def set_checkpointing(model: nn.Module, enabled: bool = True, *, keep_exchanges: bool = False) -> None:
    """Every block is computed again in the backward pass instead of keeping its activations.

    model: a balanced one of diffusers or of knapformer.models.
    keep_exchanges: keeps the results of the balancer's exchanges, so that no exchange is repeated.
    """
    # By its full name, as the argument hides the function.
    contexts: Any = knapformer.checkpointing.keep_exchanges if keep_exchanges else noop_context_fn
    run: Any = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.__dict__.update(gradient_checkpointing=enabled, _gradient_checkpointing_func=run)
