"""Packed calls of diffusers' models against diffusers itself, by `check`, in one process."""

from __future__ import annotations

import pytest
from adapters.cases import CASES, of
from knapformer.adapters import check


@pytest.mark.parametrize("name", CASES)
def test_packed_is_sample_by_sample(name: str) -> None:
    class_name, fields = CASES[name]
    check(of(class_name).model_class, ranks=1, **fields)
