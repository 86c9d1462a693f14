"""What test_deepspeed.py runs on two ranks: a balanced FLUX under ZeRO-3."""

from __future__ import annotations

import os

import torch
from adapters.adapters_ranks import FLUX, HOMES, TOPOLOGIES, samples_of
from exactness_ranks import CLUSTER
from knapformer.adapters.check import sample_loss

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
