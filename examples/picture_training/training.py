"""One training run: model, average of its weights, optimizer, and its optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from knapformer.losses import global_mean, sample_mean
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import knapformer
from knapformer import SequenceBalancer
from picture_training.pictures import TOKEN_CHANNELS, WORD_CHANNELS, PictureBatch


@dataclass(frozen=True)
class TrainingOptions:
    precision: str = "fp32"  # or "fp64", or "bf16": computes in bfloat16, with parameters and gradients in float32
    batch_size: int = 12  # samples of a step, of all ranks and micro-batches
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    ema_decay: float = 0.98
    seed: int = 0
    d_model: int = 128
    num_blocks: int = 4  # half of them double-stream

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and data."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def num_heads(self) -> int:
        return self.d_model // 32


def build_model(options: TrainingOptions, device: torch.device, balancer: SequenceBalancer | None) -> nn.Module:
    """Sharded over all ranks; the same weights on any number of them."""
    torch.manual_seed(options.seed)
    model = FluxTransformer2DModel(
        in_channels=TOKEN_CHANNELS, num_layers=options.num_blocks // 2,
        num_single_layers=options.num_blocks - options.num_blocks // 2, attention_head_dim=32,
        num_attention_heads=options.num_heads, joint_attention_dim=WORD_CHANNELS, pooled_projection_dim=WORD_CHANNELS,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    model.pos_embed.theta = 100.0  # for tens of rows and columns, not thousands
    # Every block starts as the identity and the velocity as zero, as DiTs are trained.
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ("norm" in name or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    model.to(device, options.dtype)
    knapformer.balance(model, balancer)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def on_device(batch: PictureBatch, device: torch.device) -> PictureBatch:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    samples = [{name: moved(value) for name, value in sample.items()} for sample in batch.samples]
    return PictureBatch(samples, batch.lens, moved(batch.target))


class TrainingRun(Stateful):
    """Made and called by all ranks. With a balancer its steps compute the same, but on other ranks."""

    def __init__(self, options: TrainingOptions, device: torch.device, balancer: SequenceBalancer | None) -> None:
        self.options = options
        self.balancer = balancer
        self.device = device
        self.num_steps_done = 0
        self.model = build_model(options, device, balancer)
        self.ema = build_model(options, device, balancer).requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.learning_rate, (0.9, 0.95), weight_decay=0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / options.warmup_steps)
        )
        self._loss = torch.zeros((), device=device)  # of the step so far
        self._average = get_ema_multi_avg_fn(options.ema_decay)

    def step(self, batches: Iterable[PictureBatch]) -> tuple[float, float]:
        """An optimizer step over this rank's micro-batches, which may be fetched while it runs. Returns the mean loss
        over the samples of all ranks and micro-batches, and the norm of its gradient."""
        for batch in batches:
            self.accumulate(batch)
        return self.finish_step()

    def accumulate(self, batch: PictureBatch) -> None:
        """Forward and backward of a micro-batch. Where there is a balancer, it holds the micro-batch's plan."""
        loss = self._loss_of(batch, self.balancer is not None, self.options.batch_size)
        loss.backward()
        self._loss = self._loss + loss.detach()

    @torch.no_grad()
    def validation_loss(self, batch: PictureBatch) -> float:
        """The mean over the held-out samples of all ranks."""
        return global_mean(self._loss_of(batch, False, None)).item()

    def _loss_of(self, batch: PictureBatch, planned: bool, total: int | None) -> Tensor:
        batch = on_device(batch, self.device)
        predictions = self.model(batch.samples, planned=planned)
        velocity = torch.cat([batch.target[:0], *(prediction[0] for prediction in predictions)])
        per_token = (velocity.to(batch.target.dtype) - batch.target).square().mean(1)
        return sample_mean(per_token, batch.lens, total=total) + predictions.zero

    def finish_step(self) -> tuple[float, float]:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            self._average(list(_local(self.ema)), list(_local(self.model)), self.num_steps_done)
        self.num_steps_done += 1
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        return global_mean(loss).item(), norm.full_tensor().item()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint. The data needs no state: a step's samples follow from its number."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "ema": get_model_state_dict(self.ema),
            "schedule": self.schedule.state_dict(),
            "num_steps_done": self.num_steps_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_model_state_dict(self.ema, state["ema"])
        self.schedule.load_state_dict(state["schedule"])
        self.num_steps_done = state["num_steps_done"]


def _local(model: nn.Module) -> Iterator[Tensor]:
    """This rank's part of each parameter."""
    for parameter in model.parameters():
        yield parameter.to_local()  # type: ignore[attr-defined]
