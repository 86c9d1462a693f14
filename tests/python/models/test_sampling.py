"""Sampling of mixed requests over ranks: the pictures of one process that makes them one at a time."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from distributed.ranks import run_ranks
from knapformer.models import FluxBatch
from knapformer.models.sampling import SampleRequest, euler_flow, flow_times, sample
from sampling_ranks import NUM_STEPS, REQUESTS, misuse, new_model, request, serve
from torch import Tensor

HOMES = {
    "g2n1": ((0, 1, 2), (3, 4)),
    "g1n2": ((0, 1, 2), (3, 4)),
    "g2n1 all on one rank": ((), (0, 1, 2, 3, 4)),
    "g1n2 in another order": ((4, 2), (3, 0, 1)),
    "none": ((0, 1, 2), (3, 4)),
    "none with one rank without": ((4, 3, 2, 1, 0), ()),
    "g2/1n1": ((0, 1, 2), (3, 4)),
    "g2n1 whole": ((2, 0), (1, 3, 4)),
    "g2n1 nobody has any": ((), ()),
}


@torch.no_grad()
def one_at_a_time(number: int) -> Tensor:
    """The sampler written out for one request: no packing, and guidance as two calls of the model."""
    r = request(number)
    model = new_model()

    def velocity(x: Tensor, t: float, text: Tensor, pooled: Tensor) -> Tensor:
        return model(
            FluxBatch(
                image=x,
                image_ids=r.image_ids,
                image_lens=[len(x)],
                text=text,
                text_lens=[len(text)],
                pooled=pooled.unsqueeze(0),
                timestep=torch.tensor([t], dtype=torch.float64),
                guidance=torch.tensor([r.embedded_guidance], dtype=torch.float64),
            )
        )

    negative_text = r.text[:0] if r.negative_text is None else r.negative_text
    negative_pooled = torch.zeros_like(r.pooled) if r.negative_pooled is None else r.negative_pooled
    times = [1 - i / NUM_STEPS for i in range(NUM_STEPS + 1)]
    times = [r.shift * t / (1 + (r.shift - 1) * t) for t in times]
    x = r.noise
    for i in range(NUM_STEPS):
        conditional = velocity(x, times[i], r.text, r.pooled)
        unconditional = velocity(x, times[i], negative_text, negative_pooled)
        x = x + (times[i + 1] - times[i]) * (unconditional + r.guidance_scale * (conditional - unconditional))
    return x


@functools.cache
def expected() -> list[Tensor]:
    return [one_at_a_time(number) for number in range(len(REQUESTS))]


def test_same_pictures_as_one_at_a_time() -> None:
    by_rank = run_ranks(serve, 2, HOMES)
    num_guided = sum(scale != 1 for _, _, _, scale, *_ in REQUESTS)
    for name in HOMES:
        served = [of_rank[name] for of_rank in by_rank]
        pictures = served[0]["pictures"] | served[1]["pictures"]
        if "nobody" in name:
            assert not pictures and served[0]["calls"] == served[1]["calls"] == 0
            continue
        assert [rank["calls"] for rank in served] == [NUM_STEPS, NUM_STEPS], (
            "one call of the model a step, on all ranks"
        )
        assert served[0]["num_sequences"] + served[1]["num_sequences"] == len(REQUESTS) + num_guided
        assert sorted(pictures) == list(range(len(REQUESTS)))
        for number, picture in pictures.items():
            torch.testing.assert_close(picture, expected()[number], rtol=1e-10, atol=1e-10)
        assert all(rank["resharded"] for rank in served)
    # Work is moved: with everything at home on one rank, both end up with about as much.
    before, after = by_rank[0]["g2n1 all on one rank"]["wir"]
    assert before == float("inf") and after < 1.1
    assert by_rank[0]["g1n2 in another order"]["wir"][1] < 1.7


def test_pictures_differ_by_everything_that_a_request_says() -> None:
    """Of the reference itself: no field is without effect, so that none could be lost unnoticed."""
    model, base = new_model(), request(2)
    changes = {
        "guidance_scale": 1.0,
        "negative_text": None,
        "negative_pooled": None,
        "embedded_guidance": 9.0,
        "shift": 1.0,
        "text": base.negative_text,
        "pooled": base.negative_pooled,
    }
    (wanted,) = sample(model, [base], num_steps=2)
    for name, value in changes.items():
        (other,) = sample(model, [dataclasses.replace(base, **{name: value})], num_steps=2)
        assert (other - wanted).abs().max() > 1e-6, name


def test_euler_is_exact_where_the_velocity_is_constant_and_of_first_order_elsewhere() -> None:
    times = flow_times(5, [1.0, 3.0])
    assert times[0].tolist() == [1.0, 1.0] and times[-1].tolist() == [0.0, 0.0]
    assert torch.allclose(times[:, 0], torch.linspace(1, 0, 6, dtype=torch.float64))
    assert times[1, 1].item() == pytest.approx(3 * 0.8 / (1 + 2 * 0.8))
    noise, picture = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    done = euler_flow(lambda x, t: noise - picture, noise, [3, 4], times)
    torch.testing.assert_close(done, picture)
    # dx/dt = x from t = 1 to 0 is a division by e.
    errors = []
    for num_steps in (64, 128):
        (x,) = euler_flow(lambda x, t: x, torch.ones(1, 1, dtype=torch.float64), [1], flow_times(num_steps, [1.0]))
        errors.append(abs(x.item() - torch.tensor(-1.0, dtype=torch.float64).exp().item()))
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


def test_wrong_arguments_are_named_on_every_rank() -> None:
    first, second = run_ranks(misuse, 2)
    assert first == second
    assert first[0] == "num_steps: got [3, 4] on different ranks, expected the same on all"
    assert first[1] == "num_steps: got 0, expected an integer >= 1"
    assert first[2].startswith("requests: got ") and "5 of text" in first[2] and "24 of text" in first[2]
    assert first[3] == "negative_pooled: got 3 channels, expected 12"


def test_wrong_requests_are_named() -> None:
    good = request(3)
    for change, message in (
        ({"noise": torch.zeros(0, 8)}, r"noise: got shape \(0, 8\)"),
        ({"image_ids": torch.zeros(9, 2)}, r"image_ids: got shape \(9, 2\), expected \(9, 3\)"),
        ({"text": torch.zeros(24)}, r"text: got shape \(24,\), expected \(text tokens, text_channels\)"),
        (
            {"negative_pooled": torch.zeros(1, 12)},
            r"negative_pooled: got shape \(1, 12\), expected \(pooled_channels,\)",
        ),
        ({"shift": 0.0}, "shift: got 0.0, expected a number > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, **change)
    assert isinstance(good, SampleRequest)
