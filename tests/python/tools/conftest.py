from __future__ import annotations

import pytest


@pytest.fixture
def flop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements in this process take a nanosecond a floating-point operation, however busy the machine is."""
    import flop_clock

    monkeypatch.setattr("knapformer.tools.measure.timing.seconds_of", flop_clock.seconds_of)
