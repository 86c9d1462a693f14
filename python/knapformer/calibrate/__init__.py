"""What `knapformer calibrate` measures: the workload model's k and gamma on a device, and what its exchanges cost.

calibration = Calibration.load("h100.json")
balancer = SequenceBalancer("g8n4", gamma=calibration)
"""

from __future__ import annotations

from knapformer.calibrate.calibration import Calibration, ExchangeCost, fit_exchange

__all__ = ["Calibration", "ExchangeCost", "fit_exchange"]
