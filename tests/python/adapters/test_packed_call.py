"""What a packed call keeps until the backward pass."""

from __future__ import annotations

from functools import partial

from adapters.cases import cases
from knapformer.adapters.parity import SmallModel
from saved_bytes import saved_bytes


def test_a_packed_call_keeps_as_much_for_the_backward_pass() -> None:
    small = SmallModel(cases()["flux"].model_class, controlled=True)
    model, samples = small.make(), small.samples()
    calls = [partial(small.adapter.expected, model, sample) for sample in samples]
    own = sum(saved_bytes(call, model.parameters())[1] for call in calls)
    small.balance(model)
    packed, none = (saved_bytes(partial(model, of), model.parameters())[1] / own for of in (samples, []))
    assert 0.7 < packed < 1.2 and none < 0.1
