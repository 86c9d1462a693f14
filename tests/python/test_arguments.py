"""What a wrong type is answered with: one line that names the argument. None of it needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import knapformer as kf
from knapformer import _core

LENS = [[40, 3], [5]]
PLAN = kf.plan(LENS, "g2n1", d_model=8)
STEP = kf.plan(LENS, "g2n1", d_model=8, micro_batches=2)
MIX = kf.DataMix.parse("g1b2i256f1s0")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.head_shares(4, "a", 1), "num_kv_heads: got 'a', expected an integer of 64 bits"),
        (lambda: _core.head_shares(2**70, 1, 1), f"num_heads: got {2**70}, expected an integer of 64 bits"),
        (lambda: _core.head_shares(2, 1, 2**40), f"degree: got {2**40}, expected an integer from 1 to 2147483647"),
        (lambda: STEP.sequences_of(2.5), "micro_batch: got 2.5, expected an integer from 0 to 1"),
        (lambda: STEP.chunks_on(2), "rank: got 2, expected an integer from 0 to 1"),
        (lambda: STEP.chunks_on(0, -1), "micro_batch: got -1, expected an integer from 0 to 1"),
        (lambda: STEP.home_sequences(True, 0), "rank: got True, expected an integer from 0 to 1"),
        (lambda: kf.Plan.from_json(3), "json: got 3, expected text"),
        (lambda: kf.Plan.from_json(None), "json: got None, expected text"),
        (lambda: PLAN.on(cluster=3), "cluster: got 3, expected a Cluster, a name of one, or None"),
        (lambda: PLAN.on(model="flux"), "model: got 'flux', expected a TrainedModel, or None"),
        (lambda: PLAN.on(gamma="x"), "gamma: got 'x', expected a number"),
        (lambda: kf.Topology("g2n1", num_ranks=2.0), "num_ranks: got 2.0, expected an integer of 64 bits"),
        (lambda: kf.Cluster(3), "cluster: got 3, expected text"),
        (lambda: kf.Cluster(ranks_per_node=True), "ranks_per_node: got True, expected an integer of 32 bits"),
        (lambda: kf.TrainedModel().replace(speed=1), "speed: got 1, expected no such argument"),
        (lambda: kf.Sample(-1, 2), "text_tokens: got -1, expected an integer from 0 to 9223372036854775807"),
        (lambda: kf.DataMix.parse("joint", "x"), "resolution_scale: got 'x', expected a number"),
        (lambda: MIX.draw(-1, 0, 0), "seed: got -1, expected an integer from 0 to 2^64 - 1"),
        (lambda: MIX.draw(0, 0, "a"), "rank: got 'a', expected an integer from 0 to 2147483647"),
        (lambda: MIX.draw_lengths(0, None, 1), "step: got None, expected an integer of 64 bits"),
        (lambda: MIX.check_divides(1.5), "num_ranks: got 1.5, expected an integer of 64 bits"),
        (lambda: kf.WorkloadModel("x"), "gamma: got 'x', expected a number"),
        (lambda: kf.WorkloadModel().work(1.5, 8), "seq_len: got 1.5, expected an integer of 64 bits"),
        (lambda: kf.attention_pairs("full", 0), "seq_len: got 0, expected an integer from 1 to 2147483647"),
        (lambda: kf.attention_pairs(None, 8), "mask: got None, expected text"),
        (lambda: kf.fit_workload([1, 2.5], [1.0, 2.0], 8), "seq_len: got 2.5, expected an integer of 64 bits"),
        (lambda: kf.predict_micro_batch(LENS), f"plan: got {LENS}, expected a Plan"),
        (lambda: kf.predict_micro_batch(PLAN, measured=[(1, 2)]), "measured[0]: got (1, 2), expected three numbers"),
        (lambda: kf.plan_home(STEP.plans), "plan: got an object of type list, expected a Plan"),
        (lambda: kf.plan(LENS, "g1n2", micro_batches="a", d_model=8),
         "micro_batches: got 'a', expected 1 to 4096, or 'auto'"),
        (lambda: kf.plan(LENS, "g1n2"), "d_model: got None, expected the width of the blocks, in features"),
        (lambda: kf.plan(LENS, "g1n2", 8),
         "cost: got 8, expected a knapformer.Cost, or its fields as keyword arguments"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(kf.ArgumentError) as caught:
        call()
    assert str(caught.value) == message


def test_an_error_inside_an_argument_is_told_on_one_line() -> None:
    class Broken:
        def __index__(self) -> int:
            raise TypeError("broken")

    with pytest.raises(kf.ArgumentError, match=r"^d_model: got [^\n]*, expected an integer of 64 bits$"):
        kf.plan(LENS, "g2n1", d_model=Broken())


@pytest.mark.parametrize("arguments", [(), (LENS,), (LENS,) * 4])
def test_a_call_that_does_not_fit_is_pythons_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"^plan\(\) (missing|takes)"):
        kf.plan(*arguments)
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'gama', expected .* d_model, gamma, "):
        kf.plan(LENS, "g1n2", d_model=8, gama=0.4)
