"""Ranks without rows, where what makes x is frozen and trained in turn.

Oracle: one process with the tokens of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from balancer_checks import Call, Check, causal_free_attention, check_errors, errors_of, run_checks
from knapformer.checkpointing import keep_exchanges
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from knapformer import BalancedLoader, SequenceBalancer

WIDTH = 8
# By step, of each rank. In the fourth step all ranks have sequences, in the fifth no rank has any.
LENS: dict[int, list[list[list[int]]]] = {
    2: [[[5, 6], []], [[], [7]], [[3], []], [[4], [2]], [[], []], [[6], []]],
    4: [
        [[5], [], [9, 2], []],
        [[], [], [7], [8]],
        [[], [30], [], []],
        [[4], [2], [3], [1]],
        [[]] * 4,
        [[6], [], [], [2]],
    ],
}  # fmt: skip
TRAINS = [True, False, True, False, False, True, True, False, False, True, False, True]  # in turn with six lengths


def _topologies(world_size: int) -> list[str]:
    return {2: ["g2n1", "g2/1n1", "g1n2"], 4: ["g2n2", "g4/2/1n1", "g4n1"]}[world_size]


def _steps(world_size: int) -> Iterator[tuple[int, list[list[int]], bool]]:
    for step, trains in enumerate(TRAINS):
        yield step, LENS[world_size][step % 6], trains


class _Model(torch.nn.Module):
    """An embedding, and a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Linear(3, WIDTH, dtype=torch.float64)
        self.side = torch.nn.Linear(2, WIDTH, dtype=torch.float64)
        self.block = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def embedded(self, tokens: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), self.side(sides)

    def loss(self, h: Tensor, side: Tensor, lens: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        h = h + side.repeat_interleave(lens.long(), 0)
        h = h + attention(self.block(h).unflatten(1, (2, 4))).flatten(1)
        return h.square().sum()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}


