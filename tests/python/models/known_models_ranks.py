"""What the ranks of test_known_models do, and the same in one process that holds all the data.

Kept apart from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from exactness_ranks import CLUSTER
from knapformer.losses import global_mean, token_mean
from knapformer.models import (
    FluxConfig,
    FluxTransformer,
    WanBatch,
    WanConfig,
    WanTransformer,
    init_weights,
    set_checkpointing,
    shard_model,
)
from knapformer.models.diffusers_flux import flux_state, load_flux_state
from knapformer.models.diffusers_wan import load_wan_state, wan_state
from knapformer.models.patches import grid_positions
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from knapformer import SequenceBalancer

WAN = WanConfig(
    num_blocks=2, d_model=48, num_heads=4, mlp_width=80, in_channels=3, out_channels=2, text_channels=10,
    time_channels=8, max_text_tokens=7,
)  # fmt: skip
FLUX = FluxConfig(
    num_double_blocks=1, num_single_blocks=1, d_model=36, num_heads=3, in_channels=5, out_channels=7,
    rope_axes=(4, 4, 4), text_channels=11, pooled_channels=9,
)  # fmt: skip

WanSample = tuple[tuple[int, int, int], int]  # grid of patches, text tokens
WanStep = list[list[WanSample]]  # of each rank
Outcome = tuple[list[float], dict[str, Tensor], list[Tensor]]  # losses, gradients, text gradients by rank


def seeded_wan() -> WanTransformer:
    model = WanTransformer(WAN).double()
    init_weights(model, seed=4)
    return model


def wan_batch(step: WanStep, index: int, ranks: list[int]) -> tuple[WanBatch, Tensor]:
    """The samples of some ranks, packed; a sample's tensors are a function of its place in the step alone."""
    grids, text_lens, drawn = [], [], [_wan_tensors((0, 0, 0), 0, 0)]
    for rank in ranks:
        for i, (grid, num_text) in enumerate(step[rank]):
            drawn.append(_wan_tensors(grid, num_text, 10_000 * index + 100 * rank + i))
            grids.append(grid)
            text_lens.append(num_text)
    video, ids, text, timestep, target = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    video_lens = [a * b * c for a, b, c in grids]
    return WanBatch(video, ids, video_lens, text, text_lens, timestep[1:]), target


def _wan_tensors(grid: tuple[int, int, int], num_text: int, key: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(key)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_patches = grid[0] * grid[1] * grid[2]
    return (
        normal(num_patches, 12), grid_positions(grid), normal(num_text, 10),
        1000 * torch.rand(1, generator=generator, dtype=torch.float64), normal(num_patches, 8),
    )  # fmt: skip


def wan_alone(steps: list[WanStep]) -> Outcome:
    """One process with all the data: no ranks, no sharding, no balancer, no checkpoint."""
    model = seeded_wan()
    losses, text_grads = [], []
    for index, step in enumerate(steps):
        batch, target = wan_batch(step, index, list(range(len(step))))
        batch.text.requires_grad_()
        loss = (model(batch) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        text_grads.append(batch.text.grad)
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, text_grads


def wan_on_ranks(rank: int, world: int, topologies: list[str | None], steps: list[WanStep]) -> list[Outcome]:
    """Of each topology, with FSDP2 and checkpointing. The gradients of the texts are this rank's own."""
    outcomes = []
    for topology in topologies:
        model = seeded_wan()
        set_checkpointing(model)
        shard_model(model, init_device_mesh("cpu", (world,)))
        balancer = None if topology is None else SequenceBalancer(topology, cluster=CLUSTER)
        losses, text_grads = [], []
        for index, step in enumerate(steps):
            batch, target = wan_batch(step, index, [rank])
            batch.text.requires_grad_()
            loss = token_mean((model(batch, balancer) - target).square().mean(1))
            loss.backward()
            losses.append(global_mean(loss).item())
            text_grads.append(batch.text.grad / world)
        grads = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), f"{name} has no gradient"
            grads[name] = parameter.grad.full_tensor()
        outcomes.append((losses, grads, text_grads))
    return outcomes


def too_long_a_text(rank: int, world: int) -> str:
    model, balancer = seeded_wan(), SequenceBalancer("g1n2")
    batch, _ = wan_batch([[((1, 2, 2), 8)], [((1, 2, 2), 8)]], 0, [rank])
    try:
        model(batch, balancer)
    except ValueError as error:
        return str(error)
    return ""


def sharded_weights(rank: int, world: int, flux: dict[str, Tensor], wan: dict[str, Tensor]) -> dict[str, object]:
    """Loads full states into sharded models that never were whole, and saves them back on rank 1."""
    mesh, keep = init_device_mesh("cpu", (world,)), rank == 1
    saved: dict[str, object] = {}
    with torch.device("meta"):
        flux_model, wan_model = FluxTransformer(FLUX), WanTransformer(WAN)
    for model in (flux_model, wan_model):
        shard_model(model, mesh)
        model.to_empty(device="cpu")
    load_flux_state(flux_model, flux)
    load_wan_state(wan_model, wan)
    saved["flux"] = flux_state(flux_model, keep=keep)
    saved["original"] = flux_state(flux_model, "original", keep=keep)
    saved["wan"] = wan_state(wan_model, keep=keep)
    num_local = sum(p.to_local().numel() for p in flux_model.parameters() if isinstance(p, DTensor))
    saved["share"] = num_local / sum(p.numel() for p in flux_model.parameters())
    dist.barrier()
    return saved
