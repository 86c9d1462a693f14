"""Balanced models compute their own tokens of samples that a sampler gives to several ranks: placed=True."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from adapters.cases import Sample, assert_gradients_equal, cases
from distributed.ranks import run_ranks
from exactness_ranks import CLUSTER
from knapformer.adapters.parity import SIZES, Size, gradients, one_by_one, sample_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import knapformer
from knapformer import SequenceBalancer

CASE = cases()["flux"]
SHARED_SIZES = [Size((1, rows, 6), 7) for rows in (40, 2, 3, 1, 4, 2, 3, 2)]


def loaded_where_computed(rank: int, world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Under FSDP2: the loss and the gradients of an epoch of one step, and how many samples were shared. Then a sampler
    of lengths that leave the text out."""
    lengths = [size.visual_tokens + size.text_tokens for size in SHARED_SIZES]
    cost = knapformer.Cost(d_model=48, cluster=CLUSTER)
    balancer = SequenceBalancer("g2/1n1", cost)
    model: Any = knapformer.balance(CASE.make(), balancer)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.transformer_blocks, *model.single_transformer_blocks, model):
        fully_shard(module, mesh=mesh)

    def lists(lengths: list[int]) -> Iterator[tuple[list[Sample], knapformer.Plan]]:
        sampler = knapformer.BalancedBatchSampler(lengths, cost, batch_size=2, micro_batches=2, topology="g2/1n1")
        for micro_batch, indices in enumerate(sampler):
            plan = balancer.follow(sampler.plan(0, micro_batch))
            yield [CASE.sample(SHARED_SIZES[i], i) for i in indices], plan

    epoch_loss, num_shared = torch.zeros(()), 0
    for samples, plan in lists(lengths):
        predictions = model(samples, placed=True)
        losses = [sample_loss(*each) for each in zip(predictions, samples, predictions.own, strict=True)]
        loss = torch.stack([predictions.zero, *losses]).sum()
        (loss * world_size).backward()  # FSDP takes the mean over ranks
        epoch_loss += loss.detach()
        num_shared += sum(degree > 1 for degree in plan.degree_of_sequence)
    dist.all_reduce(epoch_loss)
    grads = {name: cast(DTensor, gradient).full_tensor() for name, gradient in gradients(model).items()}
    with pytest.raises(
        (knapformer.ArgumentError, knapformer.StateError),
        match=r"seq_lens: got \[.*\], expected .* in part \(placed=True\)",
    ):
        model(next(lists([length - 7 for length in lengths]))[0], placed=True)
    return epoch_loss, grads, num_shared


def test_ranks_that_share_a_sample_load_it() -> None:
    samples = [CASE.sample(size, i) for i, size in enumerate(SHARED_SIZES)]
    outputs, expected = one_by_one(CASE.make(), samples)
    loss = sum(sample_loss(output, sample) for output, sample in zip(outputs, samples, strict=True))
    for of_ranks, grads, num_shared in run_ranks(loaded_where_computed, 2):
        assert num_shared > 0
        assert float(of_ranks) == pytest.approx(float(loss), rel=1e-5)
        assert_gradients_equal(grads, expected)


def test_samples_are_placed_by_a_balancer_alone() -> None:
    with pytest.raises(knapformer.ArgumentError, match="placed: got True, expected False without a balancer"):
        knapformer.balance(CASE.make())([CASE.sample(SIZES[0], 0)], placed=True)


@pytest.mark.parametrize("balancer", [None, SequenceBalancer("g1n1", d_model=48)])
def test_a_call_says_whether_its_samples_are_those_that_ranks_share(balancer: SequenceBalancer | None) -> None:
    """Otherwise each of these ranks would compute them whole, and they would count several times."""
    model, samples = knapformer.balance(CASE.make(), balancer), [CASE.sample(SIZES[0], 0)]
    sampler = knapformer.BalancedBatchSampler(
        [22] * 4, batch_size=1, d_model=48, topology="g2n1", num_replicas=2, rank=0
    )
    message = (
        r"placed: got none, .* BalancedBatchSampler of g2n1, .* expected placed=True for its samples, .* placed=Fa"
    )
    with pytest.raises(knapformer.StateError, match=message):
        model(samples)
    assert len(model(samples, placed=False)) == 1
    del sampler
    assert len(model(samples)) == 1


def test_a_call_says_that_its_samples_are_not_those_that_a_loader_cuts() -> None:
    """Parts of samples would be computed as whole ones."""
    run_ranks(behind_a_loader_that_cuts, 2)


def behind_a_loader_that_cuts(rank: int, world_size: int) -> None:
    model, samples = knapformer.balance(CASE.make()), [CASE.sample(SIZES[0], 0)]
    balancer = SequenceBalancer("g2n1", d_model=48)
    loader = knapformer.BalancedStepLoader([], balancer, 1, per_token=["hidden_states"])
    message = r"placed: got none, .* BalancedStepLoader of g2n1, .* expected a loader of g1n2, .* placed=False"
    with pytest.raises(knapformer.StateError, match=message):
        model(samples)
    del loader
    assert len(model(samples)) == 1
