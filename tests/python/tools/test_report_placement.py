"""The report's bars hold what a plan says."""

import pytest

pytest.importorskip("plotly")
from knapformer.tools.report import charts

import knapformer as kf

LENGTHS = [[300, 20], [5, 7], [], [1000], [64], [65], [1], [900, 33]]


@pytest.mark.parametrize("topology", ["g4n2", "g1n8", "g8n1", "g4/2/1n2"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bars_hold_what_the_plan_says(topology, mask, monkeypatch):
    plan = kf.plan(LENGTHS, topology, d_model=16, gamma=0.5, mask=mask)
    bars = charts.placement(plan).data
    scale, _ = charts.scale_of(max(plan.workload_before), "")
    for of, work in zip(bars, (plan.workload_before, plan.workload_after), strict=True):
        for rank in range(8):
            here = sum(y for x, y in zip(of.x, of.y, strict=True) if x == rank)
            assert scale * here == pytest.approx(work[rank])
    assert any("1,000 tokens<br>" in hover and "home: rank 3" in hover for hover in bars[1].hovertext)
    monkeypatch.setattr(charts, "_MAX_CHUNKS", 4)
    drawn = charts.num_drawn(plan)
    assert drawn < 8 and {rank for of in charts.placement(plan).data for rank in of.x} <= set(range(drawn))
