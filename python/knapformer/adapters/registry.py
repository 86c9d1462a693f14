"""Which adapter takes which class of models. An adapter is imported when it is first needed."""

from __future__ import annotations

import importlib
from typing import Any

from knapformer import ArgumentError
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.checks import LIBRARY, name_of, package_of

# The name of a class of diffusers, or a class's name with its module -> where its adapter is.
_ADAPTERS: dict[str, str | type[Adapter]] = {
    "ChromaTransformer2DModel": "knapformer.adapters.flux:Chroma",
    "ChronoEditTransformer3DModel": "knapformer.adapters.wan:ChronoEdit",
    "Flux2Transformer2DModel": "knapformer.adapters.flux:Flux2",
    "Flux3Transformer2DModel": "knapformer.adapters.flux3:Flux3",
    "FluxTransformer2DModel": "knapformer.adapters.flux:Flux",
    "HunyuanVideo15Transformer3DModel": "knapformer.adapters.hunyuan_video:HunyuanVideo15",
    "HunyuanVideoTransformer3DModel": "knapformer.adapters.hunyuan_video:HunyuanVideo",
    "Krea2Transformer2DModel": "knapformer.adapters.krea2:Krea2",
    "LTX2VideoTransformer3DModel": "knapformer.adapters.ltx2:LTX2",
    "LongCatImageTransformer2DModel": "knapformer.adapters.flux:LongCatImage",
    "MiniMaxH3Transformer3DModel": "knapformer.adapters.minimax_h3:MiniMaxH3",
    "QwenImage21Transformer2DModel": "knapformer.adapters.qwen_image21:QwenImage21",
    "QwenImageTransformer2DModel": "knapformer.adapters.qwen_image:QwenImage",
    "SD3Transformer2DModel": "knapformer.adapters.sd3:StableDiffusion3",
    "ZImageTransformer2DModel": "knapformer.adapters.z_image:ZImage",
    "knapformer.models.transformer.Transformer": "knapformer.adapters.plain:Plain",
    "SkyReelsV2Transformer3DModel": "knapformer.adapters.wan:SkyReelsV2",
    "WanTransformer3DModel": "knapformer.adapters.wan:Wan",
    "WanVACETransformer3DModel": "knapformer.adapters.wan:WanVACE",
}


_WITHOUT_ADAPTER = """; for others write an adapter (docs/integration.md), or balance by the sampler, which needs none:
    lengths = [...]  # tokens of each sample of the dataset
    sampler = knapformer.BalancedBatchSampler(lengths, batch_size=..., d_model=...)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)"""


def register(model_class: type, adapter: type[Adapter]) -> None:
    """From now on `balance` takes models of this class, and of those that derive from it and keep its forward."""
    _ADAPTERS[_full_name(model_class)] = adapter


def _full_name(model_class: type) -> str:
    return f"{model_class.__module__}.{model_class.__name__}"


def names() -> list[str]:
    """The names of the classes that `balance` takes."""
    return sorted(_ADAPTERS)


def adapter_named(class_name: str) -> type[Adapter]:
    """Raises ArgumentError."""
    found = _ADAPTERS.get(class_name)
    if found is None:
        raise ArgumentError(f"got a model of class {class_name}, expected one of {', '.join(names())}")
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _ADAPTERS[class_name] = getattr(importlib.import_module(module), attribute)
    return found


def adapter_of(model_class: Any) -> type[Adapter] | None:
    """Found by the name of the class or of a base of it: FSDP replaces a module's class by one derived from it.

    Raises ArgumentError where the class computes something else than that base."""
    for base in model_class.__mro__:
        for key in (_full_name(base), base.__name__ if package_of(base) == LIBRARY else ""):
            if key in _ADAPTERS:
                if model_class.forward is not base.forward:
                    raise ArgumentError(
                        f"transformer: got {model_class.__name__}, with a forward of its own in place of "
                        f"{base.__name__}'s, expected an adapter for it (knapformer.adapters.register)"
                    )
                return adapter_named(key)
    return None


def find_model(transformer: Any) -> tuple[Any, type[Adapter]]:
    """The model itself, which PEFT, DDP or torch.compile may have wrapped, and its adapter."""
    modules = transformer.modules() if hasattr(transformer, "modules") else ()
    found = [(module, adapter) for module in modules if (adapter := adapter_of(type(module))) is not None]
    got = name_of(type(transformer), names())
    if not found:
        raise ArgumentError(f"transformer: got {got}, expected one of {', '.join(names())}{_WITHOUT_ADAPTER}")
    model, adapter = found[0]
    of_model = {id(module) for module in model.modules()}
    num_models = 1 + sum(id(module) not in of_model for module, _ in found)
    if num_models > 1:
        raise ArgumentError(f"transformer: got {got} with {num_models} models, expected one: call it for each")
    return model, adapter