def _data(lens: list[list[int]], rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and sides of this rank's sequences, and of all: the same numbers on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    counts, numbers = [sum(of_rank) for of_rank in lens], [len(of_rank) for of_rank in lens]
    tokens = torch.randn(sum(counts), 3, generator=generator, dtype=torch.float64)
    sides = torch.randn(sum(numbers), 2, generator=generator, dtype=torch.float64)
    flat = torch.tensor([length for of_rank in lens for length in of_rank], dtype=torch.int32)
    if rank < 0:
        return tokens, sides, flat
    return tokens.split(counts)[rank], sides.split(numbers)[rank], flat.split(numbers)[rank]


def _loss_of_one_process(model: _Model, lens: list[list[int]], seed: int) -> Tensor:
    tokens, sides, flat = _data(lens, -1, seed)
    x, side = model.embedded(tokens, sides)
    return model.loss(x, side, flat, lambda q: causal_free_attention(q, q, q, flat))


def _loss(balancer: SequenceBalancer, model: _Model, lens: list[list[int]], rank: int, seed: int) -> Tensor:
    x, side = model.embedded(*_data(lens, rank, seed)[:2])
    chunk_lens, h, _, (side,) = balancer.route(x, [], [side])

    def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        return causal_free_attention(q, k, v, seq_lens) if len(q) else q.new_zeros(q.shape)

    loss = model.loss(h, side, chunk_lens, lambda q: balancer.attention(q, q, q, attend))
    assert bool(torch.isfinite(balancer.reverse_route(h)[1]).all())
    return loss


def _check_gradients(model: _Model, expected: Tensor | list[Tensor]) -> None:
    """Those of all ranks together are those of the loss of one process. Then there are none."""
    sums = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        sums[name] = parameter.grad.clone() if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(sums[name])
    model.zero_grad()
    for loss in expected if isinstance(expected, list) else [expected]:
        loss.backward()
    for name, total in sums.items():
        of_one = model.get_parameter(name).grad
        torch.testing.assert_close(total, torch.zeros_like(total) if of_one is None else of_one)
    model.zero_grad()


def check_what_makes_x_is_frozen_in_turn(rank: int, world_size: int) -> None:
    for topology in _topologies(world_size):
        balancer, model = SequenceBalancer(topology, d_model=WIDTH), _Model()
        for step, lens, trains in _steps(world_size):
            model.embed.requires_grad_(trains)
            model.side.requires_grad_(step % 3 == 0)
            model.block.requires_grad_(step % 4 != 1)
            balancer.plan_routing(lens[rank], WIDTH)
            loss = _loss(balancer, model, lens, rank, step)
            if loss.requires_grad:
                loss.backward()
            of_one = _loss_of_one_process(model, lens, step)
            if of_one.requires_grad:
                _check_gradients(model, of_one)
            if step % 3 == 1:  # an evaluation, maybe with other lengths
                balancer.plan_routing(LENS[world_size][step % 2][rank], WIDTH)
                with torch.no_grad():
                    _loss(balancer, model, LENS[world_size][step % 2], rank, step)


def check_two_models_in_turn(rank: int, world_size: int) -> None:
    """As in a GAN: each is trained while the other is frozen, both in one step."""
    for topology in _topologies(world_size):
        balancer, models = SequenceBalancer(topology, d_model=WIDTH), [_Model(), _Model()]
        lens = LENS[world_size][0]
        for step, turn in enumerate([0, 0, 1, 0, 1, 1]):
            balancer.plan_routing(lens[rank], WIDTH)
            for i, model in enumerate(models):
                model.embed.requires_grad_(i == turn)
                model.side.requires_grad_(i == turn)
                _loss(balancer, model, lens, rank, step).backward()
            for model in models:
                _check_gradients(model, _loss_of_one_process(model, lens, step))


def check_equal_calls_in_a_step(rank: int, world_size: int) -> None:
    """In the first step, too."""
    for requires in ([1, 1, 1, 0], [0, 1, 0, 0, 1], [1, 0, 1]):
        balancer = SequenceBalancer(f"g{world_size}n1", d_model=WIDTH)
        for step in range(3):
            balancer.plan_routing([3, 4] if rank == 0 else [], WIDTH)
            num_tokens = 7 if rank == 0 else 0
            weight = torch.ones(WIDTH, requires_grad=True)
            total = torch.zeros(())
            for i, of_call in enumerate(requires if step < 2 else requires[::-1]):
                x = torch.full((num_tokens, WIDTH), float(i + 1))
                _, h, _ = balancer.route(x * weight if of_call else x)
                assert h.requires_grad == bool(of_call)
                total = total + h.sum()
            total.backward()
            order = requires if step < 2 else requires[::-1]
            assert weight.grad is not None
            assert weight.grad.tolist() == [num_tokens * sum((i + 1.0) * r for i, r in enumerate(order))] * WIDTH


def check_micro_batches(rank: int, world_size: int) -> None:
    """Of steps planned whole, in which a rank has no rows in some or all micro-batches."""
    for topology in _topologies(world_size):
        balancer, model = SequenceBalancer(topology, d_model=WIDTH), _Model()

        def attention(q: Tensor, balancer: SequenceBalancer = balancer) -> Tensor:
            return balancer.attention(q, q, q, causal_free_attention)

        for step, lens, trains in _steps(world_size):
            model.embed.requires_grad_(trains)
            step_plan = balancer.plan_routing(lens[rank], WIDTH, micro_batches=2)
            tokens, sides, own = _data(lens, rank, step)
            of_sequence = list(tokens.split(own.tolist()))
            for micro_batch in range(2):
                plan = balancer.follow(step_plan, micro_batch)
                mine = step_plan.home_sequences(rank, micro_batch)
                x, side = model.embedded(torch.cat([of_sequence[i] for i in mine]) if mine else tokens[:0], sides[mine])
                assert len(x) == plan.tokens_before[rank]
                chunk_lens, h, _, (side,) = balancer.route(x, [], [side])
                loss = model.loss(h, side, chunk_lens, attention)
                loss.backward()
            _check_gradients(model, _loss_of_one_process(model, lens, step))


def check_plans_made_ahead(rank: int, world_size: int) -> None:
    for topology in _topologies(world_size):
        balancer, model = SequenceBalancer(topology, d_model=WIDTH), _Model()
        batches = [{"seq_lens": lens[rank], "step": step} for step, lens, _ in _steps(world_size)]
        num_steps = 0
        loader: Any = BalancedLoader(batches, balancer, seq_lens=itemgetter("seq_lens"), empty=lambda: {"seq_lens": []})
        for batch, _ in loader:
            step, lens = batch["step"], LENS[world_size][batch["step"] % 6]
            model.embed.requires_grad_(TRAINS[step])
            _loss(balancer, model, lens, rank, step).backward()
            _check_gradients(model, _loss_of_one_process(model, lens, step))
            num_steps += 1
        assert num_steps == len(TRAINS)


def check_blocks_that_are_computed_again(rank: int, world_size: int) -> None:
    """Checkpointed blocks that hold the attention, where ranks have no tokens."""
    for topology in _topologies(world_size):
        for kind in ("all", "kept", "reentrant"):
            reentrant = kind == "reentrant"
            options: dict[str, Any] = {"context_fn": keep_exchanges} if kind == "kept" else {}
            balancer = SequenceBalancer(topology, d_model=WIDTH)
            blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
            for step, frozen in enumerate([0, 0, 1, 2, 0, 1, 1, 2, 0]):
                for i, block in enumerate(blocks):
                    block.requires_grad_(i >= frozen)
                lens: list[list[int]] = [[3]] + [[] for _ in range(world_size - 1)]
                balancer.plan_routing(lens[rank], WIDTH)
                _, h, _ = balancer.route(torch.ones(sum(lens[rank]), WIDTH, requires_grad=reentrant))
                for block in blocks:

                    def run(h: Tensor, block: torch.nn.Module = block) -> Tensor:
                        q, k, v = block(h).unflatten(1, (6, 4)).split(2, 1)
                        return h + balancer.attention(q, k, v, causal_free_attention).flatten(1)  # noqa: B023

                    h = checkpoint(run, h, use_reentrant=reentrant, **options)
                balancer.reverse_route(h)[1].sum().backward()
                trained = [block.weight.grad is not None for block in blocks]
                assert trained == [i >= frozen for i in range(3)], (step, trained)
                blocks.zero_grad()


def check_gradients_of_gradients(rank: int, world_size: int) -> None:
    """Of a penalty of every second step, on ranks that hold nothing before or after."""
    for topology in _topologies(world_size):
        balancer = SequenceBalancer(topology, d_model=WIDTH)
        for lens in ([[3, 4]] + [[]] * (world_size - 1), [[]] * (world_size - 1) + [[5]]):
            for penalty in (True, False, True, True):
                balancer.plan_routing(lens[rank], WIDTH)
                x = torch.full((sum(lens[rank]), WIDTH), 2.0, dtype=torch.float64, requires_grad=True)
                _, h, _ = balancer.route(x)
                loss = balancer.reverse_route(h**3)[1].sum()
                (gradient,) = torch.autograd.grad(loss, x, create_graph=penalty)
                torch.testing.assert_close(gradient, torch.full_like(x, 12.0))
                if penalty:
                    (second,) = torch.autograd.grad(gradient.sum(), x)
                    torch.testing.assert_close(second, torch.full_like(x, 12.0))


CHECKS: list[Check] = [
    check_what_makes_x_is_frozen_in_turn,
    check_two_models_in_turn,
    check_equal_calls_in_a_step,
    check_micro_batches,
    check_plans_made_ahead,
    check_blocks_that_are_computed_again,
    check_gradients_of_gradients,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_without_rows(world_size: int) -> None:
    run_checks(CHECKS, world_size)


# What rank 0, which has all rows, and rank 1, which has none, do in a step -> the words that both raise.
CallOfX = Callable[[SequenceBalancer, Tensor], Any]


def _report(balancer: SequenceBalancer, x: Tensor) -> None:
    balancer.report("out of memory")
    balancer.route(x)


def _route(balancer: SequenceBalancer, x: Tensor) -> None:
    balancer.route(x)


def _plan(balancer: SequenceBalancer, x: Tensor) -> None:
    balancer.plan_routing([3], WIDTH)


MISTAKES: dict[str, tuple[CallOfX, CallOfX, str]] = {
    "other_features": (lambda b, x: b.route(x, [x]), _route, "route: features[0]: got none on rank 1, expected Float"),
    "other_dtype": (lambda b, x: b.route(x.double()), _route, "route: x: got Float (rows, 8) on cpu on rank 1"),
    "other_rows": (lambda b, x: b.route(x[1:]), _route, "x: got 2 rows (shape [2, 8]), expected 3 rows"),
    "no_gradients": (lambda b, x: torch.no_grad()(b.route)(x), _route, "route on rank 1, expected route without grad"),
    "no_gradients_without_rows": (
        _route,
        lambda b, x: torch.no_grad()(b.route)(x),
        "route without gradients on rank 1",
    ),
    "plan_with_rows": (_plan, _route, "call: got route on rank 1, expected plan_routing, as on rank 0"),
    "plan_without_rows": (_route, _plan, "call: got plan_routing on rank 1, expected route, as on rank 0"),
    "requires_grad": (
        _route,
        lambda b, x: b.route(x.detach()),
        "route: x.requires_grad: got False on rank 1, expected True, as on rank 0",
    ),
    "report": (_report, _route, "out of memory"),
}


def _mistakes(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    def call_of(name: str, num_steps: int) -> Call:  # by which the call is known
        def run(balancer: SequenceBalancer, rank: int) -> None:
            for call in [_route] * num_steps + [MISTAKES[name][rank]]:
                balancer.plan_routing([3] if rank == 0 else [], WIDTH)
                call(balancer, torch.ones(3 if rank == 0 else 0, WIDTH, requires_grad=True))

        return run

    return errors_of(rank, {f"{name}, {n}": call_of(name, n) for name in MISTAKES for n in (0, 1, 3)}, "g2n1")


def test_mistakes_become_errors_on_both_ranks_soon() -> None:
    by_rank = run_ranks(_mistakes, 2, timeout_s=200)
    check_errors(by_rank, {case: ("", re.escape(MISTAKES[case.split(",")[0]][2])) for case in by_rank[0]})
