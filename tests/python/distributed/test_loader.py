"""BalancedLoader on real ranks. Oracles: the plan of `knapformer.plan`, and each rank's own list of batches."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import Listed, Outcome, failing_after, of_all_ranks, outcome_of, run_checks
from knapformer._torch import Samples
from ranks import GROUP_TIMEOUT_S, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

import knapformer
from knapformer import ArgumentError, BalancedLoader, Plan, SequenceBalancer, StateError

D_MODEL = 8
TOPOLOGY = "g2n1"


@dataclass(frozen=True)
class Tokens:
    """Packed sequences whose tokens are numbered, so that none can be lost or swapped."""

    ids: Tensor
    seq_lens: list[int]


def make_batches(rank: int, count: int, seed: int = 0) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    batches = []
    for number in range(count):
        # Now and then a batch without sequences, and one with more than any before.
        num_sequences = [3, 0, 1, 100][number % 4]
        lens = torch.randint(1, 9, (num_sequences,), generator=generator).tolist()
        first = 1_000_000 * rank + 10_000 * number
        batches.append(Tokens(torch.arange(first, first + sum(lens)), lens))
    return batches


def empty() -> Tokens:
    return Tokens(torch.arange(0), [])


lens_of = attrgetter("seq_lens")


def loader_of(batches: Any, balancer: SequenceBalancer | None = None, **options: Any) -> BalancedLoader[Tokens]:
    """On a balancer of its own, if none is given."""
    balancer = balancer or SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    return BalancedLoader(batches, balancer, **({"seq_lens": lens_of, "empty": empty} | options))


def travel(balancer: SequenceBalancer, batch: Tokens) -> None:
    """The plan in force is this batch's: its tokens go where it says, and come back."""
    _, ids, _ = balancer.route(batch.ids)
    rank = balancer.rank
    assert ids.shape[0] == sum(n for _, r, _, n in balancer.plan.chunks if r == rank)
    seq_lens, ids = balancer.reverse_route(ids)
    assert seq_lens.tolist() == batch.seq_lens and torch.equal(ids, batch.ids)


def same(a: Tokens, b: Tokens) -> bool:
    return a.seq_lens == b.seq_lens and torch.equal(a.ids, b.ids)


