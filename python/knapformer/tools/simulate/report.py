"""What a simulation shows at its end: a table, a sentence, a JSON file."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from knapformer.tools.files import terminal_or_wide, write_json
from knapformer.tools.simulate.results import sentence
from knapformer.tools.simulate.settings import SimulationSettings


def write_report(settings: SimulationSettings, results: dict[str, Any]) -> None:
    """Table and sentence on standard output; settings.json_path where asked for. `results` gains the sentence."""
    results["summary"] = sentence(results["variants"])
    write_json(settings.json_path, results)
    console = terminal_or_wide()
    console.print(
        f"{settings.model_name} on {settings.num_ranks} ranks, data {settings.data}, {settings.num_steps} steps, "
        f"gamma {results['gamma']:.3g}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_table(settings, results))
    console.print(results["summary"], soft_wrap=True, highlight=False)


def _table(settings: SimulationSettings, results: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("balancer")
    for heading in ("WIR", "FBL s", "TPS", "speed-up", "promised", "tokens moved"):
        table.add_column(heading, justify="right")
    if settings.peak_tflops is not None:
        table.add_column("HFU", justify="right")
    for row in results["variants"]:
        cells = [
            row["topology"] or "none",
            "inf" if row["wir"] is None else f"{row['wir']:.2f}",
            f"{row['fbl_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speed_up']:.2f}",
            f"{row['promised_speed_up']:.2f}",
            f"{row['tokens_moved']:.0%}",
        ]
        table.add_row(*cells, *([f"{row['hfu']:.1%}"] if row["hfu"] is not None else []))
    return table
