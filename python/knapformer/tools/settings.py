"""What a command's plans and predictions depend on (width, gamma, mask, the cluster, the model), by its options."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knapformer import ArgumentError, Calibration, Cluster, TrainedModel
from knapformer._core import DEFAULT_GAMMA
from knapformer.json_file import read_json
from knapformer.tools.launch import speaks
from knapformer.tools.rank_lengths import Lengths
from knapformer.tools.ways import PlanCost

if TYPE_CHECKING:
    import torch

    from knapformer.adapters.named import ModelConfig


def warn_if_far(args: argparse.Namespace, of: PlanCost, batches: Iterable[Lengths], device: str | None = None) -> None:
    """Warns on standard error where --calibration was measured far from what it is used for. Raises ArgumentError,
    OSError."""
    if args.calibration is not None and speaks():
        lengths = {length for batch in batches for lens in batch for length in lens}
        masks = set(map(of.mask_of, lengths))
        for why in Calibration.load(args.calibration).far_from(of.d_model, max(lengths, default=0), device, masks):
            print(f"{args.calibration}: {why}", file=sys.stderr)


def planning(
    args: argparse.Namespace, model: TrainedModel | None = None, own_fixed: bool = False, **given: Any
) -> PlanCost:
    """What the options say, and `given` in place of it.

    The named cluster, and `model` (default: TrainedModel()) with the fields that a file of --cluster states. Measured
    values of a calibration replace their fields, and single options replace all.

    own_fixed: leaves out a fixed time that does not belong to the cluster. A named cluster's was fitted to somebody
    else's steps, and it is not known which part of it every micro-batch takes. So a fixed time counts only where a
    calibration, or the user's own cluster, states it. Raises ArgumentError, OSError.
    """
    options = vars(args)
    fields = {of.name: options[of.name] for of in dataclasses.fields(PlanCost) if options.get(of.name) is not None}
    states_fixed, cluster, model = False, Cluster(), model or TrainedModel()
    if args.cluster is not None:
        cluster, model, states_fixed = read_cluster(args.cluster, model)
    if args.calibration is not None:
        calibration = Calibration.load(args.calibration)
        fields["gamma"] = calibration.gamma
        for warning in calibration.warnings if speaks() else ():
            print(f"{args.calibration}: {warning}", file=sys.stderr)
        states_fixed = states_fixed or calibration.fixed is not None
        cluster = calibration.cluster(of=cluster)
        if calibration.mode == "lora":
            model = model.replace(mode="lora")
    if args.ranks_per_node is not None:
        cluster = cluster.replace(ranks_per_node=args.ranks_per_node)
    if own_fixed and not states_fixed:
        cluster = cluster.replace(fixed_s=0.0)
    trained = ("mode", "recomputes")
    model = model.replace(**{name: options[name] for name in trained if options.get(name) is not None})
    return PlanCost(**(fields | {"cluster": cluster, "model": model} | given))


def assumed(args: argparse.Namespace, of: PlanCost, limit: int | None = None) -> str:
    """One sentence that says what a prediction depends on. limit: of the tokens of a rank; None: as the options say."""
    cluster, model = of.cluster, of.model
    origin = "the default" if of.gamma == DEFAULT_GAMMA else "as given"
    name = args.cluster or f"{Cluster.names()[0]}, the default"
    if args.calibration is not None:
        origin, name = f"measured: {args.calibration}", "calibrated"
    limit = args.max_tokens_per_rank if limit is None else limit
    held = f"at most {limit:,} tokens on a rank" if limit else "no limit of tokens"
    if not limit and args.micro_batches is not None:
        held += ", but for steps planned whole"
    heads = f"{model.num_heads} heads" if model.num_heads else "heads that divide evenly"
    fixed = (
        f"{cluster.fixed_s:.3g} s more in each micro-batch, whatever its load" if cluster.fixed_s else "no fixed time"
    )
    if cluster.fixed_s == Cluster.published().fixed_s:
        fixed += " (fitted to the published cluster)"
    return (
        f"Assumed: gamma {of.gamma:.4g} ({origin}); cluster {name}: "
        f"{cluster.flops_per_s / 1e12:.3g} TFLOP/s a rank, {cluster.node_bytes_per_s / 1e9:.3g} and "
        f"{cluster.network_bytes_per_s / 1e9:.3g} GB/s in a node of {cluster.ranks_per_node} and between; "
        f"{model.num_blocks} blocks, {model.num_parameters:.3g} parameters, {heads}; {model.mode}; {held}; {fixed}."
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
    is_object = isinstance(content, dict) and set(content) <= {"cluster", "model"}
    if not is_object or not all(isinstance(fields, dict) for fields in content.values()):
        raise ArgumentError(f"--cluster: {name}: expected an object with the objects 'cluster' and 'model'")
    fields = content.get("cluster", {})
    try:
        return Cluster(**fields), model.replace(**content.get("model", {})), "fixed_s" in fields
    except ArgumentError as error:
        raise ArgumentError(f"--cluster: {name}: {error}") from None


def trained_model(
    config: ModelConfig, dtype: torch.dtype | None, checkpointing: bool, of: TrainedModel | None = None
) -> TrainedModel:
    """`of` (default: TrainedModel()) with the fields of a model that is run here. dtype: None where not yet known."""
    of = (of or TrainedModel()).replace(
        num_blocks=config.depth, recomputes=checkpointing, cuts_queries=True,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
    )  # fmt: skip
    return of if dtype is None else of.replace(element_size=dtype.itemsize)


def settings_dict(of: PlanCost) -> dict[str, dict[str, Any]]:
    """The content of a file that --cluster reads."""
    return {"cluster": of.cluster.to_dict(), "model": of.model.to_dict()}
