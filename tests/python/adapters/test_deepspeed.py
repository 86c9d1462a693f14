"""A balanced FLUX under DeepSpeed's ZeRO-3, a rank without samples among two, against diffusers alone."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from adapters.adapters_ranks import FLUX, samples_of
from adapters.cases import assert_gradients_equal
from adapters.deepspeed_ranks import on_ranks
from distributed.ranks import run_ranks
from knapformer.adapters.check import one_by_one, sample_loss


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_steps_are_those_of_one_process() -> None:
    model, samples = FLUX.make(), samples_of(FLUX)
    _, expected = one_by_one(model, samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    alone = []
    for _ in range(2):
        loss = sum(sample_loss(model(**sample).sample, sample) for sample in samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    # Its CPU operators are compiled at the first start.
    outcomes = run_ranks(on_ranks, 2, timeout_s=500, env={"DS_ACCELERATOR": "cpu"})
    for _, gradients, num_shared in outcomes:
        assert num_shared > 0
        assert gradients.keys() == expected.keys()
        assert_gradients_equal(gradients, expected)
    assert [sum(losses) for losses in zip(*(losses for losses, *_ in outcomes), strict=True)] == pytest.approx(
        alone, rel=1e-5
    )
