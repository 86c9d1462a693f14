"""BalancedLoader with micro-batches: samples that move. Oracle: a sample is a function of its number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import Listed, Outcome, failing_after, of_all_ranks, outcome_of, run_checks
from ranks import GROUP_TIMEOUT_S, run_ranks
from torch import Tensor

from knapformer import ArgumentError, BalancedLoader, BalancedStepLoader, Cluster, SequenceBalancer, plan

D_MODEL = 8
CLUSTER = Cluster(flops_per_s=1e9, node_bytes_per_s=1e12, network_bytes_per_s=1e12)
PER_TOKEN = ["x", "ids", "tiny", "none"]
PER_SAMPLE = ["text", "flag", "wide", "nothing"]
FIELDS: dict[str, Any] = {"per_token": PER_TOKEN, "per_sample": PER_SAMPLE}

Sample = dict[str, Tensor]


def length_of(number: int) -> int:
    return 1 + number * 7919 % 23 + (60 if number % 11 == 3 else 0)


def sample_of(number: int) -> Sample:
    """Of many dtypes and shapes; some strided, some ragged, some without elements."""
    length = length_of(number)
    generator = torch.Generator().manual_seed(number)
    rows = number % 5
    return {
        "x": torch.randn(length, 2, 3, generator=generator),
        "ids": (1000 * number + torch.arange(2 * length))[::2],
        "tiny": torch.arange(length, dtype=torch.uint8).unsqueeze(1).expand(length, 3),
        "none": torch.empty(length, 0, dtype=torch.bfloat16),
        "text": torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(torch.bfloat16),
        "flag": torch.tensor(number % 2 == 0),
        "wide": torch.randn(3, generator=generator, dtype=torch.float64) * (1 + 2j),
        "nothing": torch.empty(0, 4, dtype=torch.float16),
    }


def batches_of(rank: int, num_batches: int) -> list[list[Sample]]:
    """Some are empty."""
    first = 1000 * rank
    return [[sample_of(first + 10 * batch + i) for i in range((batch + rank) % 4)] for batch in range(num_batches)]


def numbers_of(batches: list[list[Sample]]) -> list[int]:
    return [int(sample["ids"][0]) // 1000 for batch in batches for sample in batch]


Piece = tuple[int, int, int]


def checked_pieces(samples: list[Sample], chunks: list[tuple[int, int, int]]) -> list[Piece]:
    """What came is what the samples are, bit for bit."""
    pieces = []
    for sample, (_, begin, end) in zip(samples, chunks, strict=True):
        assert list(sample) == PER_TOKEN + PER_SAMPLE
        number = int(sample["ids"][0] - begin * 2) // 1000 if end > begin else -1
        if end > begin:
            whole = sample_of(number)
            for name, tensor in whole.items():
                wanted = tensor[begin:end] if name in PER_TOKEN else tensor
                assert sample[name].dtype == wanted.dtype and torch.equal(sample[name], wanted), (number, name)
        pieces.append((number, begin, end))
    return pieces


def lists_of(loader: BalancedLoader[Any]) -> Iterator[list[Piece]]:
    for samples, in_force in loader:
        assert in_force == loader._balancer.plan
        yield checked_pieces(samples, loader.chunks)


def check_every_sample_once(rank: int, world_size: int) -> None:
    for topology, counts in (
        ("g1n4", [5, 3, 0, 9]),
        ("g4n1", [4, 4, 0, 3]),
        ("g4/2/1n1", [7, 6, 0, 1]),
        ("g2n1", [6, 7, 6, 8]),
    ):
        balancer = SequenceBalancer(topology, cluster=CLUSTER, d_model=D_MODEL)
        own = batches_of(rank, counts[rank])
        loader = BalancedStepLoader(own, balancer, 3, **FIELDS)
        for _ in range(2):  # passes
            lists = list(lists_of(loader))
            num_steps = -(-max(counts) // 3)
            assert len(lists) == 3 * num_steps
            pieces = sorted(itertools.chain.from_iterable(of_all_ranks(list(itertools.chain.from_iterable(lists)))))
            wanted = itertools.chain.from_iterable(of_all_ranks(numbers_of(own)))
            covered = dict.fromkeys(wanted, 0)
            for number, begin, last in pieces:
                if number >= 0:
                    assert covered[number] == begin
                    covered[number] = last
            assert all(length == length_of(number) for number, length in covered.items())
            if topology == "g4n1":
                assert any(begin > 0 for _, begin, _ in pieces), "nothing was shared"


def check_given_work(rank: int, world_size: int) -> None:
    """Steps are those of knapformer.plan with the work of each sample, also where a rank has none."""
    balancer = SequenceBalancer("g2n2", cluster=CLUSTER, d_model=D_MODEL)
    own = batches_of(rank, [5, 3, 0, 6][rank])

    def work_of(batch: list[Sample]) -> list[float]:
        return [1e6 * (1 + number % 7) for number in numbers_of([batch])]

    loader = BalancedStepLoader(own, balancer, 3, work=work_of, **FIELDS)
    steps = {id(loader.step_plan): loader.step_plan for _ in loader}
    assert len(steps) == 2
    for number, step in enumerate(steps.values()):
        drawn = [sample for batch in own[3 * number : 3 * number + 3] for sample in batch]
        lens = of_all_ranks([len(sample["x"]) for sample in drawn])
        assert step == plan(
            lens, "g2n2", d_model=D_MODEL, micro_batches=3, work=of_all_ranks(work_of(drawn)), cluster=CLUSTER
        )


def check_resume(rank: int, world_size: int) -> None:
    counts = [8, 5, 0, 2]
    balancer = SequenceBalancer("g2n2", cluster=CLUSTER, d_model=D_MODEL)

    def new() -> BalancedLoader[Any]:
        return BalancedStepLoader(batches_of(rank, counts[rank]), balancer, 2, **FIELDS)

    whole = list(lists_of(new()))
    assert len(whole) == 8
    for stop in range(9):
        loader = new()
        states = [loader.state_dict()]
        for _ in itertools.islice(lists_of(loader), stop):
            states.append(loader.state_dict())
        resumed = new()
        resumed.load_state_dict(states[stop])
        # A step that has not ended is computed again.
        assert list(lists_of(resumed)) == whole[stop // 2 * 2 :], stop
        assert list(lists_of(resumed)) == whole, "the pass after it is whole again"


def check_resume_after_a_pass_left_early(rank: int, world_size: int) -> None:
    """The wrapped loader is amid the pass that was left when the next one begins."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    balancer = SequenceBalancer("g2n2", cluster=CLUSTER, d_model=D_MODEL)

    def new() -> BalancedLoader[Any]:
        own = StatefulDataLoader(Listed(batches_of(rank, 8)), batch_size=None)
        return BalancedStepLoader(own, balancer, 2, **FIELDS)

    whole = list(lists_of(new()))
    loader = new()
    list(itertools.islice(lists_of(loader), 3))
    passing = lists_of(loader)
    next(passing)
    resumed = new()
    resumed.load_state_dict(loader.state_dict())
    assert list(passing) == whole[1:]
    assert list(lists_of(resumed)) == whole, "a step that had not ended is computed again"


