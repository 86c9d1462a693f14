"""BalancedBatchSampler: the samples of every optimizer step, and who gets them."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from sampler.samplers import WIDTH, lengths_of, samplers, samples_in, steps_of
from torch.utils.data import DistributedSampler

import knapformer


@pytest.mark.parametrize(
    "num_ranks, batch_size, micro_batches", [(1, 3, 2), (2, 1, 1), (4, 2, 3), (3, 4, 1), (8, 1, 4)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_has_the_samples_of_a_distributed_sampler(num_ranks, batch_size, micro_batches, shuffle):
    lengths = lengths_of(1000)
    options = {"batch_size": batch_size, "micro_batches": micro_batches, "shuffle": shuffle, "seed": 5}
    ranks = samplers(lengths, num_ranks, drop_last=True, **options)
    plain = [
        DistributedSampler(range(1000), num_ranks, rank, shuffle=shuffle, seed=5, drop_last=True)
        for rank in range(num_ranks)
    ]
    for epoch in (0, 3):
        for sampler in ranks + plain:
            sampler.set_epoch(epoch)
        indices = [list(sampler) for sampler in plain]
        own = batch_size * micro_batches
        steps = steps_of(ranks, micro_batches)
        assert len(steps) == 1000 // (own * num_ranks)
        for number, step in enumerate(steps):
            theirs = [i for given in indices for i in given[number * own : (number + 1) * own]]
            assert samples_in(step) == sorted(theirs)
            assert all(len(micro_batch) > 0 for lists in step for micro_batch in lists)
            assert ranks[0].num_samples(number) == len(theirs)
            assert ranks[0].num_tokens(number) == int(lengths[theirs].sum())


def test_every_sample_is_used_once_and_the_last_step_is_balanced_too():
    lengths = lengths_of(1003)
    ranks = samplers(lengths, 4, batch_size=4, micro_batches=2)
    steps = steps_of(ranks, 2)
    assert len(steps) == 32 and len(samples_in(steps[-1])) == 1003 % 32
    assert sorted(itertools.chain.from_iterable(map(samples_in, steps))) == list(range(1003))
    assert ranks[0].step_plan(31).predicted_time < 1.3 * ranks[0].step_plan(31).lower_bound


def test_ranks_get_equal_work():
    lengths = lengths_of(4096)
    ranks = samplers(lengths, 8, batch_size=8, micro_batches=4, gamma=1.0)

    def work(samples: list[int]) -> float:  # of a block, forward: 24 l d^2 + 4 l^2 d
        lens = lengths[samples].double()
        return float((24 * lens * WIDTH**2 + 4 * lens**2 * WIDTH).sum())

    for step in steps_of(ranks, 4):
        slowest = sum(max(work(lists[i]) for lists in step) for i in range(4))
        assert slowest < 1.01 * work(samples_in(step)) / 8


def test_a_sample_longer_than_the_rest_together_is_no_reason_to_share_it():
    lengths = [100_000] + [50] * 63
    steps = steps_of(samplers(lengths, 4, batch_size=4, micro_batches=4), 4)
    assert samples_in(steps[0]) == list(range(64))


def test_work_of_the_formulas_own_values_changes_no_list():
    lengths = lengths_of(200)
    works = [knapformer.WorkloadModel().work(int(length), WIDTH) for length in lengths]
    options = {"batch_size": 3, "micro_batches": 2, "topology": "g2/1n1"}
    plain, given = (samplers(lengths, 2, work=work, **options) for work in (None, works))
    assert [list(sampler) for sampler in given] == [list(sampler) for sampler in plain]
    assert all(given[0].plan(0, k).chunks == plain[0].plan(0, k).chunks for k in range(2))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_work_is_what_ranks_are_balanced_by(micro_batches, tmp_path):
    """As a memory map, and unlike the lengths."""
    lengths = lengths_of(256)
    work = np.memmap(tmp_path / "work", dtype=np.float32, mode="w+", shape=(256,))
    work[:] = 1e11 * lengths_of(256, seed=1).numpy() ** 1.5
    work.flush()
    work = np.memmap(tmp_path / "work", dtype=np.float32, mode="r", shape=(256,))
    ranks = samplers(lengths, 4, batch_size=16, micro_batches=micro_batches, drop_last=True, work=work)
    by_length = samplers(lengths, 4, batch_size=16, micro_batches=micro_batches, drop_last=True)
    worst = []
    for own in (ranks, by_length):
        lists = [of_rank for step in steps_of(own, micro_batches) for of_rank in zip(*step, strict=True)]
        sums = np.array([[work[samples].sum() for samples in of_ranks] for of_ranks in lists])
        worst.append((sums.max(axis=1) / sums.mean(axis=1)).max())
    assert worst[0] < 1.02 < 1.1 < worst[1]


def test_a_limit_of_tokens_is_kept_in_every_micro_batch():
    lengths = lengths_of(512)
    limit = 3 * int(lengths.max())
    for step in steps_of(samplers(lengths, 4, batch_size=4, micro_batches=4, max_tokens_per_rank=limit), 4):
        assert all(int(lengths[micro_batch].sum()) <= limit for lists in step for micro_batch in lists)
    with pytest.raises(knapformer.ArgumentError, match="max_tokens_per_rank"):
        list(samplers(lengths, 4, batch_size=4, micro_batches=4, max_tokens_per_rank=100)[0])


def test_lists_are_empty_only_where_that_is_allowed():
    lengths = lengths_of(70)
    with pytest.raises(knapformer.ArgumentError, match="6 are left for the last step; expected at least 8"):
        samplers(lengths, 4, batch_size=4, micro_batches=2)
    steps = steps_of(samplers(lengths, 4, batch_size=4, micro_batches=2, allow_empty=True), 2)
    assert len(samples_in(steps[-1])) == 6
    assert samples_in(steps[0]) and len(steps) == 3


def test_a_list_that_no_sample_fits_is_an_error_on_all_ranks():
    """Where bags have several sizes, a rank may stay without a sample: the step's samples are all shared by two."""
    lengths = [347, 281, 211, 471, 324, 718, 660, 452, 237, 339, 322, 205, 230, 337, 398, 313, 386, 616, 685, 322]
    lengths += [476, 541, 228, 439]
    options = {"batch_size": 1, "micro_batches": 2, "d_model": 64, "topology": "g2n1+g1n2", "num_replicas": 4}
    for rank in range(4):
        sampler = knapformer.BalancedBatchSampler(lengths, rank=rank, **options)
        with pytest.raises(knapformer.ArgumentError, match=r"topology: got g2n1\+g1n2, by which .* has no sample"):
            list(sampler)
        sampler = knapformer.BalancedBatchSampler(lengths, rank=rank, allow_empty=True, **options)
        assert len(list(sampler)) == len(sampler)