def check_uneven_numbers_of_batches(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    for counts in ([3, 6], [5, 0], [0, 0], [2, 2]):
        own = make_batches(rank, counts[rank])
        loader = loader_of(own, balancer)
        for _ in range(2):  # passes
            steps = 0
            for number, (batch, plan) in enumerate(loader):
                assert same(batch, own[number] if number < len(own) else empty())
                expected = knapformer.plan(of_all_ranks(batch.seq_lens), topology=TOPOLOGY, d_model=D_MODEL)
                assert plan == expected == balancer.plan
                travel(balancer, batch)
                steps += 1
            assert steps == max(counts)


class Recording(SequenceBalancer):
    """Keeps what was started."""

    def start_planning(self, *args: Any, **kwargs: Any) -> Any:
        self.ahead = super().start_planning(*args, **kwargs)
        return self.ahead


def check_masks_and_work(rank: int, world_size: int) -> None:
    """Of each batch's sequences, what the functions say of it. Masks are rank 0's alone: long sequences are causal,
    short ones full; those of the other rank are as the balancer's mask says."""
    balancer = SequenceBalancer(TOPOLOGY, mask="window:2:2", d_model=D_MODEL)

    def masks_of(lens: list[int]) -> list[str]:
        return ["causal" if length > 4 else "full" for length in lens]

    def work_of(lens: list[int]) -> list[float]:
        return [1e6 * (length % 5 + 1) for length in lens]

    masks = (lambda batch: masks_of(batch.seq_lens)) if rank == 0 else None
    for work in (None, lambda batch: work_of(batch.seq_lens)):
        loader = loader_of(make_batches(rank, 4), balancer, masks=masks, work=work)
        for batch, of_loader in loader:
            lens = of_all_ranks(batch.seq_lens)
            names = [masks_of(lens[0]), ["window:2:2"] * len(lens[1])] if lens[0] else "window:2:2"
            works = None if work is None else list(map(work_of, lens))
            assert of_loader == knapformer.plan(lens, TOPOLOGY, d_model=D_MODEL, masks=names, work=works)


def check_planning_overlaps(rank: int, world_size: int) -> None:
    """The next step's plan is made inside this step, with no help of this thread; and its gather is the first of the
    step's collectives, so that it waits for none of them."""
    balancer = Recording(TOPOLOGY, d_model=D_MODEL)
    own = make_batches(rank, 6)
    ready = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number, (batch, _) in enumerate(loader_of(own[:2] * 3, balancer)):
            with torch.profiler.record_function(f"step {number}"):
                travel(balancer, batch)
                deadline = time.monotonic() + 20
                while not balancer.ahead.ready and time.monotonic() < deadline:
                    time.sleep(0.001)
                ready.append(balancer.ahead.ready)
    assert ready == [True] * 6
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    order = [name for name in names if name.startswith(("c10d::", "step "))]
    expected = ["c10d::_allgather_base_"]
    for number in range(6):  # each step's gather was started before it began
        expected += ["c10d::_allgather_base_", f"step {number}", "c10d::alltoall_base_", "c10d::alltoall_base_"]
    assert order == expected


def check_other_plans_between(rank: int, world_size: int) -> None:
    """An evaluation inside the loop, a loop that is left early, and a plan that is taken up again."""
    balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    own, others = make_batches(rank, 4), make_batches(rank, 4, seed=1)
    loader = loader_of(own, balancer)
    used = []
    for number, (batch, plan) in enumerate(loader):
        travel(balancer, batch)
        balancer.plan_routing(others[number].seq_lens, D_MODEL)
        travel(balancer, others[number])
        assert balancer.plan != plan or plan.num_sequences == 0
        used.append(batch)
    assert all(map(same, used, own))
    for _ in loader:
        break
    assert [same(batch, mine) for (batch, _), mine in zip(loader, own, strict=True)] == [True] * 4

    first = balancer.start_planning(own[0].seq_lens, D_MODEL)
    second = balancer.start_planning(own[3].seq_lens, D_MODEL)
    with pytest.raises(StateError, match="finish_planning: has not been called"):
        _ = second.num_ended
    for ahead, batch in ((second, own[3]), (first, own[0]), (second, own[3])):
        balancer.finish_planning(ahead)
        travel(balancer, batch)


class Countable:
    """An iterable with a state, which is handed out as it is and goes on changing."""

    def __init__(self, batches: list[Tokens]) -> None:
        self.batches = batches
        self.state = {"used": [0]}
        self.num_skipped = 0

    def __iter__(self) -> Iterator[Tokens]:
        if self.state["used"][0] == len(self.batches):
            self.state = {"used": [0]}
        while self.state["used"][0] < len(self.batches):
            self.state["used"][0] += 1
            yield self.batches[self.state["used"][0] - 1]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def shuffled(batches: list[Tokens]) -> DataLoader[Tokens]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Listed(batches), batch_size=None, shuffle=bool(batches), generator=generator)


def stateful(batches: list[Tokens]) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(7)
    return StatefulDataLoader(Listed(batches), batch_size=None, shuffle=bool(batches), generator=generator)


def check_resume(rank: int, world_size: int, make: Callable[[list[Tokens]], Any], stops: list[int]) -> None:
    counts = [6, 4]
    balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    own = make_batches(rank, counts[rank])
    whole = list(loader_of(make(own), balancer))
    assert len(whole) == 6
    for stop in stops:
        loader = loader_of(make(own), balancer)
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
            if len(states) == stop + 1:
                break
        resumed = loader_of(make(own), balancer)
        resumed.load_state_dict(states[stop])
        assert resumed.state_dict() == states[stop]
        rest = list(resumed)
        assert len(rest) == 6 - stop, (stop, len(rest))
        for (batch, plan), (expected_batch, expected_plan) in zip(rest, whole[stop:], strict=True):
            assert same(batch, expected_batch) and plan == expected_plan, stop
        assert len(list(resumed)) == 6, "the pass after it is whole again"


def check_resume_of_every_kind(rank: int, world_size: int) -> None:
    check_resume(rank, world_size, lambda batches: batches, list(range(7)))
    check_resume(rank, world_size, Countable, list(range(6)))
    check_resume(rank, world_size, shuffled, [2, 5])
    check_resume(rank, world_size, stateful, [0, 1, 3, 4, 5])


def check_a_look_at_the_first_batch_is_no_pass(rank: int, world_size: int) -> None:
    """Without a word, the pass after it would begin at the start again."""
    loader = loader_of(make_batches(rank, 4))
    assert len([loader.state_dict() for _ in range(2) for _ in itertools.islice(loader, 1)]) == 2  # nothing was loaded
    state, whole = loader.state_dict(), list(loader)
    loader.load_state_dict(state)
    next(iter(loader))
    with pytest.raises(
        StateError, match="load_state_dict: its position was taken by a pass that was left at its first"
    ):
        next(iter(loader))
    loader.load_state_dict(state)
    rest = list(itertools.islice(loader, 2))
    assert all(same(a[0], b[0]) for a, b in zip(rest, whole[1:], strict=False))
    assert len(list(loader)) == 4


