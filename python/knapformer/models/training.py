"""How models are trained: FSDP2 per block, adapters, precision, weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from knapformer import ArgumentError

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def train_adapters(model: nn.Module, blocks: Iterable[nn.Module], rank: int = 16) -> None:
    """Freezes the model, and gives every linear layer of its blocks a low-rank adapter of PEFT, as LoRA trains them. In
    place.

    Works on the device "meta", too. Raises ArgumentError where PEFT is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ArgumentError("mode: got 'lora', which takes PEFT: pip install peft") from None
    model.requires_grad_(False)
    for block in blocks:
        linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        weight = next(block.parameters())
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=linear), block, low_cpu_mem_usage=weight.is_meta)
        block.to(weight.dtype)  # on "meta" PEFT leaves adapters in float32


def shard_model(model: Any, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Any:
    """FSDP2 over the ranks of `mesh` (one dimension): each block a unit, the rest in the root. model: what
    knapformer.adapters.named builds.

    dtype: the dtype of the computation, e.g. bfloat16; parameters keep their own dtype, and gradients are reduced in
    that of the parameters. None: the computation, too, is in the parameters' dtype. In place; returns the model.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=next(model.parameters()).dtype)
    for blocks in model.block_lists():
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@torch.no_grad()
def init_weights(model: nn.Module, seed: int = 0) -> None:
    """Random values for every parameter, none of them zero: norm weights around 1, matrices scaled by their width.

    A model that is not sharded gets the same values on every rank. A sharded one is drawn shard by shard, without ever
    being whole on one rank; its values then depend on the number of ranks.
    """
    for index, parameter in enumerate(model.parameters()):
        local = _local(parameter)
        rank = parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
        generator = torch.Generator(local.device).manual_seed((seed * 1_000_003 + index) * 65_537 + rank)
        scale = math.prod(parameter.shape[1:]) ** -0.5 if parameter.dim() > 1 else 0.02
        local.normal_(generator=generator).mul_(scale)
    for module in model.modules():
        if "Norm" in type(module).__name__ and isinstance(weight := getattr(module, "weight", None), Tensor):
            _local(weight).add_(1.0)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
