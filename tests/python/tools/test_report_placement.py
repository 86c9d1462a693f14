"""The report's bars hold what a plan says."""

import pytest
from knapformer.tools.report.placement import bars_of

import knapformer as kf

LENGTHS = [[300, 20], [5, 7], [], [1000], [64], [65], [1], [900, 33]]
D = 16


@pytest.fixture(params=["g4n2", "g2n4", "g1n8", "g8n1", "g4/2/1n2", "masked"])
def plan(request):
    if request.param == "masked":
        return kf.plan(LENGTHS, "g4/2/1n2", d_model=D, gamma=0.5, solver="balanced", masks="causal")
    solver = "balanced" if "/" in request.param else "greedy"
    return kf.plan(LENGTHS, request.param, d_model=D, solver=solver)


def test_bars_hold_what_the_plan_says(plan):
    bars = bars_of(plan)
    assert bars.num_merged == 0
    for segments, work, tokens in (
        (bars.before, plan.workload_before, plan.tokens_before),
        (bars.after, plan.workload_after, plan.tokens_after),
    ):
        for rank in range(8):
            here = [segment for segment in segments if segment.rank == rank]
            assert sum(s.work for s in here) == pytest.approx(work[rank])
            assert sum(s.num_tokens for s in here) == tokens[rank]
    assert "home: rank 3" in next(s.hover for s in bars.after if s.seq_len == 1000)


def test_many_sequences_are_drawn_together(plan):
    bars = bars_of(plan, max_segments=4)
    assert bars.num_merged > 0
    for segments, work in ((bars.before, plan.workload_before), (bars.after, plan.workload_after)):
        assert sum(s.work for s in segments) == pytest.approx(sum(work))
        assert sum(s.num_tokens for s in segments) == plan.num_tokens
