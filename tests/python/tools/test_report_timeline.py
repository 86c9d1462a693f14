"""Timelines: the predicted one adds up to the prediction, and events lie as the trace format asks."""

import collections
import itertools

import pytest
from knapformer.tools.report import predicted_timeline

import knapformer as kf
from knapformer import Cluster, TrainedModel, predict_step

# Some ranks hold whole sequences beside a part of a shared one.
LENGTHS = [[30000, 200, 4000], [500, 700, 4000], [4000], [10000, 4000], [64], [6500], [], [900, 33, 1]]
MODEL = TrainedModel(num_blocks=5)


def _plan(topology="g8/4/2/1n1", cluster=None, model=MODEL):
    solver = "balanced" if "/" in topology else "greedy"
    return kf.plan(LENGTHS, topology, 3072, solver=solver, cluster=cluster, model=model)


def _spans(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "steps",
    [{"recomputes": True}, {"recomputes": False}, {"mode": "lora", "num_heads": 6}, {"mode": "inference"}],
    ids=str,
)
@pytest.mark.parametrize("topology", ["g8/4/2/1n1", "g4n2", "g1n8"])
def test_every_rank_ends_at_the_predicted_time(topology, overlaps, steps):
    cluster = Cluster.published(overlaps_attention=overlaps, ranks_per_node=4)
    plan = _plan(topology, cluster, TrainedModel(num_blocks=5, **steps))
    total_us = predict_step(plan).total_s * 1e6
    for max_events in (10**6, 400):  # every block, and the first ones only
        spans = _spans(predicted_timeline(plan, max_events=max_events))
        ends = collections.defaultdict(float)
        for span in spans:
            assert span["dur"] > 0
            ends[span["tid"] // 2] = max(ends[span["tid"] // 2], span["ts"] + span["dur"])
        assert len(ends) == 8
        for end in ends.values():
            assert end == pytest.approx(total_us, rel=1e-9)


def test_events_of_a_lane_do_not_overlap_and_waits_are_the_models():
    plan = _plan()
    assert plan.cluster.overlaps_attention
    trace = predicted_timeline(plan)
    lanes = collections.defaultdict(list)
    for span in _spans(trace):
        lanes[span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-3  # microseconds
    step = predict_step(plan)
    for rank, times in enumerate(step.ranks):
        waits = [s["dur"] for s in _spans(trace) if s["tid"] == 2 * rank and s["name"] == "wait before attention"]
        passes_s = 2 * times.forward.wait_before_s + times.backward.wait_before_s  # forward, recompute, backward
        assert sum(waits) == pytest.approx(5 * passes_s * 1e6)
    names = {s["name"] for s in _spans(trace)}
    assert {
        "route",
        "pre_attn",
        "post_attn",
        "reverse_route",
        "attention, whole sequences",
        "block 4: per-token layers",
    } <= names


def test_ranks_and_nodes_are_named():
    trace = predicted_timeline(_plan(cluster=Cluster(ranks_per_node=4)), plan_s=0.001)
    names = {(e["name"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {
        ("process_name", "node 0"),
        ("process_name", "node 1"),
        ("process_name", "host"),
        ("thread_name", "rank 7"),
    } <= names
    assert any(s["name"] == "plan the next step" and s["dur"] == 1000 for s in _spans(trace))
