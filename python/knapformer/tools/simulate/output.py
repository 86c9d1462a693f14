"""From measured latencies and plans to the figures of a run, and what is printed and written of them.

The words are the paper's: WIR, the highest work of a rank over the lowest; FBL, forward and backward latency of a step,
that of the slowest rank; TPS, tokens per second; HFU, hardware FLOPs utilization.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from knapformer import TrainedModel, predict_micro_batch
from knapformer.tools.files import cells_of, show, table_of, write_json
from knapformer.tools.simulate.variants import Simulation
from knapformer.tools.ways import NO_BALANCER, OptimizerStep, measured


class Measured(NamedTuple):
    """Over all ranks: the latency of the slowest, and what one process with all samples of the step would compute."""

    latency_s: float
    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class Variant:
    """One way to run the steps, and what was measured of it, an entry for each timed step."""

    name: str
    steps: list[OptimizerStep] = field(default_factory=list)  # without a balancer, all at home
    measured: list[Measured] = field(default_factory=list)
    same_samples: bool = True  # whether it computes the samples that were drawn


def figures(variant: Variant, baseline: Variant, model: TrainedModel, peak_tflops: float | None) -> dict[str, Any]:
    """A variant's figures, ready for JSON. A variant with other samples does more or less work in a step: its gains are
    scaled by the ratio of work."""

    def ratio(work: Callable[[OptimizerStep], float]) -> float:
        return math.fsum(map(work, baseline.steps)) / math.fsum(map(work, variant.steps))

    # FLOPs of one block: on the samples, without padding; and on the most loaded rank of each micro-batch, which the
    # step's time follows, since ranks wait for each other in every one.
    own = ratio(lambda step: step.own_share * math.fsum(of for plan in step.plans for of in plan.workload_after))
    highest = ratio(lambda step: math.fsum(max(plan.workload_after) for plan in step.plans))
    work = 1.0 if variant.same_samples else 1 / own
    plans = [plan for step in variant.steps for plan in step.plans]
    latencies_s, of_baseline = ([step.latency_s for step in of.measured] for of in (variant, baseline))
    return {
        **measured(variant.name, variant.steps, latencies_s, model, peak_tflops),
        "fbl_median_s": statistics.median(latencies_s),
        "speed_up": work * math.fsum(of_baseline) / math.fsum(latencies_s),
        "promised_speed_up": work * highest,
        "tokens_moved": sum(plan.tokens_moved for plan in plans) / sum(plan.num_tokens for plan in plans),
        "work": work,
        "loss_per_step": [step.loss for step in variant.measured],
        **(differences(variant, baseline) if variant.same_samples else {}),
    }


def differences(one: Variant, other: Variant) -> dict[str, float]:
    """The largest relative difference over the steps, of loss and of gradient norm, which have to be the same."""

    def largest(of: Callable[[Measured], float]) -> float:
        pairs = zip(map(of, one.measured), map(of, other.measured), strict=True)
        return max(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)

    return {
        "loss_difference": largest(lambda step: step.loss),
        "gradient_difference": largest(lambda step: step.gradient_norm),
    }


def sentences(all_figures: Sequence[dict[str, Any]]) -> str:
    """What the table does not say. The first of all_figures are those without a balancer."""
    baseline, *others = all_figures
    compared = [of for of in all_figures if "loss_difference" in of]
    loss, gradient = (max(of[name] for of in compared) for name in ("loss_difference", "gradient_difference"))
    text = (
        f"The loss is the same, {baseline['loss_per_step'][0]:.6g} in the first step: relative differences of at most "
        f"{loss:.1e}, of the gradient's norm {gradient:.1e}."
    )
    if others and all(of["promised_speed_up"] < 1.02 for of in others):
        text += "\nThe ranks' work is even already: there was nothing to gain."
    return text


def report(
    simulation: Simulation, model: TrainedModel, variants: Sequence[Variant], limit: float, on: dict[str, Any]
) -> None:
    """Prints results, and writes them as JSON where asked for. model: as run. limit: of a relative difference that
    rounding makes. on: what the file says of the device. Raises RuntimeError where variants compute different things.
    """
    args, planning = simulation.args, simulation.planning
    of_variants = []
    for variant in variants:
        of = figures(variant, variants[0], model, args.peak_tflops)
        of_variants.append(of)
        if args.calibration is not None or args.cluster is not None:  # the cluster is this machine's
            cluster = planning.cluster.replace(host_s_per_piece=0.0)  # no pieces are copied one by one here
            of["predicted_s"] = statistics.fmean(
                math.fsum(predict_micro_batch(plan, cluster, model).total_s for plan in step.plans)
                for step in variant.steps
            )
        for name in ("loss_difference", "gradient_difference"):
            if of.get(name, 0.0) > limit:
                raise RuntimeError(f"{of['name']}: {name}: got {of[name]:.2g}, expected at most {limit:.2g}")
    summary = sentences(of_variants)
    options = {name: of for name, of in vars(args).items() if name not in ("run", "default_of", "argv", "command")}
    settings = options | {
        "num_ranks": simulation.num_ranks, "num_lengths": len(simulation.lengths), "model": simulation.model.to_dict(),
        "mode": model.mode, "shard_ranks": model.shard_ranks, "cluster": planning.cluster.to_dict(),
    }  # fmt: skip
    write_json(args.json, {
        "format": "knapformer-simulation/3", "settings": settings,
        "data_codes": None if simulation.mix is None else str(simulation.mix), **on, "gamma": planning.gamma,
        "variants": of_variants, "summary": summary,
    })  # fmt: skip
    whole = "" if args.micro_batches is None else f" of {args.micro_batches} micro-batches"
    columns = {heading: of for heading, of in _COLUMNS.items() if of_variants[0].get(of.partition(":")[0]) is not None}
    rows = [of | {"name": "none" if of["name"] == NO_BALANCER else of["name"]} for of in of_variants]
    show(
        f"{args.model} on {simulation.num_ranks} ranks, data {args.data or args.lengths}, {args.steps} steps{whole}, "
        f"gamma {planning.gamma:.3g}",
        table_of((cells_of(row, _COLUMNS_WIR | columns) for row in rows), left="balancer"),
        _LEGEND,
        summary,
    )


_COLUMNS_WIR = {"balancer": "name:", "WIR": "wir:.2f:inf"}
_COLUMNS = {
    "FBL s": "fbl_s:.3f", "TPS": "tokens_per_s:,.0f", "speed-up": "speed_up:.2f", "promised": "promised_speed_up:.2f",
    "tokens moved": "tokens_moved:.0%", "peak tokens": "max_tokens:,", "predicted s": "predicted_s:.3f",
    "HFU": "hfu:.1%",
}  # fmt: skip
_LEGEND = (
    "none: each rank computes what it drew, in the order drawn. g1n2, g2n1, ...: the balancer in the model, in bags.\n"
    "step planned: as BalancedBatchSampler does: whole samples, loaded where they are computed.\n"
    "lockstep buckets, time budget: other samples (buckets: with padding, which TPS counts); the speed-up is in work "
    "for time. sequence parallel: groups of so many ranks share all that they drew.\n"
    "WIR: highest over lowest work of a rank. FBL: forward and backward, of the slowest rank. TPS: tokens per second. "
    "Promised: by the plans' work alone. Peak tokens: of a rank in a micro-batch."
)
