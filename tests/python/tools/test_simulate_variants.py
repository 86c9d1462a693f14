"""What a simulation computes and prints: its settings, its variants, and its figures against arithmetic by hand."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from typing import Any

import pytest
from knapformer.adapters.named import load_config
from knapformer.tools.settings import trained_model
from knapformer.tools.simulate.output import Measured, Variant, figures, sentences
from knapformer.tools.simulate.variants import Simulation, StepData, VariantStep, batches_of
from knapformer.tools.simulate.worker import balancer_of
from knapformer.tools.ways import NO_BALANCER, PLANNED_STEP, OptimizerStep, PlanCost

from knapformer import ArgumentError, Cluster, DataMix, TrainedModel, WorkloadModel, plan, plan_home

MODEL = TrainedModel(num_blocks=5)
LENGTHS = [[[100, 20], [20]], [[40], [40, 60]]]  # of two steps


def variants() -> tuple[Variant, Variant]:
    plans = [plan(lengths, "g2n1", d_model=16, gamma=1.0) for lengths in LENGTHS]
    home = [OptimizerStep([plan_home(of)]) for of in plans]
    return (
        Variant(NO_BALANCER, home, [Measured(4.0, 0.5, 3.0), Measured(2.0, 0.25, 1.0)]),
        Variant("g2n1", [OptimizerStep([of]) for of in plans], [Measured(2.0, 0.5, 3.0), Measured(1.0, 0.3, 1.0)]),
    )


def work(*seq_lens: int) -> float:
    return sum(24 * n * 16**2 + 4 * n**2 * 16 for n in seq_lens)


def test_figures_by_hand() -> None:
    baseline, balanced = variants()
    befores = [work(100, 20), max(work(40), work(40, 60))]
    afters = [work(100, 20, 20) / 2, work(40, 40, 60) / 2]  # two ranks share every sequence evenly
    got = figures(balanced, baseline, MODEL, peak_tflops=10.0)
    assert got["fbl_s"] == 1.5 and got["fbl_median_s"] == 1.5 and got["fbl_per_step_s"] == [2.0, 1.0]
    assert got["speed_up"] == 2.0
    assert got["promised_speed_up"] == pytest.approx(sum(befores) / sum(afters))
    assert got["tokens_per_s"] == pytest.approx((140 + 140) / 2 / 1.5)
    assert got["hfu"] == pytest.approx(4 * (work(100, 20, 20) + work(40, 40, 60)) / 2 * 5 / (1.5 * 2 * 10e12))
    assert got["tokens_moved"] == pytest.approx(0.5) and got["max_tokens"] == 70
    assert got["wir"] == pytest.approx(1.0)
    assert got["loss_difference"] == pytest.approx(0.2) and got["gradient_difference"] == 0
    got = figures(baseline, baseline, MODEL, peak_tflops=None)
    assert (got["speed_up"], got["promised_speed_up"], got["tokens_moved"], got["hfu"]) == (1, 1, 0, None)
    assert got["wir"] == pytest.approx((work(100, 20) / work(20) + work(40, 60) / work(40)) / 2)
    assert got["max_tokens"] == 120 and got["loss_difference"] == 0


def test_ranks_wait_in_every_micro_batch() -> None:
    """A step of the two: each micro-batch counts with its slowest rank."""
    baseline, balanced = (
        dataclasses.replace(
            of, steps=[OptimizerStep([step.plans[0] for step in of.steps])], measured=[Measured(s, 1.0, 1.0)]
        )
        for of, s in zip(variants(), (6.0, 4.0), strict=True)
    )
    got = figures(balanced, baseline, MODEL, peak_tflops=None)
    highest_before = work(100, 20) + work(40, 60)
    assert got["promised_speed_up"] == pytest.approx(2 * highest_before / (work(100, 20, 20) + work(40, 40, 60)))
    assert got["tokens_per_s"] == pytest.approx((140 + 140) / 4.0) and got["speed_up"] == 1.5


def test_an_infinite_ratio_is_null() -> None:
    step = OptimizerStep([plan_home(plan([[5], []], "g2n1", d_model=16))])
    alone = Variant(NO_BALANCER, [step], [Measured(1.0, 1.0, 1.0)])
    assert math.isinf(step.figures["wir"]) and figures(alone, alone, MODEL, None)["wir"] is None


def test_the_sentences_say_what_the_table_does_not() -> None:
    same = {"loss_per_step": [1.0], "loss_difference": 1e-7, "gradient_difference": 2e-7}
    baseline, even, gained = ({"promised_speed_up": promised, **same} for promised in (1.0, 1.01, 2.0))
    assert "1.0e-07, of the gradient's norm 2.0e-07" in sentences([baseline, gained])
    assert "nothing to gain" in sentences([baseline, even]) and "nothing" not in sentences([baseline, even, gained])


def simulation(**changes: Any) -> Simulation:
    """Two ranks; in `changes` also fields of its planning, and data codes; else options."""
    model = changes.pop("model", load_config("flux-tiny"))
    of = {name: changes.pop(name) for name in ("solver", "cluster") if name in changes}
    trained = trained_model(model, None, True).replace(num_parameters=0.0)
    planning = PlanCost(
        d_model=model.d_model, gamma=0.5, mask=model.mask, model=trained, **{"cluster": Cluster(), **of}
    )
    num_ranks, lengths, mix = changes.pop("num_ranks", 2), changes.pop("lengths", ()), None
    if not lengths:
        mix = DataMix.parse(changes.pop("data", "g2b2i256f1s0"), **changes.pop("drawn", {}))
    options = {
        "topology": ["g2n1"], "way": [], "batch_size": 4, "micro_batches": None, "max_tokens_per_rank": 0, "steps": 10,
        "warmup": 2, "seed": 0,
    }  # fmt: skip
    return Simulation(argparse.Namespace(**(options | changes)), model, planning, num_ranks, mix, lengths)


def changed(given: Simulation, **options: Any) -> Simulation:
    return dataclasses.replace(given, args=argparse.Namespace(**(vars(given.args) | options)))


def step_of(given: Simulation, number: int) -> dict[str, VariantStep]:
    return next(itertools.islice(given.variants(), number, None))


@pytest.mark.parametrize("model", ["flux-tiny", "wan-tiny"])
def test_what_each_variant_computes(model: str) -> None:
    given = simulation(
        data="g1b2i64f1s0,g1b3i128f1s0", num_ranks=4, model=load_config(model), topology=("g2n2",),
        micro_batches=3, drawn={"max_text_tokens": 20},
    )  # fmt: skip
    variants = step_of(given, 1)
    assert list(variants) == [NO_BALANCER, "g2n2", PLANNED_STEP]
    data = {name: way.data for name, way in variants.items()}
    drawn, planned = data[NO_BALANCER], data[PLANNED_STEP]
    assert data["g2n2"] is drawn
    mix, config = given.mix, given.model
    assert mix is not None
    for rank in range(4):  # the batches of the mix behind those of step 0
        sizes = [[repr(config.possible(s)) for s in mix.draw(0, 3 + k, rank)] for k in range(3)]
        assert [[repr(s.size) for s in of] for of in drawn[rank]] == sizes

    def seeds(of: StepData) -> list[int]:
        return sorted(s.seed for ranks in of for samples in ranks for s in samples)

    assert seeds(planned) == seeds(drawn) and len(set(seeds(drawn))) == len(seeds(drawn)) == 30
    assert all(samples for ranks in planned for samples in ranks)
    fullest, of_planned = (max(sum(lens) for batch in batches_of(of) for lens in batch) for of in (drawn, planned))
    assert fullest >= of_planned

    # As the plans say that stand for them.
    plans = {name: list(way.step.plans) for name, way in variants.items()}
    assert [plan.seq_lens for plan in plans[PLANNED_STEP]] == batches_of(planned)
    assert all(plan.tokens_moved == 0 for plan in plans[PLANNED_STEP] + plans[NO_BALANCER])


def test_what_others_compute() -> None:
    """Buckets: all ranks as many tokens in a micro-batch, a length of the data. A budget: no rank beyond the longest
    sample or the mean batch. Static groups: everything that was drawn, evenly on the group's ranks."""
    lengths = tuple([40] * 6 + [100, 400])
    given = simulation(
        lengths=lengths, batch_size=3, num_ranks=4, micro_batches=2, topology=(), steps=20,
        way=("buckets", "time_budget", "static_2"),
    )  # fmt: skip
    names = ["lockstep buckets", "time budget", "sequence parallel 2"]
    workload, seen = WorkloadModel(0.5), []

    def work(lens: list[int]) -> float:
        return sum(workload.work(n, given.model.d_model) for n in lens)

    budget = max(work([400]), 3 * work(list(lengths)) / 8)
    steps = list(given.variants())
    assert len(steps) == 22
    for ways in steps:
        assert list(ways) == [NO_BALANCER, *names, PLANNED_STEP]
        drawn = ways[NO_BALANCER].data
        for k, batch in enumerate(batches_of(drawn)):
            buckets, budgets = (batches_of(ways[name].data)[k] for name in names[:2])
            (length,) = {n for lens in buckets for n in lens}
            assert [len(lens) for lens in buckets] == [3] * 4 and length in lengths
            seen.append(length)
            assert all(lens and work(lens) <= budget * (1 + 1e-9) for lens in budgets)
            shared = ways["sequence parallel 2"].step.plans[k]
            assert shared.seq_lens == batch and set(shared.degree_of_sequence) == {2}
            tokens = [sum(map(sum, batch[bag : bag + 2])) for bag in (0, 2)]
            assert [sum(shared.tokens_after[bag : bag + 2]) for bag in (0, 2)] == tokens
        static, of_buckets = ways["sequence parallel 2"], ways["lockstep buckets"]
        assert static.data is drawn and static.followed and static.same_samples and not of_buckets.same_samples
        assert of_buckets.step.own_share == pytest.approx(1)
    # In proportion to the samples, up to what 44 draws can tell (systematic draws: 8 times as many are made).
    assert seen.count(40) > 22 and {100, 400} <= set(seen)


