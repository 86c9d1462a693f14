"""BalancedBatchSampler: what its arguments may be, and the errors that name those that are wrong."""

from functools import partial

import numpy as np
import pytest
import torch
from sampler.samplers import WIDTH, lengths_of, samplers, steps_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import knapformer
from knapformer import ArgumentError, BalancedBatchSampler


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16"])
def test_lengths_and_work_may_be_of_any_integers(dtype, tmp_path):
    """In memory maps; and in lists."""
    lengths, work = lengths_of(96) % 127 + 1, lengths_of(96, seed=1) % 127 + 1
    mapped = {}
    for name, values in {"lengths": lengths, "work": work}.items():
        np.save(tmp_path / f"{name}.npy", values.numpy().astype(dtype))
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    options = {"batch_size": 3, "micro_batches": 2}
    plain = samplers(lengths.tolist(), 2, work=work.tolist(), **options)
    of_type = samplers(mapped["lengths"], 2, work=mapped["work"], **options)
    assert steps_of(of_type, 2) == steps_of(plain, 2) == steps_of(samplers(lengths, 2, work=work, **options), 2)
    assert [of_type[1].num_tokens(step) for step in range(8)] == [plain[1].num_tokens(step) for step in range(8)]
    assert of_type[1].chunks(3, 1) == plain[1].chunks(3, 1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_values_out_of_range_are_found_in_any_integers(dtype):
    highest = np.iinfo(dtype).max
    bad = [
        ("lengths", 0, "lengths: got 0, expected 1 to 2147483647"),
        ("work", 0, "work: got 0.* expected positive finite"),
    ]
    if highest > 2**31:
        got = -1 if dtype == "uint64" else highest
        bad.append(("lengths", highest, f"lengths: got {got}, expected 1 to 2147483647"))
    for name, value, message in bad:
        values = np.full(64, 5, dtype)
        values[37] = value
        with pytest.raises(knapformer.ArgumentError, match=message):
            samplers(**({"lengths": [5] * 64, "num_ranks": 2, "batch_size": 3} | {name: values}))


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


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_lists_are_not_dealt_once_more(loader, batch_size):
    sampler = BalancedBatchSampler(range(1, 33), batch_size=2, d_model=64)
    data = loader(torch.arange(32), sampler=sampler, batch_size=batch_size)
    if batch_size is None:  # a data set that takes lists
        assert [batch.tolist() for batch in data] == list(sampler)
        return
    with pytest.raises(ArgumentError, match=r"dealt once more by \w+.*sampler, expected it as the .*batch_sampler"):
        next(iter(data))


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_lists_come_in_their_order(loader):
    sampler = BalancedBatchSampler(range(1, 33), batch_size=2, d_model=64, micro_batches=2)
    data = partial(loader, torch.arange(32), batch_sampler=sampler, in_order=False)
    assert [batch.tolist() for batch in data()] == list(sampler)  # without workers
    with pytest.raises(ArgumentError, match=r"in_order: got False, with workers, for a BalancedBatchSampler, .* True"):
        next(iter(data(num_workers=1)))


def test_a_batch_may_be_larger_than_the_data():
    (sampler,) = samplers([5, 4, 3], 1, batch_size=2**70)
    assert [sorted(own) for own in sampler] == [[0, 1, 2]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"rank": 2}, "rank: got 2, expected 0 to 1"),
        ({"rank": None}, "num_replicas, rank: got one of them, expected both or neither"),
        ({"batch_size": "2"}, "batch_size: got '2', expected an integer, at least 1"),
        ({"micro_batches": "auto"}, "micro_batches: got 'auto', expected an integer"),
        ({"seed": None}, "seed: got None, expected an integer"),
        ({"seed": -1}, f"seed: got -1, expected 0 to {2**62}"),
        ({"model": "x"}, "model: got 'x', expected a TrainedModel"),
        ({"topology": "auto"}, "topology: got 'auto', expected .*rank_topologies names the best"),
        ({"lengths": [5, 0]}, "lengths: got 0, expected 1 to 2147483647"),
        ({"lengths": [[5, 4]]}, r"lengths: got torch.int64 of shape \(1, 2\), expected integers"),
        ({"lengths": [5.0, 4.0]}, "lengths: got torch.float32"),
        ({"lengths": [5, 4, 3, 2**31]}, "lengths: got 2147483648, expected 1 to 2147483647"),
        ({"topology": "g3n1"}, "topology: "),
        ({"work": [1.0, 2.0]}, r"work: got torch.float64 of shape \(2,\), expected a number for each of 4 samples"),
        ({"work": torch.ones(4, dtype=torch.bool)}, "work: got torch.bool"),
        ({"work": [1.0, 0.0, 1.0, 1.0]}, "work: got 0.0 to 1.0, expected positive finite numbers"),
        ({"work": [1.0, float("nan"), 1.0, 1.0]}, "work: got nan to nan, expected positive finite numbers"),
        ({"work": [1.0, 1e31, 1.0, 1.0]}, r"work: got 1.0 to 1e\+31, expected .* from 1e-30 to 1e\+30"),
        ({"work": [1.0, None, 1.0, 1.0]}, "work: got what makes no tensor .*, expected numbers"),
        ({"num_replicas": 2**31}, "num_replicas: got 2147483648, more than a topology may have"),
        ({"repeats": 2}, r"repeats: got torch.int64 of shape \(\), expected integers"),
        ({"repeats": [1, 2, 3, -1]}, "repeats: got -1, expected 0 to"),
        ({"repeats": [1, 2, 3, 2**31]}, "repeats: got 2147483648, expected 0 to 2147483647"),
        ({"repeats": [2] * 4, "weights": [1.0] * 4}, "repeats: got some, expected none with weights"),
        ({"weights": [0.0] * 4}, "weights: got 0.0 to 0.0, expected some positive, no negative, finite numbers"),
        ({"weights": [1.0, -1.0, 1.0, 1.0]}, "weights: got -1.0 to 1.0, expected some positive, no negative"),
        ({"weights": [1.0] * 4, "shuffle": False}, "shuffle: got False, expected True with weights"),
        ({"work": [1.0] * 4, "gamma": 0.0}, "gamma: got 0, expected at least"),
    ],
)
def test_bad_arguments_are_named(options, message):
    good = {"lengths": [5, 4, 3, 2], "batch_size": 1, "d_model": WIDTH, "num_replicas": 2, "rank": 0}
    with pytest.raises(knapformer.ArgumentError, match=message):
        BalancedBatchSampler(**(good | options))


