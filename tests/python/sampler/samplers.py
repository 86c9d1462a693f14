"""The samplers of all ranks in one process, and what they yield, for the tests of BalancedBatchSampler."""

import itertools

import torch

from knapformer import BalancedBatchSampler

WIDTH = 256


def lengths_of(num_samples: int, seed: int = 0) -> torch.Tensor:
    """Mostly short, some thirty times as long."""
    generator = torch.Generator().manual_seed(seed)
    return (64 * 32 ** torch.rand(num_samples, generator=generator, dtype=torch.float64)).long()


def samplers(lengths, num_ranks: int, **options) -> list[BalancedBatchSampler]:
    return [
        BalancedBatchSampler(lengths, d_model=WIDTH, num_replicas=num_ranks, rank=rank, **options)
        for rank in range(num_ranks)
    ]


def steps_of(ranks: list[BalancedBatchSampler], micro_batches: int) -> list[list[list[list[int]]]]:
    """By step, rank and micro-batch."""
    lists = [list(sampler) for sampler in ranks]
    assert len({len(own) for own in lists}) == 1
    assert len(lists[0]) == len(ranks[0])
    return [[own[first : first + micro_batches] for own in lists] for first in range(0, len(lists[0]), micro_batches)]


def samples_in(step) -> list[int]:
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(step)))