def test_shared_samples_are_the_same_and_each_token_is_on_one_rank():
    lengths = lengths_of(1000)
    lengths[::37] *= 40  # more than a rank's share
    options = {"batch_size": 2, "micro_batches": 2, "seed": 5, "drop_last": True, "cluster": "cpu"}
    whole = samplers(lengths, 8, **options)
    shared = samplers(lengths, 8, topology="g4/2/1n2", **options)
    num_shared = 0
    for number, (step, lists) in enumerate(zip(steps_of(whole, 2), steps_of(shared, 2), strict=True)):
        assert set(samples_in(step)) == set(samples_in(lists))
        for micro_batch in range(2):
            plans = [sampler.plan(number, micro_batch) for sampler in shared]
            assert all(plan == plans[0] for plan in plans)
            pieces = []
            for rank, sampler in enumerate(shared):
                chunks = sampler.chunks(number, micro_batch)
                assert [index for index, _, _ in chunks] == lists[rank][micro_batch]
                assert [end - begin for _, begin, end in chunks] == [
                    n
                    for _, _, n in sorted(
                        (plans[0].degree_of_sequence[s], s, n) for s, r, _, n in plans[0].chunks if r == rank
                    )
                ]
                pieces += chunks
            ends = {}
            for index, begin, end in sorted(pieces):
                assert begin == ends.get(index, 0)
                num_shared += begin > 0
                ends[index] = end
            assert all(end == lengths[index] for index, end in ends.items())
    assert num_shared > 0


def test_what_a_trainer_asks_for_is_the_step_that_it_computes():
    """Also behind the lists that workers fetch ahead, and after more steps than plans are kept."""
    (sampler,) = samplers(lengths_of(320), 1, batch_size=4, micro_batches=2)
    lists = list(sampler)
    assert len(lists) == 80
    for number, own in enumerate(lists):
        assert [index for index, _, _ in sampler.chunks(*divmod(number, 2))] == own
    with pytest.raises(knapformer.ArgumentError, match="micro_batch: got 2, expected 0 to 1"):
        sampler.plan(0, 2)


def test_tokens_that_bear_a_loss_are_counted_over_a_step():
    draw = random.Random(3)
    texts, images = ([draw.randint(1, 50) for _ in range(40)] for _ in range(2))
    lengths = [text + image for text, image in zip(texts, images, strict=True)]
    ranks = samplers(lengths, 2, batch_size=2, micro_batches=2)
    for step in range(5):
        held = [index for rank in ranks for m in range(2) for index, _, _ in rank.chunks(step, m)]
        for counted in (images, torch.tensor(images), np.array(images)):
            assert ranks[0].num_tokens(step, counted) == sum(images[i] for i in held)
        assert ranks[0].num_tokens(step) == sum(lengths[i] for i in held)


@pytest.mark.parametrize("num_lists", [10, 100])
def test_a_loop_that_cannot_know_the_parts_of_samples_is_warned(num_lists):
    """Its model computes shared samples whole on each of their ranks. As a DataLoader fetches ahead, the warning comes
    behind as many lists as may be under way, or as the next pass begins."""

    def sampler(topology):
        lengths = [50] * (2 * num_lists)
        return knapformer.BalancedBatchSampler(
            lengths, batch_size=1, d_model=WIDTH, topology=topology, num_replicas=2, rank=0
        )

    expected = r"topology: got g2n1, whose ranks share .* expected sampler.chunks\(step, micro_batch\) in"
    own = sampler("g2n1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(own))  # a look
        lists = iter(own)
        assert len(list(itertools.islice(lists, 64))) == min(64, num_lists)
        for other in (sampler("g1n2"), sampler("g2n1")):
            for i, _ in enumerate(other):
                other.plan(i, 0)
            assert len(list(other)) == num_lists
    of_totals = sampler("g2n1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_totals.num_tokens(1)  # before the loop
    assert len(list(itertools.islice(of_totals, 2))) == 2
    with pytest.warns(UserWarning, match=expected):
        of_totals.num_tokens(1)  # and of the first step nothing but its total
    with pytest.warns(UserWarning, match=expected):
        next(lists) if num_lists > 64 else list(own)
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        list(lists), list(own)
