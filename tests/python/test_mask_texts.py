"""Texts of masks: what they say is the dense mask that they were made from."""

from __future__ import annotations

import random

import pytest
import torch
from knapformer.masks import Segment, mask_of, segments
from masks import dense_mask, random_mask

from knapformer import ArgumentError, attention_pairs, plan


@pytest.mark.parametrize("seed", range(60))
def test_a_function_becomes_the_mask_that_it_says(seed: int) -> None:
    draw = random.Random(seed)
    length = draw.choice([1, 7, 40, 90])
    dense = dense_mask(random_mask(draw, length), length)
    if seed % 3 == 0:  # any pattern, some queries without keys
        dense = torch.rand(length, length, generator=torch.Generator().manual_seed(seed)) < 0.2
    text = mask_of(lambda query, key: dense[query, key], length, max_ranges=length)
    assert torch.equal(dense_mask(text, length), dense)
    assert attention_pairs(text, length) == dense.sum()
    assert plan([[length]], "g1n1", d_model=8, masks=text).attention_pairs == [dense.sum()]


def test_a_function_of_many_ranges_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sees: got 20 ranges of keys for query 0, expected at most 16"):
        mask_of(lambda query, key: (query + key) % 2 == 1, 40)


def test_structured_masks_are_short() -> None:
    """A window, and a function that does not look at its queries."""
    assert mask_of(lambda query, key: (query - key).abs() <= 2, 10) == "ranges:3=0-3+;5=1+-6+;2=6+-10"
    assert mask_of(lambda _, key: key < 3, 10_000) == "ranges:10000=0-3"


def test_segments_are_text() -> None:
    parts = [Segment(120, causal=True), Segment(1024, sees=[]), Segment(4096, sees=[1, 0]), Segment(30)]
    assert segments(parts) == "c120 f1024@ f4096@0,1 f30"
    assert attention_pairs(segments(parts), 5270) == 120 * 121 // 2 + 1024**2 + 4096 * 5240 + 30 * 5270
    with pytest.raises(ArgumentError, match="mask: got 'f5@7'"):
        attention_pairs(segments([Segment(5, sees=[7])]), 5)
