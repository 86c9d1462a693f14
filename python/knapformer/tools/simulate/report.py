"""What a simulation shows at its end: a table, a sentence, a JSON file, an HTML file."""

from __future__ import annotations

from typing import Any

import torch

from knapformer import WorkloadFit
from knapformer.tools.cli_args import trained_model
from knapformer.tools.files import show, table_of, text_or, write_json
from knapformer.tools.measure.environment import environment
from knapformer.tools.measure.figures import forward_flops
from knapformer.tools.report import write_report as write_html
from knapformer.tools.simulate.results import Variant, figures, sentence
from knapformer.tools.simulate.settings import SimulationSettings


def write_report(
    settings: SimulationSettings,
    device: torch.device,
    dtype: torch.dtype,
    gamma: float,
    fit: WorkloadFit | None,
    latencies_s: list[list[float]],
) -> None:
    """Table and sentence on standard output, files where asked for.

    fit: where gamma was fitted. latencies_s: of each step's slowest rank, without a balancer and with each topology.
    """
    variants = _variants(settings, gamma, latencies_s)
    flops = [forward_flops(plan, settings.model.mask) for plan in variants[0].plans]
    run = (flops, settings.model.depth, settings.peak_tflops, settings.checkpointing)
    of_variants = [figures(variant, variants[0], *run) for variant in variants]
    fitted = ("seconds_per_flop", "gamma", "relative_rms_error")
    results = {
        "format": "knapformer-simulation/1",
        "settings": settings.to_dict(),
        "data_codes": str(settings.mix()),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "gamma": gamma,
        "fit": fit and {name: getattr(fit, name) for name in fitted},
        "variants": of_variants,
        "environment": environment(device),
        "summary": sentence(of_variants),
    }
    write_json(settings.json_path, results)
    show(
        f"{settings.model_name} on {settings.num_ranks} ranks, data {settings.data}, {settings.num_steps} steps, "
        f"gamma {gamma:.3g}",
        table_of(map(_cells, of_variants), left="balancer"),
        str(results["summary"]),
    )
    if settings.report_path is not None:
        plan = variants[-1].plans[0]
        model = trained_model(settings.model, dtype, settings.checkpointing, of=plan.model)
        measured_s = {variant.name: variant.latencies_s for variant in variants}
        # Not predicted: the cluster is not this machine.
        write_html(settings.report_path, plan.on(model=model), measured_s=measured_s, predicts=False)


def _variants(settings: SimulationSettings, gamma: float, latencies_s: list[list[float]]) -> list[Variant]:
    """With the plans that the ranks made: the same input gives the same plan anywhere."""
    steps = range(settings.num_warmup_steps, settings.num_warmup_steps + settings.num_steps)
    lengths = [settings.seq_lens(step) for step in steps]
    plans = [[settings.plan(lens, topology, gamma) for lens in lengths] for topology in settings.topologies]
    names: list[str | None] = [None, *settings.topologies]
    return [Variant(*of) for of in zip(names, latencies_s, [plans[0], *plans], strict=True)]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {
        "balancer": row["topology"] or "none",
        "WIR": text_or(row["wir"], ".2f", "inf"),
        "FBL s": f"{row['fbl_s']:.3f}",
        "TPS": f"{row['tokens_per_s']:,.0f}",
        "speed-up": f"{row['speed_up']:.2f}",
        "promised": f"{row['promised_speed_up']:.2f}",
        "tokens moved": f"{row['tokens_moved']:.0%}",
    }
    return cells if row["hfu"] is None else {**cells, "HFU": f"{row['hfu']:.1%}"}
