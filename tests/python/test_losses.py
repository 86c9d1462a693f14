"""Losses over ranks: loss and gradients as one process with all the data has them, in float64 to 1e-10."""

from __future__ import annotations

import functools
import itertools
import random
import re
import sys
import types

import pytest
import torch
from distributed.ranks import run_ranks
from knapformer.losses import count_over_ranks, global_mean, sample_mean, token_mean
from losses_ranks import Case, Outcome, Step, alone, run_accumulated, run_cases, run_misuse, run_naive
from torch import Tensor

import knapformer

LENGTHS = ((13, 1, 40, 5, 5, 2), (3, 7, 21), (9,), ())  # of the samples of each step; the last step has none anywhere


def shared(world: int, seed: int) -> tuple[Step, ...]:
    """The same samples, in the same order, cut at random places into the parts of the ranks. Some get none."""
    draw = random.Random(seed)
    steps = []
    for lengths in LENGTHS:
        cuts = [0, *sorted(draw.randint(0, len(lengths)) for _ in range(world - 1)), len(lengths)]
        steps.append(tuple(tuple(lengths[a:b]) for a, b in itertools.pairwise(cuts)))
    return tuple(steps)


def all_on(world: int, rank: int) -> tuple[Step, ...]:
    return tuple(tuple(lengths if r == rank else () for r in range(world)) for lengths in LENGTHS)


TOPOLOGIES = {1: (None, "g1n1"), 2: (None, "g1n2", "g2n1"), 4: (None, "g1n2+g2n1", "g4n1", "g2n1")}


@functools.cache
def cases_of(world: int) -> dict[str, Case]:
    sharings = {"shared one way": shared(world, 1), "another": shared(world, 2), "all on one": all_on(world, world - 1)}
    wrappers, counts, topologies = ("ddp", "fsdp", "sum"), ("reduced", "plan", "total"), TOPOLOGIES[world]
    cases = {}
    # Each sharing with each wrapper, each wrapper with each source of the count.
    for i, mean in enumerate(("token", "sample")):
        for j, (sharing, steps) in enumerate(sharings.items()):
            for k, wrapper in enumerate(wrappers):
                count, topology = counts[(j + k) % 3], topologies[(i + 3 * j + k) % len(topologies)]
                # A step without any data has nothing to plan for a balancer.
                kept = steps if topology is None else steps[:-1]
                name = f"{world} ranks, per {mean}, {sharing}, {wrapper}, count {count}, {topology}"
                cases[name] = Case(mean, wrapper, count, topology, kept)
    return cases


@functools.cache
def outcomes_of(world: int) -> dict[str, list[Outcome]]:
    """Of each case, by rank; all cases in one start of the ranks."""
    cases = cases_of(world)
    by_rank = run_ranks(run_cases, world, list(cases.values()), timeout_s=300)
    return {name: [of_rank[i] for of_rank in by_rank] for i, name in enumerate(cases)}


@functools.cache
def expected(mean: str) -> Outcome:
    return alone(mean, all_on(1, 0))


def relative_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    difference = sum((got[name] - grad).square().sum().item() for name, grad in wanted.items()) ** 0.5
    size = sum(grad.square().sum().item() for grad in wanted.values()) ** 0.5
    return difference / size if size else difference


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (1, 2, 4) for name in cases_of(world)])
def test_equal_to_one_process_with_all_the_data(world: int, name: str) -> None:
    case, outcome = cases_of(world)[name], outcomes_of(world)[name]
    for of_rank in outcome:
        for (loss, grads), (wanted_loss, wanted_grads) in zip(of_rank, expected(case.mean), strict=False):
            assert loss == pytest.approx(wanted_loss, rel=1e-10)
            assert relative_error(grads, wanted_grads) <= 1e-10
    assert all(len(of_rank) == len(case.steps) for of_rank in outcome)


def test_the_cases_have_what_they_are_for() -> None:
    for world in (2, 4):
        cases = cases_of(world).values()
        assert {case.topology for case in cases} == set(TOPOLOGIES[world])
        assert any(any(step) and not all(step) for case in cases for step in case.steps), "no rank without data"
        assert any(not any(step) for case in cases for step in case.steps), "no step without data"
    token, sample = expected("token"), expected("sample")
    assert relative_error(token[0][1], sample[0][1]) > 0.05
    assert all(sum(g.square().sum().item() for g in grads.values()) > 0 for _, grads in token[:3])


