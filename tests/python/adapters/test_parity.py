"""A packed call of diffusers' models against diffusers itself, sample by sample, in one process."""

from __future__ import annotations

import pytest
from adapters.cases import SIZES, assert_gradients_equal, cases, gradients, one_by_one, relative_error, sample_loss

import knapformer

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_packed_is_sample_by_sample(name: str) -> None:
    case = CASES[name]
    model = case.make()
    samples = [case.sample(*size, seed) for seed, size in enumerate(SIZES)]
    outputs, expected = one_by_one(model, samples)
    knapformer.balance(model)
    predictions = model(samples)
    assert len(predictions) == len(samples)
    for prediction, output in zip(predictions, outputs, strict=True):
        assert prediction.shape == output.shape
        assert relative_error(prediction, output) <= 1e-5
    sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero).backward()
    assert_gradients_equal(gradients(model), expected)
