"""Stubs of the C++ module: what moves tensors. Docstrings are in the module; `knapformer.balancer` is its face."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import SupportsFloat, SupportsIndex, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from knapformer._core import ClusterModel, Plan

def release_groups() -> None: ...
def timeout_of(group: ProcessGroup) -> timedelta: ...

class PlanningAhead:
    @property
    def ready(self) -> bool: ...
    @property
    def num_ended(self) -> int: ...

class SequenceBalancer:
    def __init__(
        self,
        topology: str,
        *,
        gamma: SupportsFloat,
        mask_factor: float,
        solver: str,
        effort: int | str,
        mask: str,
        cluster: ClusterModel | None,
        rank_speed: Sequence[float],
        max_tokens_per_rank: int,
        engine: str | None,
        group: ProcessGroup | None,
        make_bag_group: Callable[[list[int]], ProcessGroup],
    ) -> None: ...
    def plan_routing(
        self, seq_lens: Sequence[SupportsIndex] | Tensor, d_model: SupportsIndex, masks: Sequence[str] | None = None
    ) -> Plan: ...
    def start_planning(
        self,
        seq_lens: Sequence[SupportsIndex] | Tensor,
        d_model: SupportsIndex,
        *,
        ended: bool = False,
        failure: str | None = None,
        masks: Sequence[str] | None = None,
    ) -> PlanningAhead: ...
    def finish_planning(self, ahead: PlanningAhead) -> Plan: ...
    @overload
    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None, sequence_features: None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]: ...
    @overload
    def route(
        self, x: Tensor, features: Sequence[Tensor] | None, sequence_features: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]: ...
    @overload
    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None, *, sequence_features: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]: ...
    def reverse_route(self, x: Tensor) -> tuple[Tensor, Tensor]: ...
    def pre_attn(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
    def post_attn(self, o: Tensor) -> tuple[Tensor, Tensor]: ...
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor: ...
    def attention_exchanges(
        self, device: torch.device
    ) -> list[tuple[int, int, Tensor, list[Tensor], list[Tensor], Tensor]]: ...
    @property
    def bag_channel(self) -> str: ...
    def observe(self, seconds: float) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def report(self, message: str) -> None: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
