"""A predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from knapformer import Plan, predict_step
from knapformer._core import PassTime
from knapformer.tools.files import write_atomically

Event = dict[str, Any]
_MAX_EVENTS = 200_000


class _Lanes:
    """Events of one rank on two lanes, computing and exchanging, written one after another."""

    def __init__(self, events: list[Event], rank: int, node: int) -> None:
        self._events = events
        self._lanes = {"compute": 2 * rank, "exchange": 2 * rank + 1}
        self._node = node
        self.now_s = 0.0

    def add(self, name: str, seconds: float, lane: str = "compute", **details: Any) -> None:
        self.at(self.now_s, name, seconds, lane, **details)
        self.now_s += seconds

    def overlap(self, of: PassTime, of_pass: str) -> None:
        """Adds pre_attn and attention on whole sequences: at the same time where that hides pre_attn, else in turn."""
        start_s = self.now_s
        self.at(start_s, f"pre_attn{of_pass}", of.pre_attn_s, "exchange")
        begin_s = start_s + (0.0 if of.hidden_s > 0 else of.pre_attn_s)
        self.at(begin_s, f"attention, whole sequences{of_pass}", of.whole_attention_s, "compute")
        self.now_s = start_s + of.pre_attn_s - of.hidden_s + of.whole_attention_s

    def at(self, start_s: float, name: str, seconds: float, lane: str, **details: Any) -> None:
        if seconds > 0:
            event: Event = {
                "name": name, "ph": "X", "pid": self._node, "tid": self._lanes[lane],
                "ts": start_s * 1e6, "dur": seconds * 1e6,
            }  # fmt: skip
            if details:
                event["args"] = details
            self._events.append(event)


def predicted_timeline(plan: Plan, plan_s: float = 0.0, max_events: int = _MAX_EVENTS) -> dict[str, Any]:
    """The step that predict_step predicts. Blocks are alike: where they are too many, the first are drawn and the
    others are one event in each pass.

    Nodes are processes; each rank has a lane for computing and waiting and one for exchanging. The last event ends at
    the predicted time. plan_s: how long the planner took; it works ahead, on the host, for the next step.
    """
    step, model, ranks_per_node = predict_step(plan), plan.model, plan.cluster.ranks_per_node
    num_blocks = max(1, min(model.num_blocks, max_events // max(1, 20 * plan.num_ranks)))
    others = range(num_blocks, model.num_blocks)
    trains = model.mode != "inference"
    route_s = step.route_s / (4 if trains else 2)
    events: list[Event] = []
    if plan_s > 0:
        host = {"ph": "X", "pid": -1, "tid": 0, "ts": 0}
        events.append(_name("process_name", -1, 0, "host"))
        events.append({**host, "name": "plan the next step", "dur": plan_s * 1e6})
    for rank, time in enumerate(step.ranks):
        node = rank // ranks_per_node
        if rank % ranks_per_node == 0:
            events.append(_name("process_name", node, 0, f"node {node}"))
        events.append(_name("thread_name", node, 2 * rank, f"rank {rank}"))
        events.append(_name("thread_name", node, 2 * rank + 1, f"rank {rank} exchanges"))
        lanes = _Lanes(events, rank, node)
        forward_s = _seconds(time.forward)
        lanes.add("route", route_s, "exchange", tokens=plan.tokens_after[rank])
        for block in range(num_blocks):
            _block(lanes, time.forward, f"block {block}")
        _others(lanes, forward_s, others, "forward")
        lanes.add("reverse_route", route_s, "exchange")
        if trains:
            recomputes = model.recomputes
            lanes.add("reverse_route backward", route_s, "exchange")
            _others(lanes, _seconds(time.backward) + (forward_s if recomputes else 0.0), others, "backward")
            for block in reversed(range(num_blocks)):
                if recomputes:
                    _block(lanes, time.forward, f"block {block} recompute")
                _block(lanes, time.backward, f"block {block} backward", backward=True)
            lanes.add("route backward", route_s, "exchange")
        lanes.add("copy pieces (host)", step.host_s if time.group == step.slowest_group else 0.0)
        rest_s = step.fsdp_s + step.fixed_s
        lanes.add("wait for the slowest ranks", step.total_s - rest_s - lanes.now_s)
        lanes.add("FSDP, not hidden", step.fsdp_s, "exchange")
        lanes.add("launches, embeddings, loss", step.fixed_s)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "predicted_step_s": step.total_s,
            "topology": str(plan.topology),
            "blocks_drawn": num_blocks,
            "blocks": model.num_blocks,
        },
    }


def _seconds(of: PassTime) -> float:
    """Seconds of a pass over a block, with the waits, so that they are the same on every rank of a group."""
    return (
        of.token_s + of.wait_before_s + of.pre_attn_s - of.hidden_s
        + of.whole_attention_s + of.shared_attention_s + of.post_attn_s + of.wait_after_s
    )  # fmt: skip


def _block(lanes: _Lanes, of: PassTime, block: str, backward: bool = False) -> None:
    """Adds the phases of a pass over a block; the backward pass has them in reverse order."""
    of_pass = " backward" if backward else ""
    phases = [
        partial(lanes.add, f"{block}: per-token layers", of.token_s),
        partial(lanes.add, "wait before attention", of.wait_before_s),
        partial(lanes.overlap, of, of_pass),
        partial(lanes.add, f"attention, shared sequences{of_pass}", of.shared_attention_s),
        partial(lanes.add, f"post_attn{of_pass}", of.post_attn_s, "exchange"),
        partial(lanes.add, "wait after attention", of.wait_after_s),
    ]
    for phase in reversed(phases) if backward else phases:
        phase()


def _others(lanes: _Lanes, block_s: float, blocks: range, phase: str) -> None:
    if blocks:
        lanes.add(f"blocks {blocks.start} to {blocks.stop - 1} {phase}, alike", block_s * len(blocks))


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def write_timeline(path: str, trace: Mapping[str, Any]) -> None:
    """Raises OutputError."""
    write_atomically(path, json.dumps(trace) + "\n")
