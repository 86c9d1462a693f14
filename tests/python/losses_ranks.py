"""What the ranks of test_losses do, and the same in one process that holds all the data, with the means written out.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from knapformer.adapters.model import PackedModel
from knapformer.adapters.named import build_model, load_config
from knapformer.losses import count_over_ranks, global_mean, sample_mean, token_mean
from knapformer.models import init_weights, shard_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import knapformer
from knapformer import BalancedBatchSampler, SequenceBalancer

CONFIG = load_config("transformer-tiny")

Step = tuple[tuple[int, ...], ...]  # lengths of the samples of each rank
Outcome = list[tuple[float, dict[str, Tensor]]]  # of each step: global mean of the loss, gradients


@dataclass(frozen=True)
class Case:
    mean: str  # over "token" or "sample"
    wrapper: str  # "ddp" and "fsdp" reduce gradients by mean, "sum" by hand
    count: str  # "reduced", "plan" or "total"
    topology: str | None
    steps: tuple[Step, ...]


def _new_model() -> PackedModel:
    model = build_model(CONFIG, torch.float64)
    init_weights(model, seed=5)
    return model


def _batch(x: Tensor, seq_lens: list[int]) -> list[dict[str, Tensor]]:
    return [{"hidden_states": part} for part in x.split(seq_lens)] if seq_lens else []


def _sample(step: int, number: int, length: int) -> tuple[Tensor, Tensor]:
    """Input and target of a sample: a function of its number in the step, not of the rank that holds it."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return tuple(  # type: ignore[return-value]
        torch.randn(length, width, generator=generator, dtype=torch.float64)
        for width in (CONFIG.in_channels, CONFIG.out_channels)
    )


def alone(mean: str, steps: tuple[Step, ...]) -> Outcome:
    """One sample at a time through the model; means as sums with explicit divisors."""
    outcome = []
    for index, step in enumerate(steps):
        model = _new_model()
        lengths = [length for of_rank in step for length in of_rank]
        loss = torch.zeros((), dtype=torch.float64)
        for number, length in enumerate(lengths):
            x, target = _sample(index, number, length)
            error = (model(_batch(x, [length])) - target).square().sum() / CONFIG.out_channels
            loss = loss + error / (sum(lengths) if mean == "token" else len(lengths) * length)
        if lengths:
            loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        outcome.append((loss.item(), grads))
    return outcome


def on_ranks(case: Case, naive: bool = False) -> Outcome:
    """Collective. naive: each rank's own mean instead, to see that it differs."""
    rank = dist.get_rank()
    balancer = None if case.topology is None else SequenceBalancer(case.topology)
    reduction = "sum" if case.wrapper == "sum" else "mean"
    outcome = []
    for index, step in enumerate(case.steps):
        model, run = _wrapped_model(case.wrapper)
        first = sum(len(of_rank) for of_rank in step[:rank])
        x, target = _packed([_sample(index, first + i, length) for i, length in enumerate(step[rank])])
        seq_lens = list(step[rank])
        per_token = (run(_batch(x, seq_lens), balancer) - target).square().mean(1)

        plan = total = None
        if case.count == "plan":
            everyone = [list(of_rank) for of_rank in step]
            plan = balancer.plan if balancer else knapformer.plan(everyone, "g1n1", d_model=CONFIG.d_model)
        elif case.count == "total":
            total = count_over_ranks(len(x) if case.mean == "token" else len(seq_lens))
        if naive:
            loss = per_token.mean() if seq_lens else per_token.sum()
        elif case.mean == "token":
            loss = token_mean(per_token, plan=plan, total=total, gradient_reduction=reduction)
        else:
            loss = sample_mean(per_token, seq_lens, plan=plan, total=total, gradient_reduction=reduction)
        loss.backward()
        outcome.append((global_mean(loss, gradient_reduction=reduction).item(), _reduced(model, case.wrapper)))
    return outcome


