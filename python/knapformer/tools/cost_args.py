"""The options that plans and predictions depend on: gamma or a calibration, the cluster, the trained model, and what a
plan must respect."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, Calibration, Cluster, Plan, TrainedModel
from knapformer._core import DEFAULT_GAMMA
from knapformer.json_file import read_json
from knapformer.tools.launch import speaks

if TYPE_CHECKING:
    import torch

    from knapformer.models.config import BaseConfig


def warn_if_far(args: argparse.Namespace, d_model: int, longest: int, device: str | None = None) -> None:
    """Warns on standard error where --calibration was measured far from what it is used for. longest: tokens of the
    longest sequence. Raises ArgumentError, OSError."""
    if args.calibration is not None and speaks():
        for why in Calibration.load(args.calibration).far_from(d_model, longest, device):
            print(f"{args.calibration}: {why}", file=sys.stderr)


def costs(
    args: argparse.Namespace, of: Plan | None = None, *, model: TrainedModel | None = None, own_fixed: bool = False
) -> dict[str, Any]:
    """The arguments `gamma`, `cluster` and `model` of `plan`.

    The named cluster, or that of the plan `of`, and `model` (default: TrainedModel()) with the fields that a file of
    --cluster states. Measured values of a calibration replace their fields, and single options replace all.

    own_fixed: leaves out a fixed time that does not belong to the cluster. A named cluster's was fitted to somebody
    else's steps, and it is not known which part of it every micro-batch takes. So a fixed time counts only where a
    calibration, or the user's own cluster, states it. Raises ArgumentError, OSError.
    """
    gamma, calibration = args.gamma, None
    if args.calibration is not None:
        calibration = Calibration.load(args.calibration)
        gamma = calibration.gamma
        for warning in calibration.warnings if speaks() else ():
            print(f"{args.calibration}: {warning}", file=sys.stderr)
    states_fixed, model = False, model or TrainedModel()
    if args.cluster is not None:
        cluster, model, states_fixed = read_cluster(args.cluster, model)
    else:
        cluster, model = (Cluster(), model) if of is None else (of.cluster, of.model)
    if calibration is not None:
        states_fixed = states_fixed or calibration.fixed is not None
        cluster = calibration.cluster(of=cluster)
        if calibration.mode == "lora":
            model = model.replace(mode="lora")
    options = ("shard_ranks", "num_blocks", "num_parameters", "num_heads", "mode", "recomputes")
    given = {name: vars(args)[name] for name in options if vars(args).get(name) is not None}
    if args.ranks_per_node is not None:
        cluster = cluster.replace(ranks_per_node=args.ranks_per_node)
    if own_fixed and not states_fixed:
        cluster = cluster.replace(fixed_s=0.0)
    return {"gamma": gamma, "cluster": cluster, "model": model.replace(**given)}


def assumed(
    args: argparse.Namespace, gamma: float, cluster: Cluster, model: TrainedModel, of: str | None = None
) -> str:
    """One line that says what a prediction depends on. args: as for `costs`, which gave the other values.

    of: the file that the plan is from, if any.
    """
    if of is not None:
        origin, name = "the plan's", "calibrated" if args.calibration is not None else args.cluster or "of the plan"
    elif args.calibration is not None:
        origin, name = f"measured: {args.calibration}", "calibrated"
    else:
        origin = "the default" if gamma == DEFAULT_GAMMA else "as given"
        name = args.cluster or f"{Cluster.names()[0]}, the default"
    limit = args.max_tokens_per_rank
    memory = f"at most {limit:,} tokens of a rank" if limit else "no limit of memory"
    if of is not None and not limit:
        memory = "the plan's limit of memory, if it has one"
    elif args.micro_batches is not None and not limit:
        memory = "steps planned whole within the fullest rank of others"
    heads = f"{model.num_heads} heads" if model.num_heads else "heads as if even"
    fixed = f"{cluster.fixed_s:.3g} s in each step whatever its load" if cluster.fixed_s else "nothing fixed in a step"
    if cluster.fixed_s == Cluster.published().fixed_s:
        fixed += " (fitted to the published cluster)"
    return (
        f"Assumed: gamma {gamma:.4g} ({origin}); cluster {name}: {cluster.flops_per_s / 1e12:.3g} TFLOP/s a rank, "
        f"{cluster.node_bytes_per_s / 1e9:.3g} and {cluster.network_bytes_per_s / 1e9:.3g} GB/s in a node of "
        f"{cluster.ranks_per_node} and between; {model.num_blocks} blocks, {model.num_parameters:.3g} parameters, "
        f"{heads}; {memory}; {fixed}."
    )


def read_cluster(name: str, model: TrainedModel) -> tuple[Cluster, TrainedModel, bool]:
    """A named cluster, or {"cluster": {field: value}, "model": {field: value}} from a file; `model` with the fields of
    that; and whether a fixed time is stated that belongs to the cluster."""
    if name == "published":
        return Cluster.published(), model, True
    if name in Cluster.names():
        return Cluster(name), model, False
    if not Path(name).exists():
        known = ", ".join([*Cluster.names(), "published"])
        raise ArgumentError(f"--cluster: got {name!r}, expected {known}, or a JSON file that exists")
    content = read_json(name, "--cluster")
    if not isinstance(content, dict) or not set(content) <= {"cluster", "model"}:
        raise ArgumentError(f"--cluster: {name}: expected an object with 'cluster' and 'model'")
    parts = {part: content.get(part, {}) for part in ("cluster", "model")}
    for part, fields in parts.items():
        if not isinstance(fields, dict):
            raise ArgumentError(f"--cluster: {name}: {part}: expected an object")
    try:
        return Cluster(**parts["cluster"]), model.replace(**parts["model"]), "fixed_s" in parts["cluster"]
    except ArgumentError as error:
        raise ArgumentError(f"--cluster: {name}: {error}") from None


def trained_model(
    config: BaseConfig, dtype: torch.dtype | None, checkpointing: bool, of: TrainedModel | None = None
) -> TrainedModel:
    """`of` (default: TrainedModel()) with the fields of a model that is run here. dtype: None where not yet known."""
    of = (of or TrainedModel()).replace(
        num_blocks=config.depth, recomputes=checkpointing, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    return of if dtype is None else of.replace(element_size=dtype.itemsize)


def settings_dict(cluster: Cluster, model: TrainedModel) -> dict[str, dict[str, Any]]:
    """The content of a file that --cluster reads."""
    return {"cluster": cluster.to_dict(), "model": model.to_dict()}
