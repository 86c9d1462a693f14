"""Plans of whole optimizer steps from Python: the face of `plan(..., micro_batches=K)`. None of it needs torch."""

import json
import pickle

import pytest
from knapformer.tools.rank_lengths import micro_batches_of_step

import knapformer as kf

STEP = [[400, 30, 20, 10], [300, 300], [], [25, 25, 25]]


def step_plan(**change):
    arguments = {"seq_lens_per_rank": STEP, "topology": "g2/1n2", "d_model": 64, "micro_batches": 2} | change
    return kf.plan(**arguments)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_every_sequence_is_in_one_micro_batch(sync):
    plan = step_plan(sync=sync)
    plan.validate()
    lens = [length for per_rank in STEP for length in per_rank]
    homes = [rank for rank, per_rank in enumerate(STEP) for _ in per_rank]
    assert plan.sync == sync and plan.num_micro_batches == len(plan.plans) == 2
    assert len(plan.micro_batches) == len(lens) and set(plan.micro_batches) <= {0, 1}
    for k, part in enumerate(plan.plans):
        ids = [s for s, micro_batch in enumerate(plan.micro_batches) if micro_batch == k]
        assert plan.sequences_of(k) == ids
        assert part.seq_lens == [[lens[s] for s in ids if homes[s] == rank] for rank in range(4)]
    assert plan.num_tokens == sum(lens) == sum(part.num_tokens for part in plan.plans)
    assert plan.max_tokens == max(part.max_tokens for part in plan.plans)
    assert plan.tokens_moved == sum(part.tokens_moved for part in plan.plans)
    assert plan.exchanged_fraction == plan.attention_tokens_moved / plan.num_tokens


def test_a_gap_is_never_below_zero():
    assert kf.plan([[159]], "g1n1", d_model=3072, micro_batches=3).gap == 0


def test_it_is_a_value():
    plan = step_plan()
    assert plan == step_plan() != step_plan(sync="step")
    assert kf.Plan.from_json(plan.to_json()) == plan == pickle.loads(pickle.dumps(plan))
    assert "num_micro_batches=2" in repr(plan)
    part = plan.plans[1]
    assert kf.Plan.from_json(part.to_json()) == part == pickle.loads(pickle.dumps(part)) == part.plans[0]
    with pytest.raises(kf.ArgumentError, match=r"^plan: got one of 2 micro-batches, expected one of its plans"):
        kf.predict_micro_batch(plan)


def test_what_is_said_per_sequence_and_rank_is_that_of_all_micro_batches():
    plan = step_plan()
    parts = [(part, plan.sequences_of(k)) for k, part in enumerate(plan.plans)]
    chunks = [(ids[s], *place) for part, ids in parts for s, *place in part.chunks]
    assert plan.chunks == sorted(chunks)
    assert sum(plan.chunk_works) == pytest.approx(sum(sum(part.chunk_works) for part, _ in parts))
    assert sum(plan.sequence_works) == pytest.approx(sum(plan.workload_after))
    assert sum(plan.sequence_works) == pytest.approx(sum(plan.workload_before))
    for rank in range(4):
        held = [chunk for k in range(2) for chunk in plan.chunks_on(rank, k)]
        assert plan.sequences_on[rank] == [sequence for sequence, _, _ in held]
        assert plan.chunk_lens[rank] == [end - begin for _, begin, end in held]
        assert plan.tokens_after[rank] == sum(plan.chunk_lens[rank])
        assert plan.workload_after[rank] == pytest.approx(sum(part.workload_after[rank] for part, _ in parts))
    assert plan.tokens_before == [sum(lens) for lens in STEP] and plan.seq_lens == STEP
    assert plan.wir_after == max(plan.workload_after) / min(plan.workload_after)
    for name in ("bag_of_sequence", "first_rank_of_sequence", "degree_of_sequence"):
        for part, ids in parts:
            assert [getattr(plan, name)[s] for s in ids] == getattr(part, name)
    moved = plan.on(cluster="a100", gamma=1.0)
    assert moved.chunks == plan.chunks and moved.plans[1] == plan.plans[1].on(cluster="a100", gamma=1.0)


def test_one_micro_batch_is_planned_as_a_plan_and_fits_where_a_step_does():
    assert step_plan(micro_batches=1) == step_plan(micro_batches=1).plans[0] == kf.plan(STEP, "g2/1n2", d_model=64)


def test_without_a_limit_no_rank_holds_much_more_than_the_fullest_one_is_given():
    batches = [kf.DataMix.parse("joint").draw_lengths(0, k, 32) for k in range(4)]
    step = [[length for batch in batches for length in batch[rank]] for rank in range(32)]
    given = max(sum(lens) for part in micro_batches_of_step(step, 4) for lens in part)
    of = {"topology": "g1n32", "d_model": 3072, "gamma": 1, "micro_batches": 4}
    plan, free = (kf.plan(step, max_tokens_per_rank=limit, **of) for limit in (0, 2**40))
    limit = given + given // 2
    assert plan.max_tokens <= limit < free.max_tokens
    assert {part["max_tokens_per_rank"] for part in json.loads(plan.to_json())["plans"]} == {limit}
    assert kf.Plan.from_json(plan.to_json()) == plan


def test_as_few_micro_batches_as_keep_the_limit():
    plan = step_plan(micro_batches="auto", max_tokens_per_rank=220)
    assert plan.num_micro_batches == 2 and plan.max_tokens <= 220
    assert step_plan(micro_batches="auto", max_tokens_per_rank=2000).num_micro_batches == 1
    assert kf.plan([[]], "g1n1", d_model=8, micro_batches="auto", max_tokens_per_rank=1).num_micro_batches == 1


def test_masks_and_an_automatic_topology():
    plan = step_plan(topology="auto", masks="causal")
    assert plan.plans[0].attention_pairs == [
        kf.attention_pairs("causal", length) for lens in plan.plans[0].seq_lens for length in lens
    ]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("micro_batches", {"micro_batches": 0}),
        ("micro_batches", {"micro_batches": 2.0}),
        ("micro_batches", {"micro_batches": "few"}),
        ("micro_batches", {"micro_batches": "auto"}),
        ("micro_batches", {"micro_batches": 2**40}),
        ("sync", {"sync": "never"}),
        ("max_tokens_per_rank", {"max_tokens_per_rank": 199}),
        ("max_tokens_per_rank", {"micro_batches": "auto", "max_tokens_per_rank": 199}),
        ("max_tokens_per_rank", {"topology": "g4n1", "max_tokens_per_rank": 141}),
        ("solver", {"solver": "greedy"}),
    ],
)
def test_errors_name_the_argument(argument, change):
    with pytest.raises(kf.ArgumentError, match=rf"^{argument}: got .*, expected "):
        step_plan(**change)


def test_no_such_micro_batch():
    with pytest.raises(kf.ArgumentError, match=r"^micro_batch: got 2, expected an integer from 0 to 1"):
        step_plan().sequences_of(2)
