"""The models by name, and everything that is made of a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError, Sample
from knapformer.json_file import read_json
from knapformer.models.config import BaseConfig
from knapformer.models.flux import FluxTransformer
from knapformer.models.model import Draw, PackedModel
from knapformer.models.transformer import Transformer
from knapformer.models.wan import WanTransformer

MODELS: tuple[type[PackedModel], ...] = (FluxTransformer, Transformer, WanTransformer)

_MODEL_OF_KIND: dict[str, type[PackedModel]] = {model.config_class.kind: model for model in MODELS}
NAMED_CONFIGS: dict[str, Any] = {name: config for model in MODELS for name, config in model.named_configs.items()}


def build_model(
    config: BaseConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PackedModel:
    """With weights as torch draws them; on the device "meta" without any (see init_weights)."""
    with torch.device(device):
        model = _MODEL_OF_KIND[config.kind](config)
    return model.to(dtype)


def random_batch(
    config: BaseConfig, samples: Sequence[Sample], seed: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """A batch of samples of these sizes, and its target. The same arguments give the same numbers."""
    draw = Draw(torch.Generator().manual_seed(seed), device, dtype)
    return _MODEL_OF_KIND[config.kind].random_batch(config, samples, draw)


def config_from_dict(fields: object) -> Any:
    """{"kind": "flux", ...fields to change from the defaults} -> the kind's configuration.

    Raises ArgumentError, naming the field.
    """
    if not isinstance(fields, dict):
        raise ArgumentError(f"model: got {type(fields).__name__}, expected a JSON object")
    rest = dict(fields)
    kind = rest.pop("kind", None)
    if kind not in list(_MODEL_OF_KIND):  # a list: what came may be no key
        raise ArgumentError(f"model: kind: got {kind!r}, expected one of {', '.join(_MODEL_OF_KIND)}")
    config = _MODEL_OF_KIND[kind].config_class
    known = {field.name for field in dataclasses.fields(config)}
    for name in rest:
        if name not in known:
            raise ArgumentError(f"model: got unknown field {name!r}, expected some of {', '.join(sorted(known))}")
    try:
        return config(**rest)
    except ArgumentError as error:
        raise ArgumentError(f"model: {error}") from None


def config_to_dict(config: BaseConfig) -> dict[str, Any]:
    """The inverse of config_from_dict."""
    return {"kind": config.kind, **dataclasses.asdict(config)}  # type: ignore[call-overload]


def load_config(name_or_path: str) -> Any:
    """A named configuration, or one from a JSON file (a name that ends in .json or holds a slash).

    Raises ArgumentError for an unknown name or wrong content, OSError where the file cannot be read.
    """
    if name_or_path in NAMED_CONFIGS:
        return NAMED_CONFIGS[name_or_path]
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        names = ", ".join(NAMED_CONFIGS)
        raise ArgumentError(f"model: got {name_or_path!r}, expected one of {names}, or a path to a .json file")
    return config_from_dict(read_json(name_or_path, "model"))
