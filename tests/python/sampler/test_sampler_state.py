"""BalancedBatchSampler: passes, and the states from which they go on."""

import itertools

import pytest
import torch
from sampler.samplers import WIDTH, lengths_of, samplers, samples_in, steps_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import knapformer
from knapformer import BalancedBatchSampler, StateError


@pytest.mark.parametrize("num_ranks, batch_size", [(4, 2), (2, 3), (8, 2)])
def test_a_pass_is_resumed_with_any_number_of_ranks(num_ranks, batch_size):
    lengths = lengths_of(528)
    before = samplers(lengths, 4, batch_size=2, micro_batches=2)
    for sampler in before:
        sampler.set_epoch(2)
    taken = [list(itertools.islice(sampler, 7)) for sampler in before]  # three steps, and a half that is lost
    used = samples_in([lists[:6] for lists in taken])
    states = [sampler.state_dict(num_steps=3) for sampler in before]
    assert all(state == states[0] for state in states)

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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_the_data_after_a_resume_is_no_silent_loss(workers):
    sampler = BalancedBatchSampler(lengths_of(96), batch_size=2, d_model=WIDTH, num_replicas=2, rank=0)
    state = {**sampler.state_dict(), "next_sample": 8}
    loader = DataLoader(list(range(96)), batch_sampler=sampler, num_workers=workers)
    sampler.load_state_dict(state)
    first = next(iter(loader))
    for _ in range(2):
        with pytest.raises(StateError, match=r"load_state_dict: its position was taken by a pass that was left before"):
            next(iter(loader))
        sampler.set_epoch(0)
    sampler.load_state_dict(state)
    assert torch.equal(next(iter(loader)), first)
    sampler.set_epoch(1)
    assert len(list(loader)) == len(sampler)
    assert len(list(loader)) == len(sampler)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "state: got seed 1, expected 0"),  # of other data, or a sampler of other settings
        ({"shuffle": 0}, "state: got shuffle 0, expected 1"),
        ({"num_samples": 6}, "state: got num_samples 6, expected 4"),
        ({"next_sample": 5}, "state: got sample 5, expected 0 to 4"),
        ({"next_sample": -1}, "state: got sample -1, expected 0 to 4"),
        ({"next_sample": "2"}, "state: got sample '2', expected an integer, 0 to 4"),
        ({"epoch": None}, "state: got epoch None, expected an integer"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    with pytest.raises(knapformer.ArgumentError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_a_state_that_misses_a_part_is_refused_and_changes_nothing():
    sampler = BalancedBatchSampler([5, 4, 3, 2], batch_size=1, d_model=WIDTH, num_replicas=2, rank=0)
    whole = sampler.state_dict(num_steps=1)
    for name in whole:
        with pytest.raises(knapformer.ArgumentError, match=f"state: got {name.removeprefix('next_')} None, expected"):
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
    assert sampler.state_dict(num_steps=4)["next_sample"] == 16


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_over_a_loader_names_steps_as_methods_take_them(num_workers):
    sampler = BalancedBatchSampler([5, 9] * 12, batch_size=2, d_model=WIDTH, micro_batches=3, num_replicas=1, rank=0)
    loader = DataLoader(list(range(24)), batch_sampler=sampler, num_workers=num_workers, collate_fn=list)
    places = [(step, micro_batch) for step in range(4) for micro_batch in range(3)]
    for first in (0, 2):  # and from a loaded state
        sampler.load_state_dict(sampler.state_dict(num_steps=first))
        found = list(sampler.steps(loader))
        assert [place for *place, _ in found] == [list(place) for place in places[: 3 * (4 - first)]]
        assert all(batch == [i for i, _, _ in sampler.chunks(*place)] for *place, batch in found)
        sampler.set_epoch(first + 1)


def test_a_position_that_leaves_too_few_samples_is_refused_when_it_is_loaded():
    two, four = (BalancedBatchSampler([5] * 8, batch_size=1, d_model=WIDTH, num_replicas=n, rank=0) for n in (2, 4))
    state = two.state_dict(num_steps=3)
    with pytest.raises(knapformer.ArgumentError, match="of which 2 are left for the last step; expected at least 4"):
        four.load_state_dict(state)
    assert len(list(four)) == 2  # from the start


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("change", ["set_epoch", "load_state_dict"])
def test_what_is_set_amid_a_pass_is_for_the_next(change, num_workers):
    """The pass goes on in its order, and the methods speak of it; the next one is as it was set."""
    (sampler,) = samplers(lengths_of(96), 1, batch_size=4, micro_batches=2, seed=3)
    sampler.set_epoch(1)
    of_epoch = {1: list(sampler)}
    sampler.set_epoch(2)
    of_epoch[2] = list(sampler)
    state = sampler.state_dict(num_steps=4)
    sampler.set_epoch(1)
    loader = DataLoader(torch.arange(96), batch_sampler=sampler, num_workers=num_workers)
    taken = []
    for number, batch in enumerate(loader):
        taken.append(batch.tolist())
        if number == 9:
            sampler.set_epoch(2) if change == "set_epoch" else sampler.load_state_dict(state)
        step, micro_batch = divmod(number, 2)
        assert [index for index, _, _ in sampler.chunks(step, micro_batch)] == taken[-1]
        assert sampler.state_dict(num_steps=step)["next_sample"] == step * 8 and sampler.state_dict(step)["epoch"] == 1
    assert taken == of_epoch[1]
    assert list(sampler) == of_epoch[2][8 if change == "load_state_dict" else 0 :]


def test_a_pass_that_was_left_gives_way_to_what_is_set():
    (sampler,) = samplers(lengths_of(96), 1, batch_size=4)
    for _ in sampler:
        break
    sampler.set_epoch(1)
    assert sampler.state_dict() == sampler.state_dict(num_steps=0) and sampler.state_dict()["epoch"] == 1
    totals = [sampler.num_tokens(step) for step in range(len(sampler))]
    assert totals == [int(lengths_of(96)[own].sum()) for own in sampler]


@pytest.mark.filterwarnings("error:num_steps")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("asks", [True, False])
def test_a_state_of_steps_that_workers_fetched_ahead_comes_with_a_warning(num_workers, asks):
    """A worker fetches two lists ahead, a step. Where nothing is asked, the sampler cannot know."""
    (sampler,) = samplers(lengths_of(96), 1, batch_size=4)
    for step, _ in enumerate(DataLoader(torch.arange(96), batch_sampler=sampler, num_workers=num_workers)):
        if asks:
            sampler.num_tokens(step)
        if step == 5:
            if asks and num_workers == 0:
                assert sampler.state_dict() == sampler.state_dict(num_steps=6)
            else:
                with pytest.warns(UserWarning, match="num_steps: got None after"):
                    sampler.state_dict()
            break


@pytest.mark.filterwarnings("error:num_steps")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_a_state_holds_the_position(num_workers):
    """Also where it asks the sampler after each list that workers fetch ahead."""

    def loader():
        (sampler,) = samplers(lengths_of(96), 1, batch_size=4, micro_batches=2)
        return StatefulDataLoader(torch.arange(96), batch_sampler=sampler, num_workers=num_workers)

    whole = [batch.tolist() for batch in loader()]
    interrupted, taken = loader(), []
    for number, batch in enumerate(interrupted):
        interrupted.batch_sampler.num_tokens(number // 2)
        taken.append(batch.tolist())
        if number == 5:
            break
    resumed = loader()
    resumed.load_state_dict(interrupted.state_dict())
    assert taken + [batch.tolist() for batch in resumed] == whole
