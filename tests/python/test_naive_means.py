"""What averaging the means of planned lists costs, as docs/training.md says: why losses are weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from knapformer import BalancedBatchSampler, DataMix


def test_means_of_lists_have_another_gradient() -> None:
    lengths = [length for lens in DataMix.parse("mixed").draw_lengths(0, 0, 64) for length in lens]  # 224 samples
    draw = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:  # what is to be learned differs with the length, as between pictures of several sizes
        x = torch.randn(length // 64 + 1, 8, generator=draw, dtype=torch.float64)
        data.append((x, x.sum(1) * length**-0.25))
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)

    def per_token(samples: Sequence[int]) -> Tensor:
        return torch.cat([(x @ weight - y).square() for x, y in (data[i] for i in samples)])

    def per_sample(samples: Sequence[int]) -> Tensor:
        return torch.stack([per_token([i]).mean() for i in samples])

    def error_of(lists: list[list[int]], per: Callable[[Sequence[int]], Tensor]) -> float:
        """Of the gradient of the mean of each list's mean, against that of the mean over all."""
        naive, right = torch.stack([per(samples).mean() for samples in lists]).mean(), per(range(224)).mean()
        (naive,), (right,) = (torch.autograd.grad(loss, weight) for loss in (naive, right))
        return float((naive - right).norm() / right.norm())

    drawn = torch.randperm(224, generator=draw).view(32, 7).tolist()  # 7 samples a list, as they come
    planned = []
    for rank in range(8):
        planned += list(
            BalancedBatchSampler(lengths, batch_size=7, d_model=3072, micro_batches=4, num_replicas=8, rank=rank)
        )
    assert round(error_of(drawn, per_token), 2) == 0.12 and round(error_of(planned, per_token), 3) == 0.052
    assert error_of(drawn, per_sample) < 1e-14 and round(error_of(planned, per_sample), 3) == 0.03
