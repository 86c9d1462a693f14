"""What a simulation shows at its end: a table, a sentence, a JSON file."""

from __future__ import annotations

from typing import Any

from knapformer.tools.files import show, table_of, text_or, write_json
from knapformer.tools.simulate.results import sentence
from knapformer.tools.simulate.settings import SimulationSettings


def write_report(settings: SimulationSettings, results: dict[str, Any]) -> None:
    """Table and sentence on standard output; settings.json_path where asked for. `results` gains the sentence."""
    results["summary"] = sentence(results["variants"])
    write_json(settings.json_path, results)
    show(
        f"{settings.model_name} on {settings.num_ranks} ranks, data {settings.data}, {settings.num_steps} steps, "
        f"gamma {results['gamma']:.3g}",
        table_of(map(_cells, results["variants"]), left="balancer"),
        results["summary"],
    )


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
