"""`balance`: a diffusers transformer that takes samples of any sizes, packed, and balances them over ranks.

In place: `forward` of the model, its blocks and its last norm is replaced on these objects, and nowhere else. A call
with a list of samples is packed, any other call is diffusers' own. Modules, names, parameters and hooks stay what they
were, and a packed call goes through the modules' `__call__`: FSDP, PEFT and compiled blocks, which rely on it, work as
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from knapformer import ArgumentError, StateError
from knapformer.adapters.adapter import MAX_TEXT_TOKENS
from knapformer.adapters.checks import STATE, check_model
from knapformer.adapters.packed_call import Balanced, packed_call
from knapformer.adapters.packed_modules import module_forward, packed_modules
from knapformer.adapters.registry import find_model
from knapformer.balancer import SequenceBalancer

Model = TypeVar("Model", bound=nn.Module)


def balance(
    transformer: Model,
    balancer: SequenceBalancer | None = None,
    *,
    max_text_tokens: int = MAX_TEXT_TOKENS,
    controls: Mapping[str, int] | None = None,
) -> Model:
    """Lets a transformer of diffusers or knapformer.models take a list of samples of any sizes, unpadded.

        knapformer.balance(transformer, balancer)
        predictions = transformer(samples)

    samples: a list of dicts, each the keyword arguments of diffusers' forward, with a batch of one. Returns the
    predictions in their order, each a tensor as diffusers' forward gives it, with a batch of one; `predictions.zero` is
    for the loss on ranks that may have no samples. Captions come without padding, or with the padding that the model
    should attend to. Calls in diffusers' own form go on working.

    transformer: the model, which may be wrapped already (PEFT, DDP, FSDP), or be wrapped later. Changed in place, and
        returned. Its class, parameters, names, state_dict and methods stay.
    balancer: forward and backward are then collective over its ranks, whose samples are moved between them; a rank
        without samples calls with an empty list. In a loop over a BalancedLoader, whose samples are still on the ranks
        that drew them: `transformer(samples, planned=True)`.
        Where all ranks that share a sample have loaded it (BalancedBatchSampler with bags):
        `balancer.follow(sampler.plan(...))`, then `transformer(samples, placed=True)`. Only attention exchanges tokens;
        Predictions.own says which numbers this rank has computed. In a process with such a sampler, a call for other
        samples (of a validation set, say) says placed=False.
        None: the samples of this rank alone, each whole, as those of a BalancedBatchSampler without a topology, or of a
        BalancedStepLoader in bags of one rank (g1n8).
    max_text_tokens: for models that cross-attend to their text: the tokens that a travelling text has room for. The
        same on all ranks.
    controls: where samples may have residuals of a ControlNet, how many: {"controlnet_block_samples": 5}, say. Samples
        without them stay as they are. The same on all ranks.

    Raises ArgumentError where there is no adapter for the model (`knapformer.adapters`), or samples do not fit;
    StateError where the model is set to compute what a packed call cannot, such as another attention processor, or
    where its `forward` was replaced, by accelerate's `prepare` or a hook, which a packed call would bypass.
    """
    if not isinstance(balancer, SequenceBalancer | None):
        raise ArgumentError(f"balancer: got {type(balancer).__name__}, expected a SequenceBalancer, or None")
    if not isinstance(max_text_tokens, int) or max_text_tokens < 0:
        raise ArgumentError(f"max_text_tokens: got {max_text_tokens!r}, expected an integer, at least 0")
    model, adapter_class = find_model(transformer)
    controls, known = dict(controls or {}), ", ".join(adapter_class.controls) or "no argument"
    if any(name not in adapter_class.controls or not isinstance(of, int) or of < 1 for name, of in controls.items()):
        raise ArgumentError(f"controls: got {controls!r}, expected how many residuals are in {known}, at least 1")
    unbalance(model)
    adapter = adapter_class(max_text_tokens, controls)
    check_model(adapter, model)
    packed = list(packed_modules(adapter, model))
    for name, module in (("transformer", model), *((name, module) for name, module, _ in packed)):
        if "forward" in module.__dict__:
            raise StateError(
                f"{name}.forward: got one that was put on the object, expected its class's: call accelerate's prepare, "
                "and add hooks, after balance()"
            )
    for _, module, packed_forward in packed:
        setattr(module, STATE, packed_forward)
        module.forward = MethodType(module_forward, module)
    setattr(model, STATE, Balanced(adapter, balancer))
    model.forward = MethodType(_model_forward, model)
    return transformer


def unbalance(transformer: Model) -> Model:
    """Undoes `balance`, in place, wherever its modules are by now. A model that is not balanced stays as it is."""
    model, _ = find_model(transformer)
    modules = [module for module in model.modules() if STATE in module.__dict__]
    for module in modules:
        if getattr(module.__dict__.get("forward"), "__func__", None) not in (_model_forward, module_forward):
            raise StateError("transformer: its forward was replaced after balance(); undo that first")
    for module in modules:
        del module.__dict__["forward"], module.__dict__[STATE]
    return transformer


def balanced(transformer: nn.Module) -> Balanced:
    """The adapter and the balancer of a balanced model; another balancer may be assigned."""
    return transformer.__dict__[STATE]


def _model_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and not isinstance(args[0], torch.Tensor):
        return packed_call(model, *args, **kwargs)
    return type(model).forward(model, *args, **kwargs)