def check_lengths_that_are_read_once(rank: int, world_size: int) -> None:
    own = make_batches(rank, 2)
    loader = loader_of(own, seq_lens=lambda batch: map(int, batch.seq_lens))
    assert [plan.num_sequences for _, plan in loader] == [sum(map(len, of_all_ranks(of.seq_lens))) for of in own]


def check_wrong_states(rank: int, world_size: int) -> None:
    balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    loader = loader_of([empty()], balancer)
    with pytest.raises(ArgumentError, match=r"state: got that of rank_7_of_8, expected rank_\d_of_2"):
        loader.load_state_dict({"rank_7_of_8": {}})
    key = f"rank_{rank}_of_2"
    with pytest.raises(ArgumentError, match="state: got a state of the wrapped loader, expected none"):
        loader.load_state_dict({key: {"num_batches": 1, "loader": {}}})
    with pytest.raises(ArgumentError, match="state: got no state of the wrapped loader, expected one"):
        loader_of(Countable([]), balancer).load_state_dict({key: {"num_batches": 1}})


def check_state_through_distributed_checkpoint(rank: int, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
        for number, make in enumerate((list, Countable, stateful)):
            own = make_batches(rank, 4 - rank)
            loader = loader_of(make(own), balancer)
            rest: list[tuple[Tokens, Plan]] = []
            path = Path(folders[0]) / str(number)
            for step, pair in enumerate(loader):
                if step == 1:
                    dcp.save({"loader": loader}, checkpoint_id=path)
                elif step > 1:
                    rest.append(pair)
            resumed = loader_of(make(own), balancer)
            dcp.load({"loader": resumed}, checkpoint_id=path)
            again = list(resumed)
            assert len(again) == len(rest) == 2
            assert all(same(a[0], b[0]) and a[1] == b[1] for a, b in zip(again, rest, strict=True))
        dist.barrier()


CHECKS = [
    check_uneven_numbers_of_batches,
    check_masks_and_work,
    check_planning_overlaps,
    check_other_plans_between,
    check_resume_of_every_kind,
    check_a_look_at_the_first_batch_is_no_pass,
    check_lengths_that_are_read_once,
    check_wrong_states,
    check_state_through_distributed_checkpoint,
]


def resumed_beyond(rank: int, world_size: int) -> Outcome:
    """Rank 1's data are shorter than the position that it goes on from."""
    loader = loader_of(make_batches(rank, 4 - 2 * rank))
    loader.load_state_dict({f"rank_{rank}_of_2": {"num_batches": 3, "ended": False}})
    return outcome_of(loader)


def resumed_alone(rank: int, world_size: int) -> Outcome:
    """Rank 0 goes on from a state, rank 1 begins anew."""
    loader = loader_of(make_batches(rank, 4))
    for _ in itertools.islice(loader, 2):
        state = loader.state_dict()
    dist.barrier()
    loader = loader_of(make_batches(rank, 4))
    if rank == 0:
        loader.load_state_dict(state)
    return outcome_of(loader)


def test_a_state_that_one_rank_alone_has_loaded_is_an_error_on_all() -> None:
    for kind, words, steps, _ in run_ranks(resumed_alone, 2):
        assert (kind, steps) == ("StateError", 0), words
        assert "got start_planning on rank 1, expected plan_routing, as on rank 0" in words


def test_a_position_beyond_the_data_is_an_error_on_all_ranks() -> None:
    words = "load_state_dict: got a position after 3 batches, expected at most 2"
    for kind, said, steps, _ in run_ranks(resumed_beyond, 2):
        assert (kind, steps) == ("StateError", 0) and words in said, said


def test_loader_on_real_ranks() -> None:
    pytest.importorskip("torchdata")
    run_checks(CHECKS, 2)


def bad_lens(batch: Tokens) -> list[int]:
    if len(batch.seq_lens) == 1:
        raise KeyError("height")
    return batch.seq_lens


def fail(rank: int, world_size: int) -> list[Outcome]:
    """What each rank raises, after how many steps, where rank 1's data goes wrong."""
    outcomes = []
    own = make_batches(rank, 4)
    broken = ValueError("picture 17 is truncated")
    loaders: list[Callable[[SequenceBalancer], BalancedLoader[Tokens]]] = [
        lambda balancer: loader_of(failing_after(own[:2], broken), balancer),
        lambda balancer: loader_of(failing_after([], broken), balancer),
        lambda balancer: loader_of(3, balancer),
        lambda balancer: loader_of(own, balancer, seq_lens=bad_lens),
        lambda balancer: loader_of(own[:2], balancer, empty=lambda: own[7]),
        lambda balancer: loader_of([Tokens(torch.arange(1), [-1])], balancer),
    ]
    for make in loaders:
        balancer = SequenceBalancer(TOPOLOGY, group=dist.new_group([0, 1]), d_model=D_MODEL)
        dist.barrier()  # a rank that were still making its balancer would hear of the mistake there
        loader = make(balancer) if rank == 1 else loader_of(own, balancer)
        steps = ((travel(balancer, batch), time.sleep(0.3)) for batch, _ in loader)  # time to look who has failed
        outcomes.append(outcome_of(steps))
    return outcomes


def test_an_error_of_the_data_is_one_on_all_ranks() -> None:
    of_others, of_own = run_ranks(fail, 2, timeout_s=120)
    # what rank 1 raises, what rank 0's message holds, steps that were made before
    expected = [
        ("ValueError", "rank 1: data: ValueError: picture 17 is truncated", 2),
        ("ValueError", "rank 1: data: ValueError: picture 17 is truncated", 0),
        ("TypeError", "rank 1: data: TypeError: 'int' object is not iterable", 0),
        ("KeyError", "rank 1: data: KeyError: 'height'", 2),
        ("IndexError", "rank 1: data: IndexError: list index out of range", 2),
        ("ArgumentError", "rank 1: seq_lens: got -1 for sequence 0", 0),
    ]
    for own, other, (kind, words, steps) in zip(of_own, of_others, expected, strict=True):
        assert own[0] == kind and own[2] == steps, (own, kind, steps)
        assert other[0] in ("StateError", "ArgumentError") and words in other[1] and other[2] == steps, (other, words)
        assert max(own[3], other[3]) < GROUP_TIMEOUT_S / 2


def leave(rank: int, world_size: int) -> float:
    """Rank 1 never comes to the gather of the next step: what rank 0 has started ends with its handle."""
    balancer = SequenceBalancer(TOPOLOGY, d_model=D_MODEL)
    for _ in range(2):  # calls that repeat need no word from the others
        balancer.finish_planning(balancer.start_planning([3], D_MODEL))
    if rank == 1:
        return 0.0
    ahead = balancer.start_planning([3], D_MODEL)
    assert not ahead.ready
    begin = time.monotonic()
    del ahead
    return time.monotonic() - begin


def test_what_was_started_in_vain_ends_soon() -> None:
    assert run_ranks(leave, 2, timeout_s=120)[0] < GROUP_TIMEOUT_S / 2


def test_a_plan_ahead_goes_to_the_balancer_that_it_is_of() -> None:
    balancer, other = SequenceBalancer("g1n1", d_model=D_MODEL), SequenceBalancer("g1n1", d_model=D_MODEL)
    sample = Samples([("x", True)], [[torch.ones(3, 1)]], [3])
    step, alone = (
        balancer.start_planning((), D_MODEL, micro_batches=1, samples=sample),
        balancer.start_planning([3], D_MODEL),
    )
    with pytest.raises(ArgumentError, match="ahead: got a step that was started without samples"):
        balancer.start_moving(alone)
    for call in (other.start_moving, other.finish_planning, other.finish_moving):
        with pytest.raises(ArgumentError, match="ahead: got another balancer's, expected what this one started"):
            call(step)
    balancer.start_moving(step)
    assert balancer.finish_planning(step) == knapformer.plan([[3]], "g1n1", d_model=D_MODEL, micro_batches=1)
    assert torch.equal(balancer.finish_moving(step)[0][0][0], torch.ones(3, 1))
    assert balancer.finish_planning(alone) == knapformer.plan([[3]], "g1n1", d_model=D_MODEL)


def test_one_rank_alone() -> None:
    own = make_batches(0, 5)
    balancer = SequenceBalancer("g1n1", d_model=D_MODEL)
    loader = loader_of(own, balancer)
    used = []
    for batch, plan in loader:
        assert plan == knapformer.plan([batch.seq_lens], topology="g1n1", d_model=D_MODEL)
        travel(balancer, batch)
        used.append(batch)
    assert len(used) == 5 and all(map(same, used, own))
    with pytest.raises(ValueError, match="picture 17"):
        list(loader_of(failing_after(own, ValueError("picture 17")), balancer))
