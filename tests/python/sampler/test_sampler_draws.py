"""BalancedBatchSampler: samples that stand in an epoch several times, and samples that are drawn by weights."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from sampler.samplers import lengths_of, samplers, samples_in, steps_of
from scipy.stats import chisquare
from torch.utils.data import DistributedSampler

REPEATS = torch.arange(60) % 4  # 0 to 3 times
WEIGHTS = (torch.arange(60) % 5).double() / 7


def epoch_of(epoch: int, num_ranks: int = 2, **options) -> list[int]:
    """The samples of an epoch, step by step."""
    ranks = samplers(lengths_of(60), num_ranks, batch_size=3, allow_empty=True, **options)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return list(itertools.chain.from_iterable(map(samples_in, steps_of(ranks, options.get("micro_batches", 1)))))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("repeats", [REPEATS, REPEATS.tolist(), REPEATS.numpy().astype(np.uint16)])
def test_a_sample_stands_in_an_epoch_as_often_as_it_is_repeated(repeats, shuffle):
    """As in a data set that holds it so often: in each step, the samples that a DistributedSampler takes from that."""
    repeated = [index for index, count in enumerate(REPEATS.tolist()) for _ in range(count)]
    options = {"batch_size": 3, "micro_batches": 2, "seed": 5, "shuffle": shuffle, "drop_last": True}
    ranks = samplers(lengths_of(60), 2, repeats=repeats, **options)
    assert len(ranks[0]) == len(repeated) // 12 * 2
    assert Counter(epoch_of(0, repeats=repeats)) == Counter(repeated)
    plain = [DistributedSampler(repeated, 2, rank, shuffle=shuffle, seed=5, drop_last=True) for rank in range(2)]
    for sampler in ranks + plain:
        sampler.set_epoch(2)
    theirs = [[repeated[i] for i in sampler] for sampler in plain]
    for number, step in enumerate(steps_of(ranks, 2)):
        assert samples_in(step) == sorted(i for own in theirs for i in own[6 * number : 6 * number + 6])
        assert ranks[0].num_tokens(number) == int(lengths_of(60)[samples_in(step)].sum())


def test_samples_are_drawn_in_proportion_to_their_weights():
    every = WEIGHTS.repeat(200)
    for weights in (every, every.tolist(), (torch.arange(12_000) % 5).numpy().astype(np.uint16)):
        (sampler,) = samplers([50] * 12_000, 1, batch_size=100, weights=weights)
        drawn = torch.tensor(list(itertools.chain.from_iterable(sampler)))
        assert len(drawn) == 12_000
        counts = np.bincount(drawn % 60, minlength=60)
        expected = (WEIGHTS / WEIGHTS.sum() * 12_000).numpy()
        assert (counts[expected == 0] == 0).all()
        assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 0.01
        assert chisquare(np.bincount(drawn // 6000), [6000.0, 6000.0]).pvalue > 0.01


def test_draws_differ_between_epochs_and_seeds_alone():
    drawn = [
        epoch_of(epoch, num_ranks, weights=WEIGHTS, seed=seed)
        for epoch, seed, num_ranks in ((0, 0, 2), (1, 0, 2), (0, 7, 2), (0, 0, 4))
    ]
    assert all(len(own) == 60 for own in drawn)
    assert Counter(drawn[0]) == Counter(drawn[3]) == Counter(epoch_of(0, weights=WEIGHTS))
    assert len({tuple(sorted(own)) for own in drawn}) == 3


@pytest.mark.parametrize("draw", [{"repeats": REPEATS}, {"weights": WEIGHTS}])
def test_a_pass_is_resumed_in_its_draw(draw):
    options = {"batch_size": 3, "micro_batches": 2, "allow_empty": True} | draw
    whole, before, after = (samplers(lengths_of(60), 2, **options)[1] for _ in range(3))
    for sampler in (whole, before):
        sampler.set_epoch(3)
    taken = list(itertools.islice(before, 5))
    after.load_state_dict(before.state_dict(num_steps=2))
    assert taken[:4] + list(after) == list(whole)
    name = next(iter(draw))
    for other in ({name: draw[name].roll(1)}, {name: None}):
        (differs,) = samplers(lengths_of(60), 1, **(options | other))
        with pytest.raises(ValueError, match=r"state: got (repeats_and_weights|num_samples) .*, expected"):
            differs.load_state_dict(before.state_dict(num_steps=2))
