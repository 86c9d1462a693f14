"""What test_ranks.py runs on several ranks."""

from __future__ import annotations

import torch
from adapters.cases import SIZES, Sample, cases, gradients, sample_loss
from exactness_ranks import CLUSTER
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import knapformer
from knapformer import SequenceBalancer

# Which of SIZES are whose: a rank without samples among them.
HOMES = {2: [[], [0, 1, 2, 3, 4]], 4: [[4], [], [0, 2], [1, 3]]}
Outcome = tuple[list[Tensor], dict[str, Tensor], int]  # outputs, whole gradients, sequences that ranks share


def samples_of(name: str) -> list[Sample]:
    return [cases()[name].sample(*size, seed) for seed, size in enumerate(SIZES)]


def sharded_and_balanced(rank: int, world: int, names: list[str], topology: str) -> dict[str, Outcome]:
    """Under FSDP2 and diffusers' checkpointing: this rank's outputs, the whole gradients, and ranks that share."""
    mesh = init_device_mesh("cpu", (world,))
    balancer = SequenceBalancer(topology, cluster=CLUSTER)
    outcomes = {}
    for i, name in enumerate(names):
        case = cases()[name]
        model = case.make()
        if i % 2 == 0:
            model.enable_gradient_checkpointing()
        if i % 3 == 0:
            knapformer.balance(model, balancer)  # before sharding, or after
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if i % 3 != 0:
            knapformer.balance(model, balancer)
        samples = [samples_of(name)[index] for index in HOMES[world][rank]]
        predictions = model(samples)
        loss = sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero)
        (loss * world).backward()  # FSDP takes the mean over ranks
        grads = {}
        for parameter_name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), f"{name}: {parameter_name} has no gradient"
            grads[parameter_name] = parameter.grad.full_tensor()
        shared = sum(degree > 1 for degree in balancer.plan.degree_of_sequence)
        outcomes[name] = ([p.detach() for p in predictions], grads, shared)
    return outcomes


def ddp_with_frozen_base(rank: int, world: int, name: str, topology: str) -> Outcome:
    """Only the projections of attention train, as adapters would. All samples are rank 1's."""
    balancer = SequenceBalancer(topology, cluster=CLUSTER)
    case = cases()[name]
    model = case.make()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(".to_q." in parameter_name)
    balanced = DistributedDataParallel(knapformer.balance(model, balancer))
    samples = samples_of(name) if rank == 1 else []
    predictions = balanced(samples)
    loss = sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero)
    (loss * world).backward()
    degrees = balancer.plan.degree_of_sequence
    return [p.detach() for p in predictions], gradients(model), sum(degree > 1 for degree in degrees)


def on_ranks(rank: int, world: int, names: list[str], topology: str) -> dict[str, Outcome]:
    outcomes = sharded_and_balanced(rank, world, names, topology)
    if world == 2:
        outcomes["ddp"] = ddp_with_frozen_base(rank, world, names[0], topology)
    return outcomes


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    lists = [m for m in model.children() if isinstance(m, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks]