def test_ranks_plan_as_the_simulation_and_keep_its_limit() -> None:
    """A world of one: the process itself."""
    given = simulation(
        data="g1b2i256f1s0", num_ranks=1, topology=("g1n1",), cluster=Cluster("cpu", ranks_per_node=2),
        max_tokens_per_rank=5000,
    )  # fmt: skip
    balancer = balancer_of(given, "g1n1", given.limit)
    made = balancer.plan_routing([4000, 1000], given.model.d_model)
    assert (
        made == given.planning.plan([[4000, 1000]], "g1n1", max_tokens_per_rank=5000)
        and made.cluster == given.planning.cluster
    )
    with pytest.raises(ArgumentError, match="max_tokens_per_rank: got 5000"):
        balancer.plan_routing([4000, 1001], 64)


def test_a_limit_of_tokens_holds_in_plans_and_not_where_nothing_is_planned() -> None:
    """The ranks draw three samples and one."""
    given = simulation(
        data="g1b3i256f1s0,g1b1i256f1s0", topology=("g1n2", "g2n1"), way=("static_2",), warmup=0,
        steps=1,
    )  # fmt: skip
    (lens,) = batches_of(given.draw(0))
    limit = given.planning.plan(lens, "g1n2").max_tokens  # two samples
    limited = changed(given, max_tokens_per_rank=limit)
    free, plans = ({name: list(way.step.plans) for name, way in step_of(of, 0).items()} for of in (given, limited))
    for topology in limited.args.topology:
        assert plans[topology] == [given.planning.plan(lens, topology, max_tokens_per_rank=limit)]
        assert plans[topology][0].max_tokens <= limit
    assert plans[NO_BALANCER][0].max_tokens == sum(lens[0]) > limit
    assert plans["sequence parallel 2"] == free["sequence parallel 2"]
    with pytest.raises(ArgumentError, match=f"max_tokens_per_rank: got {limit // 2}, expected "):
        changed(given, max_tokens_per_rank=limit // 2)
    # With micro-batches, of those steps that are planned whole, as in `knapformer plan`.
    twice = changed(given, micro_batches=2, topology=("g1n2",), way=())
    of_topology = list(step_of(twice, 0)["g1n2"].step.plans)
    limit = max(of.max_tokens for of in of_topology) - 1
    kept = step_of(changed(twice, max_tokens_per_rank=limit), 0)
    assert list(kept["g1n2"].step.plans) == of_topology and kept[PLANNED_STEP].step.figures["max_tokens"] <= limit


def test_a_limit_that_a_later_step_cannot_keep_is_refused_before_any_rank_starts() -> None:
    given = simulation()
    tokens = [sum(map(sum, batches_of(given.draw(step))[0])) for step in range(12)]
    limit = -(-tokens[0] // 2)
    assert max(tokens) > 2 * limit  # g2n1 halves them
    changed(given, warmup=0, steps=1, max_tokens_per_rank=limit)
    with pytest.raises(ArgumentError, match=f"max_tokens_per_rank: got {limit}, expected at least"):
        changed(given, max_tokens_per_rank=limit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": ()}, "topology: got none"),
        ({"way": ("static_4",)}, "way: got 'static_4', expected one that 2 ranks allow"),
        ({"micro_batches": 2, "max_tokens_per_rank": 3}, "max_tokens_per_rank: got 3"),
        ({"num_ranks": 4, "topology": ("g3n1",)}, "topology: got 'g3n1'"),
        ({"topology": ("g2/1n1",), "solver": "greedy"}, "solver: got 'greedy' for topology g2/1n1, expected flat"),
    ],
)
def test_what_does_not_fit_together_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        simulation(**changes)
