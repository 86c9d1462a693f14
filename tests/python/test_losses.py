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
from losses_ranks import Case, Outcome, Step, alone, run_cases
from torch import Tensor

import knapformer

LENGTHS = ((13, 1, 40, 5, 5, 2), (3, 7, 21), (9,), ())  # of the samples of each step; the last step has none anywhere


def shared(world: int) -> tuple[Step, ...]:
    """The same samples, in the same order, cut at random places into the parts of the ranks. Some get none."""
    draw = random.Random(1)
    steps = []
    for lengths in LENGTHS:
        cuts = [0, *sorted(draw.randint(0, len(lengths)) for _ in range(world - 1)), len(lengths)]
        steps.append(tuple(tuple(lengths[a:b]) for a, b in itertools.pairwise(cuts)))
    return tuple(steps)


def all_on_the_last(world: int) -> tuple[Step, ...]:
    return tuple((*[()] * (world - 1), lengths) for lengths in LENGTHS)


def cases_of(world: int) -> list[Case]:
    product = itertools.product(
        ("token", "sample"), ("ddp", "fsdp", "sum"), ("reduced", "total"), (shared(world), all_on_the_last(world))
    )
    return [Case(*case) for case in product]


@functools.cache
def expected(mean: str) -> Outcome:
    return alone(mean, all_on_the_last(1))


def relative_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    difference = sum((got[name] - grad).square().sum().item() for name, grad in wanted.items()) ** 0.5
    size = sum(grad.square().sum().item() for grad in wanted.values()) ** 0.5
    return difference / size if size else difference


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_to_one_process_with_all_the_data(world: int) -> None:
    cases = cases_of(world)
    assert any(any(step) and not all(step) for case in cases for step in case.steps) or world == 1
    for of_rank in run_ranks(run_cases, world, cases):
        for case, outcome in zip(cases, of_rank, strict=True):
            for (loss, grads), (wanted_loss, wanted_grads) in zip(outcome, expected(case.mean), strict=True):
                assert loss == pytest.approx(wanted_loss, rel=1e-10), case
                assert relative_error(grads, wanted_grads) <= 1e-10, case


def test_the_cases_have_what_they_are_for() -> None:
    token, sample = expected("token"), expected("sample")
    assert relative_error(token[0][1], sample[0][1]) > 0.05
    assert all(sum(g.square().sum().item() for g in grads.values()) > 0 for _, grads in token[:3])


def test_one_process_without_torch_distributed() -> None:
    per_token = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    assert token_mean(per_token).item() == 3.0
    assert token_mean(per_token, total=6).item() == 1.5
    loss = sample_mean(per_token, [1, 2])
    assert loss.item() == 2.5 and global_mean(loss).item() == 2.5
    assert torch.autograd.grad(loss, per_token)[0].tolist() == [0.5, 0.25, 0.25]
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
    three = torch.ones(3)
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
        # Cut to integers, these might add up.
        (lambda: sample_mean(three, [1.0, 2.0]), r"seq_lens: got torch\.float32"),
        (lambda: sample_mean(three, torch.tensor([1.5, 1.5])), r"seq_lens: got torch\.float32"),
        (lambda: sample_mean(three, torch.empty(0)), r"seq_lens: got torch\.float32"),
        (lambda: token_mean(three, total=2), "total: got 2, expected that of the step, at least this rank's 3"),
        (lambda: token_mean(three, group=[0]), r"group: got \[0\], expected a process group"),
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
