"""`balance`: a diffusers transformer that takes samples of any sizes, packed, and balances them over ranks.

In place: `forward` of the model, its blocks and its last norm is replaced on these objects, and nowhere else. A call
with a list of samples is packed, any other call is diffusers' own. Modules, names, parameters and hooks stay what they
were, and a packed call goes through the modules' `__call__`: FSDP, PEFT and compiled blocks, which rely on it, work as
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from knapformer import ArgumentError, StateError
from knapformer.adapters.adapter import MAX_TEXT_TOKENS, Adapter
from knapformer.adapters.checks import STATE, check_blocks, check_model, packed_modules
from knapformer.adapters.controls import controlled, residual_rows
from knapformer.adapters.packed import Moved, Packed
from knapformer.adapters.registry import find_model
from knapformer.adapters.samples import Predictions, Sample
from knapformer.balancer import SequenceBalancer
from knapformer.models.packed_step import PackedStep
from knapformer.sample_sources import source_of_shared_samples

Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class _Balanced:
    """What a packed call needs of a model, which holds it. A deep copy of the model shares it."""

    adapter: Adapter
    balancer: SequenceBalancer | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Balanced:
        return self


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
        module.forward = MethodType(_module_forward, module)
    setattr(model, STATE, _Balanced(adapter, balancer))
    model.forward = MethodType(_model_forward, model)
    return transformer


def unbalance(transformer: Model) -> Model:
    """Undoes `balance`, in place, wherever its modules are by now. A model that is not balanced stays as it is."""
    model, _ = find_model(transformer)
    modules = [module for module in model.modules() if STATE in module.__dict__]
    for module in modules:
        if getattr(module.__dict__.get("forward"), "__func__", None) not in (_model_forward, _module_forward):
            raise StateError("transformer: its forward was replaced after balance(); undo that first")
    for module in modules:
        del module.__dict__["forward"], module.__dict__[STATE]
    return transformer


def balanced(transformer: nn.Module) -> _Balanced:
    """The adapter and the balancer of a balanced model; another balancer may be assigned."""
    return transformer.__dict__[STATE]


def _module_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], Packed):
        return module.__dict__[STATE](module, *args)
    return type(module).forward(module, *args, **kwargs)


def _model_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and not isinstance(args[0], torch.Tensor):
        return _packed_call(model, *args, **kwargs)
    return type(model).forward(model, *args, **kwargs)


def _packed_call(
    model: Any, samples: Sequence[Sample], *, planned: bool = False, placed: bool | None = None
) -> Predictions:
    state: _Balanced = model.__dict__[STATE]
    adapter, balancer = state.adapter, state.balancer
    try:
        if placed is None and not planned and (source := source_of_shared_samples()):
            raise StateError(f"placed: got none, in a process with {source}, or placed=False for other samples")
        check_model(adapter, model)
        check_blocks(adapter, model)
        of_samples = adapter.read(model, samples)
        home = adapter.embed(model, of_samples)
        residuals = residual_rows(adapter, of_samples, home)
    except Exception as error:
        if balancer is not None:  # other ranks wait for this one's lengths
            balancer.report(str(error))
        raise

    def run_alone(block: nn.Module, *args: Any) -> Any:
        if torch.is_grad_enabled() and getattr(model, "gradient_checkpointing", False):
            return model._gradient_checkpointing_func(block, *args)
        return block(*args)

    step = PackedStep(home.seq_lens, home.x.shape[1], balancer, adapter.mask(model), planned, bool(placed))
    x, features, of_chunk = step.enter(home.x, [*residuals, *home.features], home.sequence_features)
    moved = Moved(step, x, features[len(residuals) :], of_chunk)
    run = controlled(adapter, model, features[: len(residuals)], run_alone)
    parts = adapter.head(model, step.leave(adapter.compute(model, moved, run)), home)
    zero = torch.stack([part.out[:0].sum() for part in parts]).sum()
    predictions = [adapter.predictions(model, part.out, part.lens, home) for part in parts]
    if not placed:
        return Predictions(_of_samples(predictions), zero)
    own = [adapter.predictions(model, step.is_own(part.out, part.rows), part.lens, home) for part in parts]
    for of_part, is_own in zip(predictions, own, strict=True):
        of_part[:] = [torch.where(flags, of, torch.nan) for flags, of in zip(is_own, of_part, strict=True)]
    return Predictions(_of_samples(predictions), zero, _of_samples(own))


def _of_samples(parts: list[list[torch.Tensor]]) -> list[Any]:
    """From a list for each part of a prediction: for each sample a tensor, or a tuple of its parts."""
    return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