def test_a_sampler_or_a_balancer_before_the_process_group_is_refused(monkeypatch):
    """Every rank would get all samples."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(knapformer.ArgumentError, match="WORLD_SIZE=2; expected them, or init_process_group before"):
        BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH)
    assert len(BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)) == 4
    with pytest.raises(knapformer.ArgumentError, match=r"group: got none, .* WORLD_SIZE=2; expected init_pro"):
        knapformer.SequenceBalancer(d_model=WIDTH)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH)) == 8


def test_wrong_arguments_of_methods_are_named():
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    for call, message in (
        (lambda: sampler.state_dict(num_steps=-1), "num_steps: got -1, expected 0 to 2"),
        (lambda: sampler.state_dict(num_steps=3), "num_steps: got 3, expected 0 to 2"),
        (lambda: sampler.set_epoch(-1), "epoch: got -1, expected 0 to"),
        (lambda: sampler.num_tokens(2), "step: got 2, expected 0 to 1"),
        (lambda: sampler.num_tokens(0, [1, 2]), "counted: got 2, expected one for each of 4 samples"),
        (lambda: sampler.num_tokens(0, [-1] * 4), "counted: got -1 for sample ., expected 0 to ., its length"),
        (lambda: sampler.num_tokens(0, [6] * 4), "counted: got 6 for sample ., expected 0 to ., its length"),
        (lambda: sampler.num_tokens(0, np.full(4, 2**64 - 1, np.uint64)), "counted: got -1 for sample"),
        (lambda: sampler.num_tokens(0.0), "step: got 0.0, expected an integer, 0 to 1"),
        (lambda: sampler.plan(0, None), "micro_batch: got None, expected an integer, 0 to 0"),
    ):
        with pytest.raises(knapformer.ArgumentError, match=message):
            call()
    assert len(list(sampler)) == 2


@pytest.mark.parametrize("topology, bag", [(None, 1), ("g2n2", 2), ("g2n1+g1n2", 2), ("g4/2/1n1", 4)])
def test_a_sample_that_no_rank_can_hold_is_refused_at_once(topology, bag):
    lengths = torch.ones(64, dtype=torch.int64)
    lengths[63] = 99
    options = {"batch_size": 4, "micro_batches": 4, "topology": topology, "allow_empty": True}
    fits = -(-99 // bag)
    for own in samplers(lengths, 4, max_tokens_per_rank=fits, **options):
        assert len(list(own)) == 4
    for limit, hint in ((fits - 1, f"; {-(-99 // (fits - 1))} ranks could share it.*" if bag < 4 else ""), (24, "")):
        message = f"max_tokens_per_rank: got {limit}, expected at least {fits}: .*, which has 99 tokens{hint}$"
        with pytest.raises(knapformer.ArgumentError, match=message):
            samplers(lengths, 4, max_tokens_per_rank=limit, **options)
    absent = torch.ones(64)
    absent[63] = 0
    for drawn in ({"weights": absent}, {"repeats": absent.long()}):
        samplers(lengths, 4, max_tokens_per_rank=24, **options, **drawn)
