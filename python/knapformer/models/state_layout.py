"""State dicts of other implementations, mapped to the packed models' parameters and back, bit for bit.

Implementations that hold the same numbers differ in names, in which products are fused and in what order, in whether a
patch embedding is a convolution. One table says all of it: each parameter here is made of rows of tensors there.

    here                      there
    attn.to_qkv.weight        attn.to_q.weight, then attn.to_k.weight, then attn.to_v.weight
    norm_out.linear.weight    rows d to 2d of final_layer.adaLN_modulation.1.weight, then its rows 0 to d

Read from left to right the table loads, from right to left it saves. Both go parameter by parameter, and loading keeps
of each only the shard that this rank holds: from files that are read lazily, a model never has to fit on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from knapformer import ArgumentError


@dataclass(frozen=True)
class Rows:
    """`count` rows of a tensor of the other layout, from row `first` on."""

    name: str
    count: int
    first: int = 0


class StateLayout:
    """What every parameter of a packed model is made of in one other layout. Filled by its add methods.

    repeated: a layout whose tensors a state dict of this one holds as well. Loading ignores those that are its alone,
    saving writes them.
    """

    def __init__(self, repeated: StateLayout | None = None) -> None:
        self.parameters: dict[str, tuple[Rows, ...]] = {}
        # Of tensors there of another shape, as a convolution's kernel is: all sizes but the first.
        self.row_shapes: dict[str, tuple[int, ...]] = {}
        self.repeated = repeated
        self._heights: dict[str, int] = {}  # rows of each tensor there

    def add(self, here: str, *there: Rows) -> None:
        """A parameter."""
        self.parameters[here] = there
        for rows in there:
            self._heights[rows.name] = max(self._heights.get(rows.name, 0), rows.first + rows.count)

    def add_linear(self, here: str, *there: Rows, bias: bool = True) -> None:
        """The weight and, where there is one, the bias of a product: both consist of the same rows."""
        for suffix in ("weight", "bias") if bias else ("weight",):
            self.add(f"{here}.{suffix}", *(replace(rows, name=f"{rows.name}.{suffix}") for rows in there))

    def add_model(
        self,
        model: nn.Module,
        there: Callable[[str, int], Sequence[Rows]],
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        """All parameters of a model, which may be on the device "meta".

        there: a module and the number of rows of its parameters -> what both weight and bias consist of, by module
        there. rename: of tensors there, where weights are called something else.
        """
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            parts = there(module, len(parameter))
            self.add(name, *(replace(rows, name=rename(f"{rows.name}.{kind}" if module else kind)) for rows in parts))

    def names(self) -> set[str]:
        """Of all tensors that a state dict of this layout must hold."""
        return set(self._heights)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ArgumentError where a state dict lacks tensors or holds others, naming them."""
        found, expected = set(state), self.names()
        missing, unexpected = expected - found, found - expected
        if self.repeated is not None:
            unexpected -= self.repeated.names()
        if missing or unexpected:
            problems = [f"{kind} {_some(names)}" for kind, names in (("no", missing), ("unknown", unexpected)) if names]
            raise ArgumentError(
                f"state_dict: got {'; '.join(problems)}, expected the {len(expected)} tensors of its kind"
            )

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Copies a state dict of this layout into the model, plain or sharded (FSDP2).

        Values are converted to the parameters' dtype. Of a sharded model every rank passes the same state and keeps its
        own shards; nothing is communicated. Raises ArgumentError for missing, unknown or wrongly shaped tensors.
        """
        parameters = self._parameters_of(model)
        self.check(state)
        with torch.no_grad():
            for here, parts in self.parameters.items():
                parameter = parameters[here]
                value = self._read(state, parts, parameter)
                if isinstance(parameter, DTensor):
                    value = value.to(parameter.device)
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(value)

    def save(self, model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
        """The model's parameters as a state dict of this layout, on the CPU, in tensors that share no memory.

        Of a sharded model every rank calls it, as each parameter is gathered; where `keep` is false (all ranks but the
        one that writes) the result is empty.
        """
        rows_of: dict[str, list[tuple[int, Tensor]]] = {}
        parameters = self._parameters_of(model)
        for here, parts in self.parameters.items():
            value = parameters[here].detach()
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if not keep:
                continue
            for rows, part in zip(parts, value.cpu().split([rows.count for rows in parts]), strict=True):
                rows_of.setdefault(rows.name, []).append((rows.first, part))
        state = {}
        for name, found in rows_of.items():
            joined = torch.cat([part for _, part in sorted(found, key=lambda item: item[0])])  # cat copies one, too
            state[name] = joined.unflatten(1, self.row_shapes[name]) if name in self.row_shapes else joined
        return state if self.repeated is None else state | self.repeated.save(model, keep)

    def _parameters_of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        # Wrappers that activation checkpointing and torch.compile put around blocks show in the names.
        parameters = dict(model.named_parameters())
        for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
            parameters = {name.replace(wrapper, ""): value for name, value in parameters.items()}
        if parameters.keys() != self.parameters.keys():
            differing = parameters.keys() ^ self.parameters.keys()
            raise ArgumentError(f"model: got a model whose configuration is not the layout's: {_some(differing)}")
        return parameters

    def _read(self, state: Mapping[str, Tensor], parts: tuple[Rows, ...], like: Tensor) -> Tensor:
        found = []
        for rows in parts:
            tensor = state[rows.name]
            if rows.name in self.row_shapes and tensor.shape[1:] == self.row_shapes[rows.name]:
                tensor = tensor.flatten(1)
            expected = (self._heights[rows.name], *like.shape[1:])
            if tensor.shape != expected:
                raise ArgumentError(f"state_dict: {rows.name}: got shape {tuple(tensor.shape)}, expected {expected}")
            found.append(tensor.detach().narrow(0, rows.first, rows.count))
        return torch.cat(found) if len(found) > 1 else found[0]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of all *.safetensors files of a folder, or of one file, each read when it is asked for.

    `config` is the folder's config.json, empty where there is none. Needs the package safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ArgumentError(f"path: got {path}, expected a folder that holds *.safetensors files")
        folder = path if path.is_dir() else path.parent
        config = folder / "config.json"
        self.config: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
