"""Balance the load of data-parallel ranks that train a DiT on sequences of very different lengths.

Planning (`plan`, `Plan`, `Topology`, `DataMix`, ...) needs no torch. `SequenceBalancer`, which moves tensors, and the
reference models load torch on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from knapformer._core import (
    ArgumentError,
    Cluster,
    DataMix,
    MicroBatchTime,
    Plan,
    Sample,
    StateError,
    Topology,
    TopologyOption,
    TrainedModel,
    WorkloadModel,
)
from knapformer.calibration import Calibration
from knapformer.cost import Cost
from knapformer.gamma_fit import WorkloadFit, fit_workload
from knapformer.lengths_log import record
from knapformer.planning import attention_pairs, plan, plan_home, predict_micro_batch, rank_topologies, solver_names

if TYPE_CHECKING:
    from knapformer.adapters.balance import balance, unbalance
    from knapformer.balancer import SequenceBalancer
    from knapformer.loader import BalancedLoader, BalancedStepLoader
    from knapformer.sampler import BalancedBatchSampler
    from knapformer.step import Step

__version__ = "1.0.0"  # the only place: pyproject.toml reads it here, and a checkout needs no installation

__all__ = [
    "ArgumentError",
    "BalancedBatchSampler",
    "BalancedLoader",
    "BalancedStepLoader",
    "Calibration",
    "Cluster",
    "Cost",
    "DataMix",
    "MicroBatchTime",
    "Plan",
    "Sample",
    "SequenceBalancer",
    "StateError",
    "Step",
    "Topology",
    "TopologyOption",
    "TrainedModel",
    "WorkloadFit",
    "WorkloadModel",
    "attention_pairs",
    "balance",
    "fit_workload",
    "plan",
    "plan_home",
    "predict_micro_batch",
    "rank_topologies",
    "record",
    "solver_names",
    "unbalance",
]


# The names that need torch, and the modules that define them.
_LAZY = {
    "BalancedBatchSampler": "knapformer.sampler",
    "BalancedLoader": "knapformer.loader",
    "BalancedStepLoader": "knapformer.loader",
    "SequenceBalancer": "knapformer.balancer",
    "Step": "knapformer.step",
    "balance": "knapformer.adapters",
    "unbalance": "knapformer.adapters",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from knapformer.installed_torch import torch_problem

        problem = torch_problem()
        if problem is not None:
            raise ImportError(f"knapformer.{name}: {problem}")
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
