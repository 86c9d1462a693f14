"""What the ranks of test_exactness do, and the same in one process that holds all the data.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from knapformer.adapters.named import build_model, load_config, random_batch
from knapformer.losses import token_mean
from knapformer.models import init_weights, set_checkpointing, shard_model
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from knapformer import Cluster, Sample, SequenceBalancer, TrainedModel

GAMMA = 0.7
# An exchange costs a few percent of a token's work at these widths: plans share short sequences, but not all of them.
CLUSTER = Cluster(flops_per_s=1e9, node_bytes_per_s=2e8, network_bytes_per_s=2e8)

Samples = list[tuple[int, int]]  # (text tokens, image tokens) of each
Step = list[Samples]  # of each rank
# Loss of each step, gradients of all steps added up. Arrays: a tensor does not outlive the process that pickles it.
Outcome = tuple[list[float], dict[str, NDArray[np.float64]]]


@dataclass(frozen=True)
class Case:
    model: str
    topology: str | None
    checkpointing: bool
    steps: tuple[Step, ...]

    @property
    def cuts_queries(self) -> bool:
        """Those with checkpointing, whose recomputation repeats the exchanges."""
        return self.checkpointing


def batch_of(name: str, step: Step, index: int, ranks: list[int]) -> tuple[Any, Tensor]:
    """The samples of some ranks, packed. index: the step's. A sample's tensors follow from its place in it alone."""
    drawn = [(Sample(*size), 10_000 * index + 100 * rank + i) for rank in ranks for i, size in enumerate(step[rank])]
    sizes, seeds = [size for size, _ in drawn], [seed for _, seed in drawn]
    return random_batch(load_config(name), sizes, seeds, torch.device("cpu"), torch.float64)


def run_alone(name: str, steps: tuple[Step, ...]) -> Outcome:
    """No ranks, no sharding, no balancer, no checkpoint: what every other run has to equal."""
    model = build_model(load_config(name), torch.float64)
    init_weights(model, seed=5)
    losses = []
    for index, step in enumerate(steps):
        batch, target = batch_of(name, step, index, list(range(len(step))))
        loss = (model(batch) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def run_on_ranks(case: Case) -> Outcome:
    """Collective. With FSDP2; the same outcome on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(load_config(case.model), torch.float64)
    init_weights(model, seed=5)
    set_checkpointing(model, case.checkpointing)
    shard_model(model, init_device_mesh("cpu", (world,)))
    # Planned for one head, every rank that shares a sequence has a part of its queries.
    planned = TrainedModel(num_heads=1, cuts_queries=True) if case.cuts_queries else None
    balancer = None
    if case.topology is not None:
        balancer = SequenceBalancer(case.topology, gamma=GAMMA, cluster=CLUSTER, model=planned)
    losses = []
    for index, step in enumerate(case.steps):
        batch, target = batch_of(case.model, step, index, [rank])
        loss = token_mean((model(batch, balancer) - target).square().mean(-1))
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / world)
    grads = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, DTensor):
            grads[name] = parameter.grad.full_tensor().numpy()
    return losses, grads


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """Collective."""
    torch.set_num_threads(1)
    return [run_on_ranks(case) for case in cases]
