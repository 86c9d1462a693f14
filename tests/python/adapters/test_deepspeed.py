"""A balanced FLUX under DeepSpeed's ZeRO-3, a rank without samples among two, against diffusers alone."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from adapters.adapters_ranks import FLUX, HOMES, TOPOLOGIES, samples_of
from adapters.cases import assert_gradients_equal
from distributed.ranks import run_ranks
from exactness_ranks import CLUSTER
from knapformer.adapters.parity import one_by_one, sample_loss

import knapformer


def on_ranks(rank: int, world: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of two steps, whole gradients of the first, and sequences that ranks share."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    balancer = knapformer.SequenceBalancer(TOPOLOGIES[2], cluster=CLUSTER)
    model = knapformer.balance(FLUX.make(), balancer)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    samples = [samples_of(FLUX)[index] for index in HOMES[world][rank]]
    losses, gradients = [], {}
    for _ in range(2):
        predictions = engine(samples)
        loss = sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero)
        engine.backward(loss * world)  # DeepSpeed takes the mean over ranks
        if not gradients:
            gradients = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, gradients, sum(degree > 1 for degree in balancer.plan.degree_of_sequence)


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
