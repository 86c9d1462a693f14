"""The cluster and the trained model, from the command line: named, from a JSON file, and field by field."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from knapformer import ArgumentError
from knapformer._core import ClusterModel, HardwareModel, TrainedModel
from knapformer.calibrate.calibration import Calibration

_HARDWARE_FIELDS = (
    "flops_per_s", "ranks_per_node", "node_bytes_per_s", "network_bytes_per_s", "node_latency_s", "network_latency_s",
    "fixed_s", "host_s_per_piece", "overlaps_attention",
)  # fmt: skip
_MODEL_FIELDS = (
    "num_blocks",
    "num_parameters",
    "bytes_per_number",
    "recomputes",
    "shard_ranks",
    "side_bytes_per_token",
)
_NAMED = {"h100": lambda: HardwareModel(overlaps_attention=True), "published": HardwareModel.published}


def add_cluster_options(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--cluster", default="h100", metavar="NAME|FILE",
        help="h100 (default), published (the paper's cluster and code), or a JSON file with their fields",
    )  # fmt: skip
    group.add_argument("--ranks-per-node", type=int, metavar="N")
    group.add_argument("--shard-ranks", type=int, metavar="N", help="ranks that FSDP shards over (default 32)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster and the model")
    add_cluster_options(group)
    group.add_argument("--blocks", type=int, metavar="N", help="transformer blocks (default 57)")
    group.add_argument("--parameters", type=float, metavar="F", help="default 12e9")
    group.add_argument("--no-checkpoint", action="store_true", help="activations are kept, not recomputed")


def models_from(args: argparse.Namespace, calibration: Calibration | None = None) -> tuple[HardwareModel, TrainedModel]:
    """The named cluster, over it what was measured, over that what single options say.

    Raises ArgumentError, OSError.
    """
    hardware, model = read_cluster(args.cluster)
    for field, value in (calibration.hardware_fields() if calibration is not None else {}).items():
        setattr(hardware, field, value)
    options: tuple[tuple[HardwareModel | TrainedModel, str, Any], ...] = (
        (hardware, "ranks_per_node", args.ranks_per_node),
        (model, "shard_ranks", args.shard_ranks),
        (model, "num_blocks", getattr(args, "blocks", None)),
        (model, "num_parameters", getattr(args, "parameters", None)),
        (model, "recomputes", False if args.no_checkpoint else None),
    )
    for record, field, value in options:
        if value is not None:
            setattr(record, field, value)
    settings = settings_dict(hardware, model)
    return HardwareModel(**settings["hardware"]), TrainedModel(**settings["model"])  # checks them


def read_cluster(name: str) -> tuple[HardwareModel, TrainedModel]:
    """A named cluster, or {"hardware": {field: value}, "model": {field: value}} from a file."""
    if name in _NAMED:
        return _NAMED[name](), TrainedModel()
    if not Path(name).exists():
        raise ArgumentError(f"--cluster: got {name!r}, expected {', '.join(_NAMED)}, or a JSON file that exists")
    try:
        content = json.loads(Path(name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--cluster: {name}: not readable as JSON: {error}") from None
    if not isinstance(content, dict) or not set(content) <= {"hardware", "model"}:
        raise ArgumentError(f"--cluster: {name}: expected an object with 'hardware' and 'model'")
    parts = {part: content.get(part, {}) for part in ("hardware", "model")}
    for part, fields in parts.items():
        if not isinstance(fields, dict):
            raise ArgumentError(f"--cluster: {name}: {part}: expected an object")
    try:
        return HardwareModel(**{"overlaps_attention": True, **parts["hardware"]}), TrainedModel(**parts["model"])
    except ArgumentError as error:
        raise ArgumentError(f"--cluster: {name}: {error}") from None


def planning_cluster(hardware: HardwareModel) -> ClusterModel:
    """What the balanced solver weighs exchanges with, for the cluster that the step is predicted on."""
    return ClusterModel(
        flops_per_s=hardware.flops_per_s,
        node_bytes_per_s=hardware.node_bytes_per_s,
        network_bytes_per_s=hardware.network_bytes_per_s,
        ranks_per_node=hardware.ranks_per_node,
    )


def settings_dict(hardware: HardwareModel, model: TrainedModel) -> dict[str, dict[str, Any]]:
    """What --cluster would read."""
    return {
        "hardware": {field: getattr(hardware, field) for field in _HARDWARE_FIELDS},
        "model": {field: getattr(model, field) for field in _MODEL_FIELDS},
    }
