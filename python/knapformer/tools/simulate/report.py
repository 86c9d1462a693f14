"""What a simulation shows at its end: a table, its legend, what was gained, a JSON file, an HTML file."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from knapformer import Plan, TrainedModel, predict_step
from knapformer.tools.cost_args import trained_model
from knapformer.tools.files import show, table_of, text_or, write_json
from knapformer.tools.measure.environment import environment
from knapformer.tools.measure.figures import forward_flops
from knapformer.tools.report import NO_BALANCER, PLANNED_STEP
from knapformer.tools.report import write_report as write_html
from knapformer.tools.simulate.results import Measured, Variant, figures, sentences
from knapformer.tools.simulate.settings import SimulationSettings
from knapformer.tools.simulate.variants import EQUAL_LENGTHS, Variants, others, variant_names


def write_report(
    settings: SimulationSettings,
    device: torch.device,
    dtype: torch.dtype,
    measured: list[Measured],
    num_parameters: int,
) -> None:
    """Prints results, and writes files where asked for. Raises RuntimeError where variants compute different things.

    measured: one for each of variant_names. num_parameters: of the model's blocks.
    """
    variants = _variants(settings, measured)
    mask = settings.model.mask

    def figures_of(variant: Variant) -> dict[str, Any]:
        flops = [sum(forward_flops(plan, mask) for plan in plans) for plans in variant.plans]
        run = (flops, settings.model.depth, settings.peak_tflops, settings.checkpointing)
        of = figures(variant, variants[0], *run)
        return {**of, "predicted_s": _predicted_s(settings, variant, model)} if settings.predicts else of

    model = trained_model(settings.model, dtype, settings.checkpointing).replace(
        mode=settings.mode, num_parameters=float(num_parameters), shard_ranks=settings.shard_ranks
    )
    of_variants = [figures_of(variant) for variant in variants]
    results = {
        "format": "knapformer-simulation/2",
        "settings": settings.to_dict(),
        "data_codes": None if settings.lengths else str(settings.mix()),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "gamma": settings.gamma,
        "variants": of_variants,
        "environment": environment(device),
        "summary": sentences(of_variants),
    }
    _check_same(of_variants, dtype)
    write_json(settings.json_path, results)
    micro_batches = "" if settings.micro_batches is None else f" of {settings.micro_batches} micro-batches"
    show(
        f"{settings.model_name} on {settings.num_ranks} ranks, data {settings.data}, {settings.num_steps} steps"
        f"{micro_batches}, gamma {settings.gamma:.3g}",
        table_of(map(_cells, of_variants), left="balancer"),
        _legend(settings, of_variants),
        str(results["summary"]),
    )
    if settings.report_path is not None:
        shown = next(variant for variant in reversed(variants) if variant.same_samples)
        plan = shown.plans[0][0]
        # The last variant makes the headline; one with other samples cannot be compared, so it comes earlier.
        in_order = sorted(variants, key=lambda variant: (variant.name != NO_BALANCER, variant.same_samples))
        measured_s = {variant.name: variant.measured.latencies_s for variant in in_order}
        # Predictions are not shown: the cluster may not be this machine.
        write_html(settings.report_path, plan.on(model=model), measured_s=measured_s, predicts=False)


def _variants(settings: SimulationSettings, measured: list[Measured]) -> list[Variant]:
    steps = range(settings.num_warmup_steps, settings.num_warmup_steps + settings.num_steps)
    variants = Variants(settings)
    plans, ways = [variants.plans(step) for step in steps], [variants.ways(step) for step in steps]
    topologies = {name: name for name in settings.topologies} | {PLANNED_STEP: f"g1n{settings.num_ranks}"}
    return [
        Variant(
            name,
            topologies.get(name),
            of,
            [of_step[name] for of_step in plans],
            [of_step[name].own_share for of_step in ways],
            all(of_step[name].same_samples for of_step in ways),
        )
        for name, of in zip(variant_names(settings), measured, strict=True)
    ]


def _predicted_s(settings: SimulationSettings, variant: Variant, model: TrainedModel) -> float:
    """The predicted time of a step, mean over the timed steps."""
    cluster = settings.cluster.replace(host_s_per_piece=0.0)  # this implementation copies no pieces one by one

    def step_s(plan: Plan) -> float:
        return predict_step(plan, cluster, model).total_s

    return statistics.fmean(math.fsum(map(step_s, plans)) for plans in variant.plans)


def _check_same(of_variants: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """Checks that variants differ only by the rounding of sums in another order."""
    limit = math.sqrt(torch.finfo(dtype).eps)
    for of in of_variants:
        for name in ("loss_difference", "gradient_difference"):
            if of.get(name, 0.0) > limit:
                raise RuntimeError(f"{of['name']}: {name}: got {of[name]:.2g}, expected at most {limit:.2g}")


def _cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {
        "balancer": "none" if row["name"] == NO_BALANCER else row["name"],
        "WIR": text_or(row["wir"], ".2f", "inf"),
        "FBL s": f"{row['fbl_s']:.3f}",
        "TPS": f"{row['tokens_per_s']:,.0f}",
        "speed-up": f"{row['speed_up']:.2f}",
        "promised": f"{row['promised_speed_up']:.2f}",
        "tokens moved": f"{row['tokens_moved']:.0%}",
        "peak tokens": f"{row['max_tokens_per_rank']:,}",
    }
    if "predicted_s" in row:
        cells["predicted s"] = f"{row['predicted_s']:.3f}"
    return cells if row["hfu"] is None else {**cells, "HFU": f"{row['hfu']:.1%}"}


_WAYS = {
    "buckets": "other samples; in a micro-batch all ranks compute one bucket of lengths, padded to its longest, "
    "which TPS counts. The speed-up is in work for time.",
    "time": "other samples; each rank packs its own until its predicted seconds are full. The speed-up is in work for "
    "time.",
    "static": "groups of so many ranks share all that they drew, by flat bags in the model.",
}


def _legend(settings: SimulationSettings, of_variants: list[dict[str, Any]]) -> str:
    names = {of["name"] for of in of_variants}
    lines = [
        "none: each rank computes what it drew, in the order drawn. g1n2, g2n1, ...: the balancer in the model, in "
        "bags of so many ranks."
    ]
    if PLANNED_STEP in names:
        lines.append(
            f"{PLANNED_STEP}: BalancedBatchSampler's way: whole samples, loaded where they are computed; no rank waits "
            "for tokens."
        )
    lines += [f"{of.name}: {_WAYS[of.key.partition('_')[0]]}" for of in others(settings)]
    if EQUAL_LENGTHS in names:
        lines.append(f"{EQUAL_LENGTHS}: other samples, of equal length, with as much work.")
    lines.append(
        "WIR: highest over lowest work of a rank. FBL: forward and backward, of the slowest rank. TPS: tokens per "
        "second. Promised: by the plans' work alone. Peak tokens: of a rank in a micro-batch."
    )
    return "\n".join(lines)
