"""torchtitan's FLUX, by its own trainer and configuration: balanced from `parallelize_fn`, nothing else changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from adapters.titan_ranks import on_ranks
from distributed.ranks import run_ranks

NUM_STEPS = 20


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_losses_are_those_of_torchtitan_also_after_a_resume(tmp_path: Path) -> None:
    (losses, errors), (of_the_other, _) = run_ranks(on_ranks, 2, tmp_path, NUM_STEPS, timeout_s=240)
    assert losses == of_the_other  # reduced over ranks
    for name, values in losses.items():
        assert len(set(values)) == NUM_STEPS, name
        assert values == pytest.approx(losses["plain"], rel=1e-5), name
    of_outputs, of_gradients = errors
    assert of_outputs <= 1e-5
    assert of_gradients <= 5e-5
