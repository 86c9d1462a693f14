"""What the ranks of test_sampling do, and the requests, which any rank can make.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from knapformer.models import NAMED_CONFIGS, FluxBatch, FluxConfig, FluxTransformer, init_weights, shard_model
from knapformer.models.patches import grid_positions
from knapformer.models.sampling import SampleRequest, sample
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from knapformer import SequenceBalancer

NUM_STEPS = 4
_CONFIG = NAMED_CONFIGS["flux-tiny"]
assert isinstance(_CONFIG, FluxConfig)
CONFIG = _CONFIG

# Rows and columns of the picture, words, guidance scale, negative words (None: left out), shift, embedded guidance.
REQUESTS = (
    (16, 16, 5, 4.0, None, 1.0, 3.5),
    (4, 12, 2, 1.0, None, 1.0, 0.0),
    (24, 10, 0, 2.5, 7, 3.0, 1.0),
    (3, 3, 4, 7.0, 1, 0.5, 2.0),
    (1, 30, 9, 1.5, None, 1.0, 0.0),
)


def new_model() -> FluxTransformer:
    model = FluxTransformer(CONFIG).double()
    init_weights(model, seed=3)
    return model


def request(number: int) -> SampleRequest:
    rows, columns, words, scale, negative_words, shift, embedded = REQUESTS[number]
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return SampleRequest(
        noise=normal(rows * columns, CONFIG.in_channels),
        image_ids=grid_positions((1, rows, columns)),
        text=normal(words, CONFIG.text_channels),
        pooled=normal(CONFIG.pooled_channels),
        guidance_scale=scale,
        negative_text=None if negative_words is None else normal(negative_words, CONFIG.text_channels),
        negative_pooled=None if negative_words is None else normal(CONFIG.pooled_channels),
        embedded_guidance=embedded,
        shift=shift,
    )


class Counted(torch.nn.Module):
    """A model that keeps the lengths that it was given, and the plans that were made of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.lens, self.plans = model, [], []

    def forward(self, batch: FluxBatch, balancer: SequenceBalancer | None = None) -> Tensor:
        out: Tensor = self.model(batch, balancer)
        self.lens.append(batch.seq_lens)
        if balancer is not None:
            self.plans.append(balancer.plan)
        return out


def serve(rank: int, world_size: int, homes: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, Any]:
    """Of each topology and sharing of the requests: this rank's pictures, by request, and where its chunks lay."""
    sharded = shard_model(new_model(), init_device_mesh("cpu", (world_size,)))
    served: dict[str, Any] = {}
    for name, home in homes.items():
        topology = name.split()[0]
        balancer = None if topology == "none" else SequenceBalancer(topology)
        model = Counted(new_model() if name.endswith("whole") else sharded)
        pictures = sample(model, [request(n) for n in home[rank]], balancer, num_steps=NUM_STEPS)
        served[name] = {
            "pictures": dict(zip(home[rank], pictures, strict=True)),
            "calls": len(model.lens),
            "num_sequences": len(model.lens[0]) if model.lens else 0,
            "wir": (model.plans[0].wir_before, model.plans[0].wir_after) if model.plans else None,
            "resharded": all(hasattr(p, "to_local") for p in sharded.parameters()),
        }
    return served


def misuse(rank: int, world_size: int) -> list[str]:
    """What each rank is told."""
    model = new_model()
    good = request(3)
    odd = dataclasses.replace(good, text=torch.zeros(2, 5, dtype=torch.float64), negative_text=None)
    mixed = dataclasses.replace(good, negative_pooled=torch.zeros(3, dtype=torch.float64))
    calls: list[Callable[[], object]] = [
        lambda: sample(model, [good], num_steps=3 + rank),
        lambda: sample(model, [good], num_steps=0 if rank == 1 else 3),
        lambda: sample(model, [odd if rank == 0 else good], num_steps=3),
        lambda: sample(model, [mixed] if rank == 1 else [], num_steps=3),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append("nothing")
        except ValueError as error:
            told.append(str(error))
    assert sample(model, [], num_steps=3) == []
    dist.barrier()
    return told