def _wrapped_model(wrapper: str) -> tuple[PackedModel, PackedModel | DistributedDataParallel]:
    """The model, and what is called in its place."""
    model = _new_model()
    if wrapper == "fsdp":
        shard_model(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, DistributedDataParallel(model) if wrapper == "ddp" else model


def _packed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    none = _sample(0, 0, 0)
    x, target = (torch.cat([none[part], *(sample[part] for sample in samples)]) for part in (0, 1))
    return x, target


def _reduced(model: PackedModel, wrapper: str) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        if wrapper == "sum":
            dist.all_reduce(grad)
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grads


def accumulated(steps: tuple[Step, ...]) -> dict[str, Tensor]:
    """Collective. The steps as micro-batches of one: the gradient of the mean over the tokens of all of them."""
    rank = dist.get_rank()
    model = _new_model()
    total = count_over_ranks(sum(sum(step[rank]) for step in steps))
    for index, step in enumerate(steps):
        first = sum(len(of_rank) for of_rank in step[:rank])
        for i, length in enumerate(step[rank]):
            x, target = _sample(index, first + i, length)
            per_token = (model(_batch(x, [length])) - target).square().mean(1)
            token_mean(per_token, total=total).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grads[name])
        grads[name] /= dist.get_world_size()
    return grads


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    return [on_ranks(case) for case in cases]


def run_naive(rank: int, world_size: int, case: Case) -> Outcome:
    return on_ranks(case, naive=True)


def run_accumulated(rank: int, world_size: int, steps: tuple[Step, ...]) -> dict[str, Tensor]:
    return accumulated(steps)


@dataclass(frozen=True)
class SampledStep:
    mean: str
    wrapper: str
    micro_batches: int
    sync: str
    lengths: tuple[int, ...]


def sampled(case: SampledStep) -> dict[str, Tensor]:
    """Collective. All samples are one optimizer step, whose micro-batches a BalancedBatchSampler yields."""
    model, run = _wrapped_model(case.wrapper)
    sampler = BalancedBatchSampler(
        case.lengths,
        batch_size=-(-len(case.lengths) // (dist.get_world_size() * case.micro_batches)),
        d_model=CONFIG.d_model,
        micro_batches=case.micro_batches,
        sync=case.sync,
        allow_empty=True,
    )
    for indices in sampler:
        seq_lens = [case.lengths[i] for i in indices]
        x, target = _packed([_sample(0, i, case.lengths[i]) for i in indices])
        per_token = (run(_batch(x, seq_lens)) - target).square().mean(1)
        if case.mean == "token":
            loss = token_mean(per_token, total=sampler.num_tokens(0))
        else:
            loss = sample_mean(per_token, seq_lens, total=sampler.num_samples(0))
        loss.backward()
    return _reduced(model, case.wrapper)


def run_sampled(rank: int, world_size: int, cases: list[SampledStep]) -> list[dict[str, Tensor]]:
    return [sampled(case) for case in cases]


def run_misuse(rank: int, world_size: int) -> list[str]:
    """The error messages that a rank gets for plans that do not fit, and for arguments wrong on rank 0 alone."""
    plan = knapformer.plan([[3, 4], [5]], "g1n2", d_model=64)
    alone_plan = knapformer.plan([[3]], "g1n1", d_model=64)
    of_second = dist.new_group([1])
    messages = []
    for call in (
        lambda: token_mean(torch.zeros(6), plan=plan),
        lambda: sample_mean(torch.zeros(7), [1, 2, 4], plan=plan),
        lambda: token_mean(torch.zeros(3), plan=alone_plan),
        lambda: token_mean((3.0, torch.zeros(3))[rank]),
        lambda: count_over_ranks((1.5, 2)[rank]),
        lambda: token_mean(torch.zeros(3), group=of_second),
    ):
        try:
            call()
            messages.append("no error")
        except (ValueError, knapformer.StateError) as error:
            messages.append(str(error))
    return messages
