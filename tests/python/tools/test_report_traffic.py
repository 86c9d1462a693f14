"""Bytes and bars of the report, against sums over single tokens and against the exchange tables' own counts."""

import itertools

import numpy as np
import pytest
from knapformer.tools.report.placement import bars_of
from knapformer.tools.report.traffic import traffic_of

import knapformer as kf
from knapformer import Cluster, TrainedModel, plan_home, predict_step

LENGTHS = [[300, 20], [5, 7], [], [1000], [64], [65], [1], [900, 33]]
CLUSTER = Cluster(ranks_per_node=2)
MODEL = TrainedModel(num_blocks=3, element_size=4, side_bytes_per_token=10)
D = 16


@pytest.fixture(params=["g4n2", "g2n4", "g1n8", "g8n1", "g4/2/1n2", "masked"])
def plan(request):
    if request.param == "masked":
        return kf.plan(
            LENGTHS, "g4/2/1n2", D, gamma=0.5, solver="balanced", masks="causal", cluster=CLUSTER, model=MODEL
        )
    solver = "balanced" if "/" in request.param else "greedy"
    return kf.plan(LENGTHS, request.param, D, solver=solver, cluster=CLUSTER, model=MODEL)


def _by_token(plan):
    """Route and attention bytes from rank to rank, one token at a time."""
    owner = [[None] * length for length in itertools.chain(*plan.seq_lens)]
    for sequence, rank, first, count in plan.chunks:
        owner[sequence][first : first + count] = [rank] * count
    homes = [home for home, lens in enumerate(plan.seq_lens) for _ in lens]
    route, attention = np.zeros((2, plan.num_ranks, plan.num_ranks))
    for sequence, ranks in enumerate(owner):
        sharing = range(
            plan.first_rank_of_sequence[sequence],
            plan.first_rank_of_sequence[sequence] + plan.degree_of_sequence[sequence],
        )
        for rank in ranks:
            if rank != homes[sequence]:
                route[homes[sequence], rank] += 4 * (D * 4 + 10)
            for peer in sharing:
                if peer != rank:
                    attention[rank, peer] += 3 * 3 * 4 * D * 4 / len(sharing)  # blocks, passes, q k v o
    return route, attention


def test_matrices_count_every_token(plan):
    route, attention = _by_token(plan)
    traffic = traffic_of(plan)
    np.testing.assert_allclose(traffic.route, route)
    np.testing.assert_allclose(traffic.attention, attention)


def test_totals_are_the_cluster_models(plan):
    step = predict_step(plan)
    node = np.arange(plan.num_ranks) // 2
    leaves = node[:, None] != node
    traffic = traffic_of(plan)
    for matrix, num_bytes in ((traffic.route, step.route_bytes), (traffic.attention, step.attention_bytes)):
        assert matrix.sum() == pytest.approx(num_bytes.total)
        assert matrix[leaves].sum() == pytest.approx(num_bytes.between)


def test_many_ranks_are_drawn_by_node(plan):
    fine, coarse = traffic_of(plan), traffic_of(plan, max_blocks=4)
    assert (fine.unit, coarse.unit) == ("rank", "node")
    np.testing.assert_allclose(coarse.route, fine.route.reshape(4, 2, 4, 2).sum(axis=(1, 3)))
    coarser = traffic_of(plan, max_blocks=3)
    assert (coarser.unit, coarser.num_blocks, coarser.ranks_per_block) == ("block of nodes", 2, 4)
    assert coarser.attention.sum() == pytest.approx(fine.attention.sum())


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


def test_nothing_moves_without_a_balancer():
    home = plan_home(kf.plan(LENGTHS, "g8n1", D))
    traffic = traffic_of(home)
    assert not traffic.route.any()
    assert not traffic.attention.any()
