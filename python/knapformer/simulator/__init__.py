"""The training simulator: fake training steps with and without the balancer, on real ranks."""

from knapformer.simulator.launch import simulate
from knapformer.simulator.settings import SimulationSettings

__all__ = ["SimulationSettings", "simulate"]
