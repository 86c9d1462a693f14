"""What the ranks of test_losses do, and the same in one process that holds all the data, with the means written out.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from knapformer.losses import count_over_ranks, global_mean, sample_mean, token_mean
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

IN, OUT = 4, 3  # features

Step = tuple[tuple[int, ...], ...]  # lengths of the samples of each rank
Outcome = list[tuple[float, dict[str, Tensor]]]  # of each step: global mean of the loss, gradients


@dataclass(frozen=True)
class Case:
    mean: str  # over "token" or "sample"
    wrapper: str  # "ddp" and "fsdp" reduce gradients by mean, "sum" by hand
    count: str  # "reduced" or "total"
    steps: tuple[Step, ...]


def _new_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, OUT)).double()


def _samples(step: int, first: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, packed: functions of a sample's number in the step, not of the rank that holds it."""
    drawn = [torch.empty(0, IN + OUT, dtype=torch.float64)]
    for number, length in enumerate(lengths, first):
        generator = torch.Generator().manual_seed(1000 * step + number)
        drawn.append(torch.randn(length, IN + OUT, generator=generator, dtype=torch.float64))
    x, target = torch.cat(drawn).split([IN, OUT], 1)
    return x, target


def alone(mean: str, steps: tuple[Step, ...]) -> Outcome:
    """One sample at a time through the model; means as sums with explicit divisors."""
    outcome = []
    for index, step in enumerate(steps):
        model = _new_model()
        lengths = [length for of_rank in step for length in of_rank]
        loss = torch.zeros((), dtype=torch.float64)
        for number, length in enumerate(lengths):
            x, target = _samples(index, number, (length,))
            error = (model(x) - target).square().sum() / OUT
            loss = loss + error / (sum(lengths) if mean == "token" else len(lengths) * length)
        if lengths:
            loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        outcome.append((loss.item(), grads))
    return outcome


def on_ranks(case: Case) -> Outcome:
    """Collective."""
    rank = dist.get_rank()
    outcome = []
    for index, step in enumerate(case.steps):
        model = _new_model()
        if case.wrapper == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        run = DistributedDataParallel(model) if case.wrapper == "ddp" else model
        x, target = _samples(index, sum(len(of_rank) for of_rank in step[:rank]), step[rank])
        per_token = (run(x) - target).square().mean(1)

        total = None
        if case.count == "total":
            total = count_over_ranks(len(x) if case.mean == "token" else len(step[rank]))
        if case.mean == "token":
            loss = token_mean(per_token, total=total)
        else:
            loss = sample_mean(per_token, step[rank], total=total)
        (loss / dist.get_world_size() if case.wrapper == "sum" else loss).backward()
        outcome.append((global_mean(loss).item(), _reduced(model, case.wrapper)))
    return outcome


def _reduced(model: nn.Module, wrapper: str) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        if wrapper == "sum":
            dist.all_reduce(grad)
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grads


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    return [on_ranks(case) for case in cases]