def check_overlap(rank: int, world_size: int) -> None:
    """What moves the next step's samples is launched before a step begins, and the gather of the one after it."""
    balancer = SequenceBalancer("g1n4", d_model=D_MODEL)
    own = [[sample_of(1000 * rank + 10 * batch + i) for i in range(2)] for batch in range(6)]
    loader = BalancedStepLoader(own, balancer, 2, **FIELDS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number, _ in enumerate(loader):
            with torch.profiler.record_function(f"list {number}"):
                pass
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    order = [name for name in names if name.startswith(("c10d::", "list "))]
    gather, move = "c10d::_allgather_base_", "c10d::alltoall_base_"
    # Before the first list: steps 0 and 1 move, and 0, 1 and 2 are gathered. Then one of each a step; the step in which
    # all ranks have ended is the last.
    assert order == [
        gather, move, gather, move, gather, "list 0", "list 1",
        move, gather, "list 2", "list 3",
        move, "list 4", "list 5",
    ]  # fmt: skip


def check_refused_lengths(rank: int, world_size: int) -> None:
    """The second step of rank 0 cannot keep the limit of tokens: the first is computed, and the balancer lives on."""
    balancer = SequenceBalancer("g1n4", max_tokens_per_rank=70, d_model=D_MODEL)
    own = [[sample_of(1)], [sample_of(2)], [sample_of(3)], []] if rank == 0 else []
    loader = BalancedStepLoader(own, balancer, 2, **FIELDS)
    num_lists = 0
    with pytest.raises(ArgumentError, match="max_tokens_per_rank"):
        for _ in lists_of(loader):
            num_lists += 1
    assert num_lists == 2
    list(lists_of(BalancedStepLoader(own[:2], balancer, 2, **FIELDS)))


def check_evaluation_amid_a_step(rank: int, world_size: int) -> None:
    """Another loader on the same balancer plans steps of its own, in the middle of one of these."""
    balancer = SequenceBalancer("g2n2", cluster=CLUSTER, d_model=D_MODEL)

    def new(first: int) -> BalancedLoader[Any]:
        own = [[sample_of(first + 1000 * rank + 10 * batch)] for batch in range(6)]
        return BalancedStepLoader(own, balancer, 3, **FIELDS)

    whole, of_evaluation = list(lists_of(new(0))), list(lists_of(new(7)))
    for stop in (1, 2, 3):
        lists = []
        for pieces in lists_of(new(0)):
            lists.append(pieces)
            if len(lists) == stop:
                assert list(lists_of(new(7))) == of_evaluation
        assert lists == whole


def check_only_tensors_that_go_whole(rank: int, world_size: int) -> None:
    """Where ranks share samples, what goes whole to each of them would count several times."""
    own = [[{"x": torch.ones(30, 2) * rank}]] * 3
    options: dict[str, Any] = {"per_sample": ["x"], "seq_lens": lambda of: [len(s["x"]) for s in of]}
    for topology in ("g4n1", "g4/2/1n1", "g1n2+g2n1"):
        balancer = SequenceBalancer(topology, cluster=CLUSTER, d_model=D_MODEL)
        with pytest.raises(ArgumentError, match=r"per_token: got none, for a balancer of g.* or a balancer of g1n4"):
            BalancedStepLoader(own, balancer, 2, **options)
    loader = BalancedStepLoader(own, SequenceBalancer("g1n4", d_model=D_MODEL), 2, **options)
    assert sum(of_all_ranks(sum(len(samples) for samples, _ in loader))) == 12


CHECKS = [
    check_evaluation_amid_a_step,
    check_only_tensors_that_go_whole,
    check_every_sample_once,
    check_given_work,
    check_resume,
    check_resume_after_a_pass_left_early,
    check_overlap,
    check_refused_lengths,
]


def test_samples_on_real_ranks() -> None:
    run_checks(CHECKS, 4)


def without(name: str) -> Sample:
    return {field: value for field, value in sample_of(5).items() if field != name}


def fail(rank: int, world_size: int) -> list[Outcome]:
    """What each rank raises, after how many lists, where rank 1's data goes wrong."""
    good = [[sample_of(1000 * rank + batch)] for batch in range(8)]
    broken: list[Callable[[], Any]] = [
        lambda: failing_after(good[:5], ValueError("picture 17 is truncated")),
        lambda: failing_after([], ValueError("picture 17 is truncated")),
        lambda: [*good[:4], [without("text")]],
        lambda: [*good[:2], [without("text") | {"text": [1, 2]}]],
        lambda: [*good[:2], [sample_of(5) | {"tiny": torch.zeros(2)}]],
        lambda: [*good[:2], [sample_of(5) | {"text": torch.zeros(2, requires_grad=True)}]],
        lambda: [*good[:2], [sample_of(5) | {"text": torch.zeros(2, device="meta")}]],
        lambda: [*good[:2], [(1, 2)]],
    ]
    outcomes = []
    for make in broken:
        balancer = SequenceBalancer("g1n2", group=dist.new_group([0, 1]), d_model=D_MODEL)
        dist.barrier()
        loader = BalancedStepLoader(make() if rank == 1 else good, balancer, 2, **FIELDS)
        outcomes.append(outcome_of(lists_of(loader)))
        # All ranks know of it by themselves, in the same call, so nothing has stopped.
        assert balancer.plan_routing([3 + rank], D_MODEL).num_sequences == 2
    return outcomes


def test_an_error_of_the_data_is_one_on_all_ranks() -> None:
    expected = [
        ("ValueError", "picture 17 is truncated", 4),
        ("ValueError", "picture 17 is truncated", 0),
        ("ArgumentError", "sample: got x, ids, tiny, none, flag, wide, nothing; expected a dict of x, ids, ", 4),
        ("ArgumentError", "sample['text']: got list, expected a tensor", 2),
        ("ArgumentError", "sample 0['tiny']: got a tensor of shape [2], expected ", 2),
        ("ArgumentError", "sample 0['text']: got a tensor that requires a gradient, expected one without", 2),
        ("ArgumentError", "sample 0['text']: got a tensor of layout Strided on meta, expected a dense ", 2),
        ("ArgumentError", "sample: got tuple; expected a dict of ", 2),
    ]
    of_others, of_own = run_ranks(fail, 2, timeout_s=120)
    for own, other, (kind, words, num_lists) in zip(of_own, of_others, expected, strict=True):
        assert own[0] == kind and words in own[1] and own[2] == num_lists, (own, kind, words, num_lists)
        assert other[0] == "StateError" and "rank 1: data: " in other[1] and words in other[1], (other, words)
        assert other[2] == num_lists, (other, num_lists)
        assert max(own[3], other[3]) < GROUP_TIMEOUT_S / 2


@pytest.mark.parametrize("length", [3.9, "3", None])
def test_lengths_that_are_no_integers_are_named(length: Any) -> None:
    loader = BalancedStepLoader(
        [[sample_of(0)]], SequenceBalancer("g1n1", d_model=D_MODEL), 1, seq_lens=lambda _: [length], **FIELDS
    )
    with pytest.raises(ArgumentError, match=f"seq_lens: got {length!r}, expected an integer"):
        list(loader)


def test_one_rank_alone() -> None:
    own = batches_of(0, 7)
    loader = BalancedStepLoader(own, SequenceBalancer("g1n1", d_model=D_MODEL), 3, **FIELDS)
    lists = list(lists_of(loader))
    assert len(lists) == 9
    assert sorted(number for pieces in lists for number, _, _ in pieces) == sorted(numbers_of(own))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batches": 0, "per_token": ["x"]}, "micro_batches: got 0, expected at least 1"),
        ({"micro_batches": 2}, "per_token: got none, expected names of tensors, or seq_lens"),
        (
            {"micro_batches": 2, "per_token": ["x", "text"], "per_sample": ["text"]},
            "per_token, per_sample: got 'text' twice, expected each name once",
        ),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        BalancedStepLoader([], SequenceBalancer("g1n1", d_model=D_MODEL), **options)