def test_the_mean_of_means_is_another_gradient() -> None:
    case = Case("token", "ddp", "reduced", None, (((13, 1, 40), (5, 5, 2)),))
    ((_, naive),) = run_ranks(run_naive, 2, case)[0]
    assert relative_error(naive, alone("token", case.steps)[0][1]) > 0.05


def test_accumulated_over_micro_batches() -> None:
    steps = shared(2, 3)
    merged: Step = tuple(tuple(n for step in steps for n in step[rank]) for rank in range(2))
    wanted: dict[str, Tensor] = {}
    total = sum(sum(lengths) for lengths in LENGTHS)
    for (_, grads), lengths in zip(alone("token", all_on(1, 0)), LENGTHS, strict=True):
        for name, grad in grads.items():
            wanted[name] = wanted.get(name, torch.zeros_like(grad)) + grad * (sum(lengths) / total)
    assert sum(map(len, merged)) == 10
    for got in run_ranks(run_accumulated, 2, steps):
        assert relative_error(got, wanted) <= 1e-10


def test_the_plan_of_a_step_is_refused_with_what_to_give() -> None:
    """And not taken for one plan: the mean over a micro-batch is not that over the step."""
    step = knapformer.plan([[3, 4, 2]], "g1n1", d_model=8, micro_batches=2)
    ones = torch.ones(9)
    for mean, count in (
        (lambda **counts: token_mean(ones, **counts), 9),
        (lambda **counts: sample_mean(ones, [3, 4, 2], **counts), 3),
    ):
        with pytest.raises(ValueError, match=r"plan: got that of 2 micro-batches") as refused:
            mean(plan=step)
        (advice,) = re.findall(r"total=(.*)", str(refused.value))
        assert eval(advice, {"plan": step}) == count
        assert mean(total=count) == 1


def test_plans_that_do_not_fit_are_named() -> None:
    first, second = run_ranks(run_misuse, 2)
    assert first[0].startswith("per_token: got 6 tokens, expected the 7 that the plan has of this rank")
    assert second[0].startswith("per_token: got 6 tokens, expected the 5")
    assert first[1].startswith("seq_lens: got 3 samples, expected the 2") and "expected the 1" in second[1]
    assert first[2].startswith("plan: got one over 1 ranks, expected one over the 2") and second[2] == first[2]
    assert first[3:] == [
        "per_token: got float, expected real numbers, (tokens,)",
        "count: got 1.5, expected an integer, at least 0",
        "group: got -100, expected a process group that this rank is in",
    ]
    assert all(message.startswith("count: got none from another rank") for message in second[3:5])
    assert second[5:] == ["no error"]


def test_one_process_without_torch_distributed() -> None:
    per_token = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    assert token_mean(per_token).item() == 3.0
    assert token_mean(per_token, total=6).item() == 1.5
    loss = sample_mean(per_token, [1, 2])
    assert loss.item() == 2.5 and global_mean(loss).item() == 2.5
    assert torch.autograd.grad(loss, per_token)[0].tolist() == [0.5, 0.25, 0.25]
    assert token_mean(per_token, plan=knapformer.plan([[1, 2]], "g1n1", d_model=8)).item() == 3.0
    # Of three samples this rank has a whole one, two of the four tokens of another, and none of the third.
    parts = sample_mean(per_token, [1, 2, 0], sample_lens=[1, 4, 5], total=3)
    assert torch.autograd.grad(parts, per_token)[0].tolist() == pytest.approx([1 / 3, 1 / 12, 1 / 12])
    assert count_over_ranks(7) == 7
    none = torch.empty(0, requires_grad=True)
    assert token_mean(none).item() == 0 and sample_mean(none, []).item() == 0
    (grad,) = torch.autograd.grad(token_mean(none), none)
    assert grad.shape == (0,)


def test_sums_in_bfloat16_are_not_rounded_to_it() -> None:
    """Of 4,096 ones a sum in bfloat16 is right, of 4,097 it is not; weights of a third are not, either."""
    ones = torch.ones(4097, dtype=torch.bfloat16)
    assert token_mean(ones).dtype == torch.float32 and token_mean(ones).item() == 1.0
    assert token_mean(ones, total=8194).item() == 0.5
    assert sample_mean(ones[:30], [3] * 10).item() == pytest.approx(1.0, rel=1e-6)


