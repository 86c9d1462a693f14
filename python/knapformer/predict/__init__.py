"""Predicted step times: of a plan, and of a mix as the cluster grows.

    step = predict_step(plan, HardwareModel(ranks_per_node=8), TrainedModel(num_blocks=57))
    step.total_s, step.efficiency, step.ranks[0].wait_before_s

The model is in C++ (knapformer/core/step_time.h); docs/cluster_model.md derives it and holds it against measurements.
"""

from __future__ import annotations

from knapformer._core import HardwareModel, RankTime, StepTime, TrainedModel, plan_home, predict_step

__all__ = ["HardwareModel", "RankTime", "StepTime", "TrainedModel", "plan_home", "predict_step"]
