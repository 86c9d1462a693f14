"""Masks of samples in BalancedBatchSampler: pairs counted by dense masks (tests/python/masks.py)."""

import random

import numpy as np
import pytest
from masks import dense_mask, random_mask
from sampler.samplers import WIDTH, lengths_of, samplers, steps_of

from knapformer import ArgumentError, BalancedBatchSampler

LENGTHS = [40, 7, 64, 5, 9, 30, 300, 12] * 8


def work_of(lengths: list[int], masks: list[str]) -> np.ndarray:
    """Of a block, forward: 24 l d^2, and 4 d for each pair."""
    pairs = np.array([int(dense_mask(mask, n).sum()) for mask, n in zip(masks, lengths, strict=True)])
    return 24.0 * np.array(lengths) * WIDTH**2 + 4.0 * pairs * WIDTH


def test_ranks_have_equal_work_by_exact_pairs():
    lengths = (4 * lengths_of(128)).clamp(max=2048).tolist()
    halves = [f"f{n // 2} f{n - n // 2}@" for n in lengths]
    masks = [random.Random(i).choice(["full", "window:32:0", half, "causal"]) for i, half in enumerate(halves)]
    work, worst = work_of(lengths, masks), []
    for given in (masks, None):
        ranks = samplers(lengths, 4, batch_size=16, micro_batches=2, gamma=1.0, masks=given)
        lists = [of_ranks for step in steps_of(ranks, 2) for of_ranks in zip(*step, strict=True)]
        sums = np.array([[work[samples].sum() for samples in of_ranks] for of_ranks in lists])
        worst.append((sums.max(axis=1) / sums.mean(axis=1)).max())
        planned = [sum(of) for own in ranks[0].step_plan(0).plans for of in [own.workload_after]]
        expected = [sum(work[samples].sum() for samples in of_ranks) for of_ranks in lists]
        assert (planned == pytest.approx(expected, rel=1e-12)) == (given is not None)
    assert worst[0] < 1.02 < 1.05 < worst[1]


@pytest.mark.parametrize("topology", [None, "g2/1n1"])
def test_plans_carry_the_mask_of_each_sample(topology):
    """Also those of a pass that goes on where another one was saved."""
    draw = random.Random(0)
    masks = [random_mask(draw, n) for n in LENGTHS]
    options = {"batch_size": 4, "micro_batches": 2, "topology": topology, "seed": 3}
    first = samplers(LENGTHS, 2, masks=masks, **options)
    resumed = samplers(LENGTHS, 2, masks=np.array(masks), **options)
    for sampler in resumed:
        sampler.load_state_dict(first[0].state_dict(num_steps=2))
    for step in range(len(resumed[0]) // 2):
        for k in range(2):
            plan = resumed[0].plan(step, k)
            assert plan == resumed[1].plan(step, k) == first[0].plan(step + 2, k)
            for rank, sampler in enumerate(resumed):
                ids = [sequence for sequence, _, _ in plan.chunks_on(rank)]
                assert [plan.masks[i] for i in ids] == [masks[index] for index, _, _ in sampler.chunks(step, k)]
    assert first[0].digest == samplers(LENGTHS, 2, masks=np.array(masks), **options)[1].digest


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"masks": ["full"] * 63}, "masks: got 63, expected one for each of 64 samples"),
        ({"masks": "causal"}, "masks: got 'causal', expected a list of texts; mask='causal' is that of all samples"),
        ({"masks": ["full"] * 63 + [3]}, r"masks\[63\]: mask: got 3, expected text"),
        ({"masks": [["full"]] * 64}, r"masks\[0\]: mask: got \['full'\], expected text"),
        ({"masks": ["half"] * 64}, r"masks\[0\]: mask: got 'half', expected 'full', 'causal'"),
        (
            {"masks": ["c40", "c7", "c60", *["full"] * 61]},
            r"masks\[2\]: mask: got 'c60' for a sequence of 64 tokens, expected one of 60 tokens",
        ),
        ({"mask": "c5 f35"}, "mask: got 'c5 f35' for a sequence of 5 tokens, expected one of 40 tokens"),
    ],
)
def test_masks_are_checked_when_the_sampler_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        BalancedBatchSampler(LENGTHS, batch_size=2, d_model=WIDTH, **arguments)