def test_wrong_arguments_are_named() -> None:
    three, plan = torch.ones(3), knapformer.plan([[1, 2]], "g1n1", d_model=8)
    for call, message in (
        (lambda: token_mean(torch.zeros(2, 3)), r"per_token: got torch.float32 of shape \(2, 3\), expected"),
        (lambda: token_mean([1.0]), "per_token: got list, expected real numbers"),
        (lambda: sample_mean(None, [3]), "per_token: got NoneType"),
        (lambda: token_mean(three.to(torch.complex64)), "per_token: got torch.complex64"),
        (
            lambda: sample_mean(three, [1, 1]),
            r"seq_lens: got \[1, 1\], expected lengths of at least 1 that add up to 3",
        ),
        (lambda: sample_mean(three, [3, 0]), r"seq_lens: got \[3, 0\]"),
        (lambda: sample_mean(three, [[1, 2]]), r"seq_lens: got torch.int64 of shape \(1, 2\)"),
        (lambda: sample_mean(three, 3), r"seq_lens: got torch.int64 of shape \(\), expected integers, \(samples,\)"),
        (lambda: sample_mean(three, [True] * 3), "seq_lens: got torch.bool"),
        (lambda: sample_mean(three, "abc"), "seq_lens: got what makes no tensor"),
        (lambda: sample_mean(three, None), "seq_lens: got what makes no tensor"),
        (lambda: sample_mean(three, [1, 2], sample_lens=[1, 4]), "total: got none, expected the samples of all ranks"),
        (
            lambda: sample_mean(three, [1, 2], sample_lens=[1, 1], total=2),
            r"sample_lens: got \[1, 1\], expected one for each of the chunks of \[1, 2\]",
        ),
        # Cut to integers, these might add up.
        (lambda: sample_mean(three, [1.0, 2.0]), r"seq_lens: got torch\.float32"),
        (lambda: sample_mean(three, torch.tensor([1.5, 1.5])), r"seq_lens: got torch\.float32"),
        (lambda: sample_mean(three, torch.empty(0)), r"seq_lens: got torch\.float32"),
        (lambda: sample_mean(three, [3], sample_lens=[8.9], total=1), r"sample_lens: got torch\.float32"),
        (lambda: token_mean(three, total=2), "total: got 2, expected at least the 3 of this rank"),
        (lambda: token_mean(three, total=3, plan=plan), "plan, total: got both"),
        (lambda: token_mean(three, plan=3), "plan: got int, expected a Plan"),
        (lambda: token_mean(three, group=[0]), r"group: got \[0\], expected a process group"),
        (
            lambda: token_mean(three, gradient_reduction="none"),
            "gradient_reduction: got 'none', expected 'mean' or 'sum'",
        ),
        (lambda: global_mean(3.0), "loss: got float, expected what token_mean"),
        (lambda: global_mean(three), "loss: got torch.float32 of shape"),
    ):
        with pytest.raises(knapformer.ArgumentError, match=message):
            call()
    for value in (float("nan"), 1.5, "3", True, torch.tensor(True), -1):
        expected = f"got {re.escape(repr(value))}, expected (an integer, )?at least"
        for call in (
            lambda value: token_mean(torch.empty(0), total=value),
            lambda value: token_mean(three, loss_divisor=value),
            count_over_ranks,
        ):
            with pytest.raises(knapformer.ArgumentError, match=expected):
                call(value)


def test_where_a_trainer_may_divide_the_loss_it_is_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(3, requires_grad=True)
    assert token_mean(ones, total=6, loss_divisor=2) == 1
    assert global_mean(sample_mean(ones, [3], total=2, loss_divisor=2), loss_divisor=2) == 0.5
    for module in ("transformers.trainer", "pytorch_lightning.trainer.trainer", "deepspeed.runtime.engine"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, types.ModuleType(module))
            for mean in (
                lambda **options: token_mean(ones, **options),
                lambda **options: sample_mean(ones, [3], **options),
            ):
                with pytest.raises(knapformer.ArgumentError, match=f"loss_divisor: got none.*{module} is imported"):
                    mean(total=6)
                assert mean() == 1  # of this micro-batch alone
                with torch.no_grad():
                    mean(total=6)
