from __future__ import annotations

from collections.abc import Iterator

import flop_clock as clock
import pytest
import torch


@pytest.fixture
def flop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements in this process take a nanosecond a floating-point operation, however busy the machine is."""
    monkeypatch.setattr("knapformer.tools.measure.timing.seconds_of", clock.seconds_of)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands set how many torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
