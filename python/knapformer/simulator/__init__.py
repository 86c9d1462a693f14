"""The training simulator: fake training steps with and without the balancer, on real ranks."""

from knapformer.launch import run_on_ranks
from knapformer.simulator.settings import SimulationSettings

__all__ = ["SimulationSettings", "simulate"]


def simulate(settings: SimulationSettings) -> None:
    """Runs the simulation; rank 0 prints the report and writes settings.json_path. Raises as run_on_ranks does."""
    run_on_ranks(
        "simulate",
        "knapformer.simulator.worker",
        settings.to_json(),
        settings.num_ranks,
        settings.device,
        settings.threads,
    )
