"""BalancedBatchSampler: the samples of every optimizer step, and who gets them."""

import itertools
import random

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from losses_ranks import SampledStep, alone, run_sampled
from torch.utils.data import DataLoader, DistributedSampler

import knapformer
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


@pytest.mark.parametrize("num_ranks, batch_size", [(4, 2), (2, 3), (8, 2)])
def test_a_pass_is_resumed_with_any_number_of_ranks(num_ranks, batch_size):
    lengths = lengths_of(528)
    before = samplers(lengths, 4, batch_size=2, micro_batches=2)
    for sampler in before:
        sampler.set_epoch(2)
    taken = [list(itertools.islice(sampler, 7)) for sampler in before]  # three steps, and a half that is lost
    used = samples_in([lists[:6] for lists in taken])
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    assert before[0].state_dict(num_steps=3) == states[0]

    after = samplers(lengths, num_ranks, batch_size=batch_size, micro_batches=2)
    for sampler in after:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)
    rest = steps_of(after, 2)
    assert sorted(used + [i for step in rest for i in samples_in(step)]) == list(range(528))
    if num_ranks == 4:
        whole = samplers(lengths, 4, batch_size=2, micro_batches=2)
        for sampler in whole:
            sampler.set_epoch(2)
        assert rest == steps_of(whole, 2)[3:]
    # The pass after it is a whole one.
    assert len(steps_of(after, 2)) == -(-528 // (num_ranks * batch_size * 2))


def test_a_pass_that_ended_starts_anew():
    ranks = samplers(lengths_of(64), 2, batch_size=4, micro_batches=2)
    first = steps_of(ranks, 2)
    assert steps_of(ranks, 2) == first
    for sampler in ranks:
        sampler.set_epoch(1)
    assert steps_of(ranks, 2) != first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_takes_it(num_workers):
    sampler = BalancedBatchSampler(lengths_of(96), batch_size=3, d_model=WIDTH, micro_batches=2, num_replicas=4, rank=1)
    loader = DataLoader(torch.arange(96), batch_sampler=sampler, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == list(sampler)
    assert len(loader) == 8


def test_lengths_may_be_lists_arrays_and_memory_maps(tmp_path):
    lengths = lengths_of(64)
    np.save(tmp_path / "lengths.npy", lengths.numpy().astype(np.int32))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    options = {"batch_size": 2, "d_model": WIDTH, "num_replicas": 2, "rank": 1}
    lists = [
        list(BalancedBatchSampler(given, **options)) for given in (lengths, lengths.tolist(), lengths.numpy(), mapped)
    ]
    assert all(own == lists[0] for own in lists)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16"])
def test_lengths_shapes_and_work_may_be_of_any_integers(dtype, tmp_path):
    """As memory maps hold them: torch cannot do all it can with int64."""
    lengths, work = lengths_of(96) % 127 + 1, lengths_of(96, seed=1) % 127 + 1
    mapped = {}
    for name, values in {"lengths": lengths, "work": work}.items():
        np.save(tmp_path / f"{name}.npy", values.numpy().astype(dtype))
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    options = {"batch_size": 3, "micro_batches": 2}
    for of_sampler in ({"work": True}, {"same_shape": True}):
        same, given = of_sampler | options, of_sampler | options
        if "work" in of_sampler:
            same, given = same | {"work": work}, given | {"work": mapped["work"]}
        else:
            same, given = same | {"shapes": work}, given | {"shapes": mapped["work"]}
        plain, of_type = samplers(lengths, 2, **same), samplers(mapped["lengths"], 2, **given)
        assert steps_of(of_type, 2) == steps_of(plain, 2)
        assert [of_type[1].num_tokens(step) for step in range(8)] == [plain[1].num_tokens(step) for step in range(8)]
        assert of_type[1].chunks(3, 1) == plain[1].chunks(3, 1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_values_out_of_range_are_found_in_any_integers(dtype):
    highest = np.iinfo(dtype).max
    bad = [("lengths", 0, "lengths: got 0, expected at least 1"), ("work", 0, "work: got 0.* expected positive finite")]
    if highest > 2**31:
        bad.append(("lengths", highest, f"lengths: got {highest}, expected at most 2147483647 tokens"))
    for name, value, message in bad:
        values = np.full(64, 5, dtype)
        values[37] = value
        with pytest.raises(knapformer.ArgumentError, match=message):
            samplers(**({"lengths": [5] * 64, "num_ranks": 2, "batch_size": 3} | {name: values}))


def test_the_range_of_a_memory_map_is_found_in_blocks(monkeypatch):
    """Extremes in the first, a middle and the last, shorter block; as wide as a block, a conversion needs no more."""
    from knapformer import sampler

    monkeypatch.setattr(sampler, "_BLOCK", 8)
    for dtype in (np.uint16, np.uint32, np.uint64):
        highest = int(np.iinfo(dtype).max)
        for lowest_at, highest_at in ((0, 20), (20, 0), (9, 10), (15, 16)):
            values = np.full(21, 5, dtype)
            values[lowest_at], values[highest_at] = 1, highest
            assert sampler._range(torch.as_tensor(values)) == (1, highest)
    assert sampler._range(torch.tensor([3.0, 1.5, 2.0])) == (1.5, 3.0)


def test_counts_may_be_of_numpy_and_no_sample_is_a_pass_without_steps():
    plain = samplers(lengths_of(48), 2, batch_size=3, micro_batches=2, seed=7)
    of_numpy = [
        BalancedBatchSampler(
            lengths_of(48), batch_size=np.int64(3), d_model=WIDTH, micro_batches=np.uint8(2), num_replicas=np.int32(2),
            rank=np.int64(rank), seed=np.uint64(7),
        )
        for rank in range(2)
    ]  # fmt: skip
    for sampler in plain + of_numpy:
        sampler.set_epoch(np.int64(1))
    assert steps_of(of_numpy, 2) == steps_of(plain, 2)
    assert of_numpy[0].num_tokens(np.int64(1)) == plain[0].num_tokens(1)
    state = of_numpy[0].state_dict(num_steps=np.int64(2))
    assert state == plain[0].state_dict(num_steps=2) and {type(value) for value in state.values()} == {int}
    for nothing in ([], (), torch.empty(0, dtype=torch.int32), np.empty(0, np.uint16)):
        (empty,) = samplers(nothing, 1, batch_size=4)
        assert list(empty) == [] and len(empty) == 0


def test_a_batch_may_be_larger_than_the_data():
    (sampler,) = samplers([5, 4, 3], 1, batch_size=2**70)
    assert [sorted(own) for own in sampler] == [[0, 1, 2]]


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
    lengths = [252, 675, 399, 274, 401, 327, 212, 291, 510, 380, 645, 624, 719, 437, 448, 701, 535, 413, 681, 297]
    lengths += [518, 517, 462, 361]
    options = {"batch_size": 1, "micro_batches": 2, "d_model": 64, "topology": "g2n1+g1n2", "num_replicas": 4}
    for rank in range(4):
        sampler = knapformer.BalancedBatchSampler(lengths, rank=rank, **options)
        with pytest.raises(knapformer.ArgumentError, match=r"topology: got g2n1\+g1n2, by which .* has no sample"):
            list(sampler)
        sampler = knapformer.BalancedBatchSampler(lengths, rank=rank, allow_empty=True, **options)
        assert len(list(sampler)) == len(sampler)


def test_a_pass_goes_on_after_a_look_at_the_data():
    def resumed():
        sampler = knapformer.BalancedBatchSampler(lengths_of(96), batch_size=2, d_model=64, num_replicas=2, rank=0)
        sampler.load_state_dict({**sampler.state_dict(), "next_sample": 8})
        return sampler

    sampler = resumed()
    undisturbed = list(sampler)
    sampler = resumed()
    lists = []
    for number, indices in enumerate(sampler):
        lists.append(indices)
        assert [index for index, _, _ in sampler.chunks(number, 0)] == indices
        assert sampler.state_dict() == sampler.state_dict(num_steps=number + 1)
        if number == 1:
            next(iter(sampler))
    assert lists == undisturbed


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


def test_samples_of_a_shape_are_adjacent_and_few_lists_have_it():
    generator = torch.Generator().manual_seed(3)
    shapes = torch.randint(0, 12, (960,), generator=generator)
    image, text = 64 * 2 ** (shapes // 3), torch.randint(0, 9, (960,), generator=generator)  # three shapes of a size
    ranks = samplers(image + text, 4, batch_size=6, micro_batches=2, same_shape=True, shapes=shapes, gamma=1.0)
    plain = samplers(image + text, 4, batch_size=6, micro_batches=2)

    def num_groups(step) -> int:
        return sum(len(set(shapes[own].tolist())) for lists in step for own in lists)

    def work(own: list[int]) -> float:  # of a block, forward, stacked
        lens = torch.tensor([64 * 2 ** (int(shapes[i]) // 3) + 8 for i in own]).double()
        return float((24 * lens * WIDTH**2 + 4 * lens**2 * WIDTH).sum())

    fewer = 0
    for number, (step, other) in enumerate(zip(steps_of(ranks, 2), steps_of(plain, 2), strict=True)):
        assert samples_in(step) == samples_in(other)
        for lists, sampler in zip(step, ranks, strict=True):
            for micro_batch, own in enumerate(lists):
                groups = sampler.groups(number, micro_batch)
                assert [i for group in groups for i in group] == own
                assert all(len(set(shapes[group].tolist())) == 1 for group in groups)
                assert len({int(shapes[group[0]]) for group in groups}) == len(groups)
        slowest = sum(max(work(lists[i]) for lists in step) for i in range(2))
        assert slowest < 1.15 * work(samples_in(step)) / 4
        fewer += num_groups(other) - num_groups(step)
    assert fewer > 0


def test_shapes_of_one_length_trade_places():
    """Of equal lengths all may: S shapes on L lists are at most S + L - 1 groups."""
    shapes = torch.arange(96) % 7
    ranks = samplers([50] * 96, 4, batch_size=6, micro_batches=2, same_shape=True, shapes=shapes)
    for number, step in enumerate(steps_of(ranks, 2)):
        groups = [sampler.groups(number, k) for sampler in ranks for k in range(2)]
        assert sum(map(len, groups)) <= 7 + 8 - 1
        assert sorted(i for own in groups for group in own for i in group) == samples_in(step)
    with pytest.raises(knapformer.ArgumentError, match="same_shape: got False"):
        samplers([50] * 96, 4, batch_size=6)[0].groups(0, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"micro_batches": 0}, "micro_batches: got 0, expected at least 1"),
        ({"rank": 2}, "rank: got 2, expected 0 to 1"),
        ({"rank": None}, "num_replicas, rank: got one of them, expected both or neither"),
        ({"batch_size": "2"}, "batch_size: got '2', expected an integer, at least 1"),
        ({"batch_size": 2.0}, "batch_size: got 2.0, expected an integer"),
        ({"batch_size": 2.5}, "batch_size: got 2.5, expected an integer"),
        ({"batch_size": None}, "batch_size: got None, expected an integer"),
        ({"micro_batches": "auto"}, "micro_batches: got 'auto', expected an integer"),
        ({"num_replicas": 2.0}, "num_replicas: got 2.0, expected an integer"),
        ({"rank": 0.0}, "rank: got 0.0, expected an integer, 0 to 1"),
        ({"seed": None}, "seed: got None, expected an integer"),
        ({"seed": 1.5}, "seed: got 1.5, expected an integer"),
        ({"seed": 2**64}, f"seed: got {2**64}, expected {-(2**63)} to {2**64 - 1}"),
        ({"model": "x"}, "model: got 'x', expected a TrainedModel"),
        ({"topology": "auto"}, "topology: got 'auto', expected .*rank_topologies.*doctor --topologies"),
        ({"lengths": torch.ones(4, dtype=torch.bool)}, "lengths: got torch.bool"),
        ({"lengths": [5, 0]}, "lengths: got 0, expected at least 1"),
        ({"lengths": [[5, 4]]}, r"lengths: got torch.int64 of shape \(1, 2\), expected integers"),
        ({"lengths": [5.0, 4.0]}, "lengths: got torch.float32"),
        ({"lengths": [5, 4, 3, 2**31]}, "lengths: got 2147483648, expected at most 2147483647 tokens"),
        ({"lengths": ["5"] * 4}, "lengths: got what makes no tensor .*, expected numbers"),
        ({"shapes": [1, 2, 3, 3]}, "shapes: got some, expected none without same_shape=True"),
        ({"shapes": [1, 2], "same_shape": True}, "shapes: got 2, expected one for each of 4"),
        ({"shapes": [1.5] * 4, "same_shape": True}, "shapes: got torch.float32"),
        ({"topology": "g2n1", "same_shape": True}, "topology: got 'g2n1', expected none with same_shape=True"),
        ({"topology": "g3n1"}, "topology: "),
        ({"work": [1.0, 2.0]}, r"work: got torch.float64 of shape \(2,\), expected a number for each of 4 samples"),
        ({"work": torch.ones(4, dtype=torch.bool)}, "work: got torch.bool"),
        ({"work": [1.0, 0.0, 1.0, 1.0]}, "work: got 0.0 to 1.0, expected positive finite numbers"),
        ({"work": [1.0, float("inf"), 1.0, 1.0]}, "work: got 1.0 to inf, expected positive finite numbers"),
        ({"work": [1.0, float("nan"), 1.0, 1.0]}, "work: got nan to nan, expected positive finite numbers"),
        ({"work": [1.0, 1e31, 1.0, 1.0]}, r"work: got 1.0 to 1e\+31, expected .* from 1e-30 to 1e\+30"),
        ({"work": [1.0, 1e-31, 1.0, 1.0]}, "work: got 1e-31 to 1.0, expected positive finite numbers"),
        ({"work": [1.0, None, 1.0, 1.0]}, "work: got what makes no tensor .*, expected numbers"),
        ({"work": [1.0] * 4, "same_shape": True}, "work: got some, expected none with same_shape=True"),
        ({"work": [1.0] * 4, "gamma": 0.0}, "gamma: got 0, expected at least"),
    ],
)
def test_bad_arguments_are_named(options, message):
    good = {"lengths": [5, 4, 3, 2], "batch_size": 1, "d_model": WIDTH, "num_replicas": 2, "rank": 0}
    with pytest.raises(knapformer.ArgumentError, match=message):
        BalancedBatchSampler(**(good | options))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 4, 3, 2], {"seed": 1}, "state: got seed 1, expected 0"),
        ([5, 4, 3, 2], {"shuffle": False}, "state: got shuffle 0, expected 1"),
        ([5, 4, 3, 2, 9, 7], {}, "state: got num_samples 6, expected 4"),
    ],
)
def test_a_state_of_other_data_is_refused(lengths, options, message):
    def sampler(lengths, **options):
        return BalancedBatchSampler(lengths, batch_size=1, d_model=WIDTH, num_replicas=2, rank=0, **options)

    with pytest.raises(knapformer.ArgumentError, match=message):
        sampler([5, 4, 3, 2]).load_state_dict(sampler(lengths, **options).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_sample": 5}, "state: got sample 5, expected 0 to 4"),
        ({"seed": None}, "state: got seed None, expected 0"),
        ({"next_sample": -1}, "state: got sample -1, expected 0 to 4"),
        ({"next_sample": "2"}, "state: got sample '2', expected an integer, 0 to 4"),
        ({"next_sample": None}, "state: got sample None, expected an integer, 0 to 4"),
        ({"epoch": None}, "state: got epoch None, expected an integer"),
        ({"epoch": 2**64}, "state: got epoch 18446744073709551616, expected"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    with pytest.raises(knapformer.ArgumentError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_a_state_that_misses_a_part_is_refused_and_changes_nothing():
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    whole = sampler.state_dict(num_steps=1)
    for name in whole:
        with pytest.raises(knapformer.ArgumentError, match=f"state: got (no {name}|{name} None), expected"):
            sampler.load_state_dict({key: value for key, value in whole.items() if key != name})
    with pytest.raises(knapformer.ArgumentError, match="state: got list, expected a dict"):
        sampler.load_state_dict([whole])
    assert len(list(sampler)) == 2  # from the start
    sampler.load_state_dict(whole)
    assert len(list(sampler)) == 1


def test_steps_are_counted_from_where_the_pass_began():
    """A trainer that counts them from the epoch's start would lose samples in its second resume."""
    sampler = BalancedBatchSampler([5] * 24, batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    sampler.load_state_dict(sampler.state_dict(num_steps=4))  # before a pass: those that it is to leave out
    assert len(list(itertools.islice(sampler, 4))) == 4
    with pytest.raises(knapformer.ArgumentError, match="num_steps: got 8, expected 0 to 4"):
        sampler.state_dict(num_steps=8)
    assert sampler.state_dict(num_steps=4) == sampler.state_dict() and sampler.state_dict()["next_sample"] == 16


def test_a_position_that_leaves_too_few_samples_is_refused_when_it_is_loaded():
    two, four = (BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH, num_replicas=n, rank=0) for n in (2, 4))
    state = two.state_dict(num_steps=3)
    with pytest.raises(knapformer.ArgumentError, match="of which 2 are left for the last step; expected at least 4"):
        four.load_state_dict(state)
    assert len(list(four)) == 2  # from the start


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


def test_a_sampler_before_the_process_group_is_refused(monkeypatch):
    """Every rank would get all samples."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(knapformer.ArgumentError, match="WORLD_SIZE=2; expected them, or init_process_group before"):
        BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH)
    assert len(BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)) == 4
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH)) == 8


def test_wrong_arguments_of_methods_are_named():
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0, seed=2**64 - 1)
    for call, message in (
        (lambda: sampler.state_dict(num_steps=-1), "num_steps: got -1, expected 0 to 2"),
        (lambda: sampler.state_dict(num_steps=3), "num_steps: got 3, expected 0 to 2"),
        (lambda: sampler.state_dict(num_steps=1.5), "num_steps: got 1.5, expected an integer"),
        (lambda: sampler.set_epoch("1"), "epoch: got '1', expected an integer"),
        (lambda: sampler.set_epoch(1), "epoch: got 1, expected .* to 0"),
        (lambda: sampler.num_tokens(2), "step: got 2, expected 0 to 1"),
        (lambda: sampler.num_tokens(0, [1, 2]), "counted: got 2, expected one for each of 4 samples"),
        (lambda: sampler.num_tokens(0, [0.5] * 4), "counted: got torch.float32"),
        (lambda: sampler.num_tokens(0.0), "step: got 0.0, expected an integer, 0 to 1"),
        (lambda: sampler.plan(0, None), "micro_batch: got None, expected an integer, 0 to 0"),
    ):
        with pytest.raises(knapformer.ArgumentError, match=message):
            call()
    assert len(list(sampler)) == 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_gradients_under_ddp_and_fsdp_are_those_of_one_process(num_ranks):
    """Lists are empty where there are more of them than samples."""
    lengths = (13, 1, 40, 5, 5, 2, 3, 7, 21, 9, 60, 4, 4, 8, 1, 30, 2, 6, 11, 17, 25, 3, 19)
    cases = [
        SampledStep(mean, wrapper, micro_batches, sync, lengths)
        for mean, wrapper, sync in (("token", "ddp", "step"), ("sample", "fsdp", "micro_batch"))
        for micro_batches in (1, 3, 8)
    ]
    wanted = {mean: alone(mean, ((lengths,),))[0][1] for mean in ("token", "sample")}
    for of_rank in run_ranks(run_sampled, num_ranks, cases):
        for case, gradients in zip(cases, of_rank, strict=True):
            for name, gradient in wanted[case.mean].items():
                error = (gradients[name] - gradient).norm() / gradient.norm()
                assert error <= 1e-10, (case, name)


def test_the_gradient_of_a_step_is_that_of_one_process():
    """Ranks that hold no collective can be run one after the other, into the same gradients."""
    from knapformer.losses import token_mean

    lengths = lengths_of(48) // 16
    weights = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(int(length), 8, dtype=torch.float64, generator=generator) for length in lengths]

    def per_token(model: torch.Tensor, samples: list[int]) -> torch.Tensor:
        mixed = [torch.softmax(x @ x.T, dim=-1) @ x @ model for x in (data[i] for i in samples)]
        return torch.cat(mixed).square().sum(dim=-1)

    ranks = samplers(lengths, 4, batch_size=3, micro_batches=4)
    (step,) = steps_of(ranks, 4)
    balanced = weights.clone().requires_grad_()
    for lists in step:
        for samples in lists:
            loss = token_mean(per_token(balanced, samples), total=ranks[0].num_tokens(0), gradient_reduction="sum")
            loss.backward()
    plain = weights.clone().requires_grad_()
    per_token(plain, samples_in(step)).mean().backward()
    torch.testing.assert_close(balanced.grad, plain.grad, rtol=1e-12, atol=0)
