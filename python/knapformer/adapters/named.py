"""Models by name: sizes of diffusers' models and of the plain transformer, for commands, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knapformer import ArgumentError, Sample
from knapformer.adapters import registry
from knapformer.adapters.config import PLAIN, ModelConfig
from knapformer.adapters.model import Draw, PackedModel
from knapformer.json_file import read_json


def config_names() -> list[str]:
    """The names of all configurations. Needs no diffusers."""
    return [name for of in registry.names() for name in registry.adapter_named(of).named_configs]


def load_config(name_or_path: str) -> ModelConfig:
    """A named configuration, or one from a JSON file (a name that ends in .json or holds a slash).

    Raises ArgumentError for an unknown name, wrong content, or where diffusers is missing; OSError where the file
    cannot be read.
    """
    for class_name in registry.names():
        fields = registry.adapter_named(class_name).named_configs.get(name_or_path)
        if fields is not None:
            return _named(f"model: {name_or_path}", class_name, fields)
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        names = ", ".join(config_names())
        raise ArgumentError(f"model: got {name_or_path!r}, expected one of {names}, or a path to a .json file")
    return config_from_dict(read_json(name_or_path, "model"))


def config_from_dict(given: object) -> ModelConfig:
    """given: diffusers' config.json, or {"kind": "transformer", ...}, with the fields that differ from the defaults.

    Raises ArgumentError, naming the field.
    """
    if not isinstance(given, dict):
        raise ArgumentError(f"model: got {type(given).__name__}, expected a JSON object")
    fields = {name: of for name, of in given.items() if not name.startswith("_")}
    if isinstance(class_name := given.get("_class_name"), str):
        return _named("model", class_name, fields)
    if (kind := fields.pop("kind", None)) != "transformer":
        expected = "'transformer', or a config.json of diffusers, with its '_class_name'"
        raise ArgumentError(f"model: kind: got {kind!r}, expected {expected}")
    return _named("model", PLAIN, fields)


def _named(where: str, class_name: str, fields: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(class_name, **fields)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None


def build_model(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PackedModel:
    """The model, with weights as torch draws them; on the device "meta" without weights: see `materialize`.

    Parameters have the dtype. Buffers keep theirs: they are tables of positions, whose precision models rely on.
    """
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to(device, dtype), parameter.requires_grad)
        register(module, name, parameter)

    # Parameters move as modules are made: no rank ever holds a large model whole, in float32, on its host.
    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        model = config.build()
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return model if torch.device(device).type == "meta" else model.to(device)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Tensors on "meta", sharded or not, get memory of any content on `device`; buffers move there as they are."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def random_batch(
    config: ModelConfig, samples: Sequence[Sample], seed: int | Sequence[int], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """A batch of samples of these sizes, and its target. The same arguments give the same numbers; with a seed for each
    sample, a sample has the same numbers in every batch."""

    def draw(seed: int) -> Draw:
        return Draw(torch.Generator().manual_seed(seed), device, dtype)

    draws = [draw(seed)] * len(samples) if isinstance(seed, int) else list(map(draw, seed))
    pairs = list(zip(samples, draws, strict=True))
    drawn = [config.random_sample(size, of) for size, of in pairs]
    targets = [of.normal(config.num_rows(size), config.out_width) for size, of in pairs]
    return drawn, torch.cat([torch.empty(0, config.out_width, device=device, dtype=dtype), *targets])
