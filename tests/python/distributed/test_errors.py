"""Mistakes on one rank, over real Gloo groups, which end the process where an all-to-all's splits do not match; and
calls out of order where a balancer has two groups, its own and those of its bags.

Expected: an exception on every rank that names the argument or the calls, what came and what was expected, soon and not
after the group's timeout; after the timeout where a rank makes no call at all, with the word which one that is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import SOON_S, Call, check_errors, errors_of, new_group
from ranks import error_of, run_ranks
from torch import Tensor

from knapformer import Cluster, SequenceBalancer, StateError, TrainedModel

NO_CALL_TIMEOUT_S = 8

LENS = [[3, 4], [5], [9], [2, 2]]
TOKENS = [7, 5, 9, 4]


def _x(rank: int, dtype: torch.dtype = torch.float32, width: int = 4, rows: int | None = None) -> Tensor:
    return torch.zeros(TOKENS[rank] if rows is None else rows, width, dtype=dtype)


def _step(balancer: SequenceBalancer, rank: int) -> None:
    """What all ranks do, and what the odd rank does in another way."""
    balancer.plan_routing(LENS[rank], 8)
    _, h, _ = balancer.route(_x(rank), [torch.zeros(TOKENS[rank], dtype=torch.int64)])
    q = _attend_in_halves(balancer, h.view(-1, 4, 1))
    o = balancer.attention(q, q, q, lambda q, k, v, seq_lens: q)
    balancer.reverse_route(o.flatten(1))


def _attend_in_halves(balancer: SequenceBalancer, q: Tensor) -> Tensor:
    return balancer.post_attn(balancer.pre_attn(q, q, q)[1])[1]


def _routed(balancer: SequenceBalancer, rank: int) -> Tensor:
    balancer.plan_routing(LENS[rank], 8)
    _, h, _ = balancer.route(_x(rank), [torch.zeros(TOKENS[rank], dtype=torch.int64)])
    return h.view(-1, 4, 1)


def _with_ids(call: Callable[[SequenceBalancer, int, list[Tensor]], Any]) -> Callable[[SequenceBalancer, int], Any]:
    def run(balancer: SequenceBalancer, rank: int) -> None:
        balancer.plan_routing(LENS[rank], 8)
        call(balancer, rank, [torch.zeros(TOKENS[rank], dtype=torch.int64)])

    return run


def _raises() -> Iterator[int]:
    yield 5
    raise OSError("no such file")


def _failing_attention(balancer: SequenceBalancer, rank: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        raise MemoryError("attention ran out of memory")

    q = _attend_in_halves(balancer, _routed(balancer, rank))
    try:
        balancer.attention(q, q, q, attend)
    except MemoryError as error:
        raise StateError(str(error)) from error  # as a rank that hears of it would see it


# What rank 1 does instead of a step -> the words that every rank must raise, in an ArgumentError or else below.
MISTAKES: dict[str, tuple[Call, str]] = {
    "lengths_negative": (lambda b, r: b.plan_routing([3, -1], 8), "seq_lens: got -1 for sequence 1"),
    "lengths_float": (lambda b, r: b.plan_routing([3.5], 8), "seq_lens[0]: got 3.5, expected an integer"),
    "lengths_bool": (lambda b, r: b.plan_routing([3, True], 8), "seq_lens[1]: got True, expected an integer"),
    "lengths_large": (lambda b, r: b.plan_routing([2**63], 8), f"seq_lens[0]: got {2**63}, expected"),
    "lengths_iterator": (lambda b, r: b.plan_routing(_raises(), 8), "seq_lens: got what raises OSError: no such file"),
    "lengths_meta": (
        lambda b, r: b.plan_routing(torch.ones(1, dtype=torch.int64, device="meta"), 8),
        "seq_lens: got a tensor that raises NotImplementedError: ",
    ),
    "lengths_sparse": (
        lambda b, r: b.plan_routing(torch.ones(1, dtype=torch.int64).to_sparse(), 8),
        "seq_lens: got a tensor that raises ",
    ),
    "lengths_unsigned": (
        lambda b, r: b.plan_routing(torch.tensor([2**63 + 1], dtype=torch.uint64), 8),
        f"seq_lens[0]: got {2**63 + 1}, expected",
    ),
    "lengths_float_tensor": (
        lambda b, r: b.plan_routing(torch.ones(2), 8),
        "seq_lens[0]: got 1.0, expected an integer",
    ),
    "lengths_matrix": (
        lambda b, r: b.plan_routing(torch.ones(2, 2, dtype=torch.int64), 8),
        "seq_lens[0]: got [1, 1], expected an integer",
    ),
    "lengths_none": (lambda b, r: b.plan_routing(None, 8), "seq_lens: got None"),
    "width_differs": (lambda b, r: b.plan_routing([3], 16), "d_model: got 16 on rank 1, expected 8, as on rank 0"),
    "width_no_integer": (lambda b, r: b.plan_routing([3], "wide"), "d_model: got 'wide', expected"),
    "width_bool": (lambda b, r: b.plan_routing([5], True), "d_model: got True, expected"),
    "width_large": (lambda b, r: b.plan_routing([5], 2**70), f"d_model: got {2**70}, expected"),
    "rows": (_with_ids(lambda b, r, ids: b.route(_x(r, rows=3), ids)), "x: got 3 rows (shape [3, 4]), expected 5 rows"),
    "feature_rows": (
        _with_ids(lambda b, r, ids: b.route(_x(r), [ids[0][:2]])),
        "features[0]: got 2 rows (shape [2]), expected 5 rows",
    ),
    "feature_device": (
        _with_ids(lambda b, r, ids: b.route(_x(r), [ids[0].to("meta")])),
        "features[0]: got meta, expected cpu, the device of x",
    ),
    "returned_rows": (lambda b, r: b.reverse_route(_routed(b, r)[:1].flatten(1)), "x: got 1 rows"),
    "no_tensor": (_with_ids(lambda b, r, ids: b.route(None, ids)), "x: got NoneType, expected a tensor"),
    "dtype": (_with_ids(lambda b, r, ids: b.route(_x(r, torch.float64), ids)), "route: x: got "),
    "shape": (_with_ids(lambda b, r, ids: b.route(_x(r, width=6), ids)), "(rows, 6) on cpu on rank 1"),
    "device": (_with_ids(lambda b, r, ids: b.route(_x(r).to("meta"), ids)), "x: got a tensor on meta"),
    "quantized": (
        _with_ids(lambda b, r, ids: b.route(torch.quantize_per_tensor(_x(r), 1.0, 0, torch.qint8), ids)),
        "x: got a quantized tensor",
    ),
    "requires_grad": (_with_ids(lambda b, r, ids: b.route(_x(r).requires_grad_(), ids)), "x.requires_grad: got "),
    "features_missing": (_with_ids(lambda b, r, ids: b.route(_x(r))), "features[0]: got "),
    "features_more": (_with_ids(lambda b, r, ids: b.route(_x(r), ids * 2)), "features[1]: got "),
    "features_tensor": (_with_ids(lambda b, r, ids: b.route(_x(r), ids[0])), "features: got Tensor, expected a list"),
    "side_rows": (
        _with_ids(lambda b, r, ids: b.route(_x(r), ids, [torch.zeros(2, 1)])),
        "sequence_features[0]: got 2 rows (shape [2, 1]), expected 1 rows, one for each sequence",
    ),
    "heads": (lambda b, r: b.pre_attn(*(_routed(b, r).reshape(-1, 2, 2),) * 3), "heads: got "),
    "kv_heads": (
        lambda b, r: b.pre_attn(_routed(b, r), *(torch.zeros(6, 3, 1),) * 2),
        "k: got 3 heads, expected a divisor",
    ),
    "v_heads": (
        lambda b, r: b.pre_attn((h := _routed(b, r)), h[:, :1], h),
        "v: got 4 heads, expected 1 heads, as k has",
    ),
    "no_heads": (lambda b, r: b.pre_attn(*(_routed(b, r)[:, :0],) * 3), "q: got 0 heads, expected"),
    "flat": (
        lambda b, r: b.attention(*(_routed(b, r).flatten(1),) * 3, lambda q, *_: q),
        "q: got a tensor of shape [6, 4], expected at least 3 dimensions",
    ),
    "o_heads": (
        lambda b, r: b.post_attn(b.pre_attn(*(_routed(b, r),) * 3)[1][:, :1]),
        "o: got 1 heads, expected 2 heads",
    ),
    "masks": (lambda b, r: b.plan_routing([5], 8, ["full", "causal"]), "masks: got 2 masks, expected one"),
    "work": (lambda b, r: b.plan_routing([5, 6], 8, work=[1.0]), "work: got 1 numbers, expected one"),
    "work_negative": (
        lambda b, r: b.plan_routing([5, 6], 8, work=[1.0, -2]),
        "work[1]: got -2, expected a number from",
    ),
    "work_text": (lambda b, r: b.plan_routing([5], 8, work=["a"]), "work[0]: got 'a', expected a number"),
    "work_of_some": (
        lambda b, r: b.plan_routing([5], 8, work=[1.0]),
        "work: got none on rank 0, expected that of each sequence, as on rank 1",
    ),
    "masks_number": (lambda b, r: b.plan_routing([5], 8, 5), "masks: got 5, expected a list"),
    "masks_text": (lambda b, r: b.plan_routing([5], 8, "full"), "masks: got 'full', expected a list"),
    "masks_none": (lambda b, r: b.plan_routing([5], 8, [None]), "masks[0]: got None, expected"),
    "mask_name": (lambda b, r: b.plan_routing([5], 8, ["diagonal"]), "mask: got 'diagonal'"),
    "mask_of_kernel": (
        lambda b, r: b.pre_attn(*(_routed(b, r),) * 3, "causal"),
        "mask: got 'causal', which leaves 6 (query, key) pairs of sequence 0 (3 tokens), expected 'full'",
    ),
    "attended_shape": (
        lambda b, r: b.attention(*(_attend_in_halves(b, _routed(b, r)),) * 3, lambda q, k, v, seq_lens: q[:, :1]),
        "attend: got a result of shape [12, 1, 1], expected (12 tokens, 2 heads, ...), as q has",
    ),
    "attended_nothing": (
        lambda b, r: b.attention(*(_attend_in_halves(b, _routed(b, r)),) * 3, lambda q, k, v, seq_lens: None),
        "attend's result: got NoneType, expected a tensor",
    ),
    "no_plan": (lambda b, r: b.follow(3), "plan: got 3, expected a Plan"),
    "moving_nothing": (lambda b, r: b.start_moving(3), "ahead: got 3, expected what start_planning returned"),
    "moved_nothing": (lambda b, r: b.finish_moving(None), "ahead: got None, expected what start_planning returned"),
    "no_samples": (lambda b, r: b.start_planning((), 8, samples=3), "samples: got 3, expected Samples, or None"),
    "ended_text": (lambda b, r: b.start_planning([5], 8, ended="no"), "ended: got 'no', expected True or False"),
    "failure_number": (lambda b, r: b.start_planning([5], 8, failure=3), "failure: got 3, expected text"),
    "order": (lambda b, r: b.post_attn(_routed(b, r)), "pre_attn: has not been called since plan_routing"),
    "other_call": (lambda b, r: b.reverse_route(_routed(b, r).flatten(1)), "call: got "),
    "call_left_out": (lambda b, r: (_routed(b, r), _step(b, r)), "call: got "),
    "attention_raises": (_failing_attention, "attention ran out of memory"),
    "reported": (lambda b, r: (b.report("the data loader ended"), b.plan_routing([3], 8)), "the data loader ended"),
}
STATE_ERRORS = {"order", "other_call", "call_left_out", "attention_raises", "reported"}


def _instead(mistake: Call, step: Call, stopped: bool) -> Call:
    """Rank 1's mistake, and the other ranks' step."""

    def call(balancer: SequenceBalancer, rank: int) -> None:
        try:
            (mistake if rank == 1 else step)(balancer, rank)
            step(balancer, rank)  # a rank whose own calls went through meets the others here
        finally:
            if stopped:
                kind, message, _ = error_of(lambda: balancer.plan_routing(LENS[rank], 8))
                assert kind == "StateError" and "stopped by an earlier error" in message, message

    return call


def _make_mistakes(rank: int, world_size: int, warm_steps: int) -> dict[str, tuple[str, str, float]]:
    calls = {name: _instead(mistake, _step, stopped=True) for name, (mistake, _) in MISTAKES.items()}
    return errors_of(rank, calls, "g2n1", before=lambda b, r: [_step(b, r) for _ in range(warm_steps)])


@pytest.mark.parametrize("warm_steps", [0, 2], ids=["at_once", "after_steps"])
def test_a_mistake_on_one_rank_is_an_error_on_all(warm_steps: int) -> None:
    by_rank = run_ranks(_make_mistakes, 2, warm_steps, timeout_s=300)
    kinds = {name: "StateError" if name in STATE_ERRORS else "ArgumentError" for name in MISTAKES}
    check_errors(by_rank, {name: (kinds[name], re.escape(words)) for name, (_, words) in MISTAKES.items()})


def _routed_with_gradients(balancer: SequenceBalancer, rank: int) -> Tensor:
    balancer.plan_routing(LENS[rank], 8)
    return balancer.route(_x(rank).requires_grad_())[1]


def _attended(balancer: SequenceBalancer, h: Tensor) -> Tensor:
    return _attend_in_halves(balancer, h.view(-1, 4, 1)).flatten(1)


def _trained(balancer: SequenceBalancer, rank: int) -> None:
    balancer.reverse_route(_attended(balancer, _routed_with_gradients(balancer, rank)))[1].sum().backward()


def _other_heads(balancer: SequenceBalancer, rank: int) -> None:
    q = _routed_with_gradients(balancer, rank).view(-1, 4, 1)
    balancer.pre_attn(q.view(-1, 2, 2), q, q)


# What rank 1 of 4, in bags of 2, does instead of a step -> what every rank must raise.
OUT_OF_ORDER: dict[str, tuple[Call, str]] = {
    "whole_group_first": (
        lambda b, r: b.reverse_route(_routed_with_gradients(b, r)),
        "(?=.*reverse_route)(?=.*pre_attn)",
    ),
    "no_backward": (
        lambda b, r: b.reverse_route(_attended(b, _routed_with_gradients(b, r))),
        "(?=.*plan_routing)(?=.*reverse_route backward)",
    ),
    "no_return": (
        lambda b, r: _attended(b, _routed_with_gradients(b, r)).sum().backward(),
        "(?=.*reverse_route)(?=.*backward)",
    ),
    "other_heads": (_other_heads, "k: got 4 heads, expected a divisor of q's 2 heads"),  # the other bag hears, too
    "waits_for_a_plan": (
        lambda b, r: (_routed_with_gradients(b, r), b.finish_planning(b.start_planning(LENS[r], 8))),
        "(?=.*start_planning)(?=.*(pre_attn|reverse_route))",
    ),
}
_kept: list[SequenceBalancer] = []


def _call_out_of_order(rank: int, world_size: int, warm_steps: int) -> dict[str, tuple[str, str, float]]:
    def before(balancer: SequenceBalancer, rank: int) -> None:
        for _ in range(warm_steps):
            _trained(balancer, rank)

    calls = {name: _instead(mistake, _trained, stopped=False) for name, (mistake, _) in OUT_OF_ORDER.items()}
    errors = errors_of(rank, calls, "g2n2", before)
    # A rank that makes no call: the others hear of it at the timeout, and of the rank.
    balancer = SequenceBalancer("g2n2", group=new_group(NO_CALL_TIMEOUT_S))
    before(balancer, rank)
    dist.barrier()
    _kept.append(balancer)  # of rank 1, which lives on without a word until the others are done
    if rank != 1:
        errors["no_call"] = error_of(lambda: _trained(balancer, rank))
    return errors


@pytest.mark.parametrize("warm_steps", [0, 3], ids=["first_step", "after_steps"])
def test_a_call_out_of_order_is_named_on_all_ranks(warm_steps: int) -> None:
    expected = {name: ("", words) for name, (_, words) in OUT_OF_ORDER.items()}
    by_rank = run_ranks(_call_out_of_order, 4, warm_steps, timeout_s=120)
    check_errors(by_rank, expected | {"no_call": ("", r"plan_routing.*rank 1 \(in no call\)")})


def _balancers_in_turn(rank: int, world_size: int) -> tuple[str, str, float]:
    """Rank 1 plans by the second before the first, once ranks no longer ask each other."""
    balancers = [SequenceBalancer("g1n2", d_model=8) for _ in range(2)]
    for _ in range(4):
        for number, balancer in enumerate(balancers):
            assert balancer.plan_routing([10 * number + rank + 1]).num_tokens == 20 * number + 3
    return error_of(lambda: [balancer.plan_routing([4]) for balancer in balancers[:: -1 if rank == 1 else 1]])


def test_balancers_of_a_group_in_another_order_are_an_error_on_all_ranks() -> None:
    for rank, (kind, words, seconds) in enumerate(run_ranks(_balancers_in_turn, 2)):
        assert kind == "StateError" and seconds < SOON_S
        assert f"plan_routing: got of rank {1 - rank} lengths of balancer {2 - rank}, " in words


def _of_every_field(argument: str, of: Cluster | TrainedModel) -> dict[str, tuple[dict[str, Any], str]]:
    """Options that differ in one field of the cluster or the model."""
    others = {
        name: "lora" if name == "mode" else (not value if isinstance(value, bool) else value + 1)
        for name, value in of.to_dict().items()
        if name != "num_kv_heads"  # needs num_heads, which differ then
    }
    return {
        f"{argument}.{name}": ({argument: of.replace(**{name: other})}, f"{argument}.{name}: got ")
        for name, other in others.items()
    }


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    **_of_every_field("cluster", Cluster()),
    **_of_every_field("model", TrainedModel()),
    "topology": ({"topology": "g1n2"}, "topology: got "),
    "gamma": ({"gamma": 0.5}, "gamma: got "),
    "effort": ({"effort": "low"}, "effort: got "),
    "mask": ({"mask": "causal"}, "mask: got "),
    "cluster_name": ({"cluster": "cpu"}, "cluster.flops_per_s: got "),
    "num_heads": ({"num_heads": 12}, "model.num_heads: got "),
    "rank_speed": ({"rank_speed": [1, 0.5]}, "rank_speed: got "),
    "max_tokens_per_rank": ({"max_tokens_per_rank": 9}, "max_tokens_per_rank: got "),
    "bad_rank_speed": ({"rank_speed": [1, 2, 3]}, "rank_speed: got 3 "),
    "bad_topology": ({"topology": "g2x"}, "topology: got "),
    "bad_gamma": ({"gamma": float("nan")}, "gamma: got nan"),
    "ranks_do_not_divide": ({"topology": "g3n1"}, "topology: got "),
    "topology_none": ({"topology": None}, "topology: got g2/1n1 on rank 1, expected g2n1, as on rank 0"),
    "sync": ({"sync": "step"}, "sync: got "),
    "heads_negative": ({"num_heads": -1}, "num_heads: got -1"),
}


def _make_with_odd_options(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    outcomes = {}
    for name, (odd, _) in OPTIONS.items():
        group = dist.new_group([0, 1])
        options = {"topology": "g2n1", **(odd if rank == 1 else {})}
        outcomes[name] = error_of(lambda options=options, group=group: SequenceBalancer(**options, group=group))
        # Nothing was in flight: the group serves the next balancer.
        _step(SequenceBalancer("g2n1", group=group), rank)
    return outcomes


def test_options_that_differ_are_an_error_on_all_ranks() -> None:
    expected = {name: ("ArgumentError", re.escape(words)) for name, (_, words) in OPTIONS.items()}
    check_errors(run_ranks(_make_with_odd_options, 2, timeout_s=120), expected)


def _without_a_bags_group(
    rank: int, world_size: int, topology: str, of_another: bool = False, parent: dist.ProcessGroup | None = None
) -> tuple[str, str, float]:
    from knapformer import balancer

    if rank == 1:
        group = dist.new_group([1], use_local_synchronization=True) if of_another else None
        balancer.bag_group = lambda *_: group  # type: ignore[assignment, return-value]
    return error_of(lambda: SequenceBalancer(topology, group=parent))


@pytest.mark.parametrize("of_another", [False, True])
def test_a_bag_without_its_group_is_an_error_on_all_ranks(of_another: bool) -> None:
    words = "a group in which this is rank 0 of 1, expected" if of_another else "no group for bag 0"
    for _, message, seconds in run_ranks(_without_a_bags_group, 2, "g2n1", of_another, timeout_s=60):
        assert f"make_bag_group: got {words}" in message and seconds < SOON_S


def _alone_without_a_bags_group(rank: int, world_size: int) -> float:
    parent = new_group(6)  # not the default group, in whose timeout a busy machine starts the ranks
    begin = time.monotonic()
    try:
        assert _without_a_bags_group(rank, world_size, "g2n2", parent=parent)[0] == "StateError"
    except RuntimeError:  # torch's, where a rank waits for rank 1 in making their group
        assert rank == 0
    return time.monotonic() - begin


def test_a_rank_alone_in_making_its_bags_group_ends_in_the_groups_timeout() -> None:
    assert max(run_ranks(_alone_without_a_bags_group, 4)) < 30
