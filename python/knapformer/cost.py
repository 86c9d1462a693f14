"""Cost: the settings by which everything here predicts what a step takes. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypedDict

from knapformer._core import DEFAULT_GAMMA, ArgumentError, Cluster, TrainedModel


class CostSettings(TypedDict, total=False):
    """The fields of a `Cost`, as keyword arguments."""

    d_model: int | None
    gamma: SupportsFloat
    mask: str
    rank_speed: Sequence[float]
    cluster: Cluster | str | None
    model: TrainedModel | None
    num_heads: int
    sync: str
    effort: int | str | None


@dataclass(frozen=True)
class Cost:
    """What a step costs, for `plan`, `rank_topologies`, BalancedBatchSampler and SequenceBalancer (and so for loaders).

        cost = knapformer.Cost(d_model=3072, gamma=knapformer.Calibration.load("calibration.json"), cluster="h100")
        sampler = knapformer.BalancedBatchSampler(lengths, cost, batch_size=4)
        plan = knapformer.plan(seq_lens_per_rank, "g1n8", cost, num_heads=24)

    Each takes such an object, or its fields as keyword arguments, or both: then the keyword arguments replace fields.

    d_model: width of the blocks, in features. None: unknown, for a balancer that is told by plan_routing.
    gamma: cost of a FLOP of attention over that of a FLOP of the matrix products: a number, or a `Calibration`.
    mask: the attention mask of all sequences (see `attention_pairs`).
    rank_speed: per rank, relative. Empty: all are equal.
    cluster: a `Cluster`, or the name of one. None: the default.
    model: None: the default `TrainedModel`.
    num_heads: in place of the model's; 0: the model's. Where the number of a group's ranks does not divide it, some
        ranks have more attention to compute.
    sync: with several micro-batches, where ranks wait for each other: in every 'micro_batch' (FSDP2, ZeRO-3) or once,
        at the end of the 'step' (DDP, ZeRO-1 and 2 with no_sync).
    effort: of the solver 'balanced': 'low', 'default', 'high', or a number of moves. The plan depends on it and not on
        the machine. None: 'default', and 'low' for a sampler, which plans while a step waits.
    """

    d_model: int | None = None
    gamma: SupportsFloat = DEFAULT_GAMMA
    mask: str = "full"
    rank_speed: Sequence[float] = ()
    cluster: Cluster | str | None = None
    model: TrainedModel | None = None
    num_heads: int = 0
    sync: str = "micro_batch"
    effort: int | str | None = None

    @staticmethod
    def of(cost: Cost | None, settings: CostSettings) -> Cost:
        """`cost`, or the default, with these fields replaced. Raises ArgumentError, and TypeError for other names."""
        if not isinstance(cost, Cost | None):
            raise ArgumentError(f"cost: got {cost!r}, expected a knapformer.Cost, or its fields as keyword arguments")
        fields = [field.name for field in dataclasses.fields(Cost)]
        for name in settings:
            if name not in fields:
                raise TypeError(f"unexpected keyword argument {name!r}, expected a field of Cost: {', '.join(fields)}")
        return dataclasses.replace(cost or Cost(), **settings)
