"""One training run: model, average of its weights, optimizer, and a step of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from knapformer.losses import global_mean, sample_mean
from knapformer.models import FluxBatch, FluxConfig, FluxTransformer, shard_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import get_ema_multi_avg_fn

from knapformer import SequenceBalancer
from picture_training.pictures import TOKEN_CHANNELS, WORD_CHANNELS, PictureBatch


@dataclass(frozen=True)
class TrainingOptions:
    precision: str = "fp32"  # "fp64"; "bf16" computes in it, with parameters and gradients in float32
    batch_size: int = 12  # samples of a step, of all ranks and micro-batches
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    ema_decay: float = 0.98
    seed: int = 0
    d_model: int = 128
    num_blocks: int = 4  # half of them double-stream

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and data."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def model(self) -> FluxConfig:
        return FluxConfig(
            num_double_blocks=self.num_blocks // 2,
            num_single_blocks=self.num_blocks - self.num_blocks // 2,
            d_model=self.d_model,
            num_heads=self.d_model // 32,
            rope_axes=(8, 12, 12),
            rope_theta=100.0,  # for tens of rows and columns, not thousands
            in_channels=TOKEN_CHANNELS,
            out_channels=TOKEN_CHANNELS,
            text_channels=WORD_CHANNELS,
            pooled_channels=WORD_CHANNELS,
            time_channels=64,
            guidance=False,
        )


def build_model(options: TrainingOptions, device: torch.device) -> FluxTransformer:
    """Sharded over all ranks; the same weights on any number of them."""
    torch.manual_seed(options.seed)
    model = FluxTransformer(options.model)
    # Every block starts as the identity and the velocity as zero, as DiTs are trained.
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ("norm" in name or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    model.to(device, options.dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return shard_model(model, mesh, torch.bfloat16 if options.precision == "bf16" else None)


def on_device(batch: PictureBatch, device: torch.device) -> PictureBatch:
    def moved(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    fields = {field.name: moved(getattr(batch.inputs, field.name)) for field in dataclasses.fields(FluxBatch)}
    return PictureBatch(FluxBatch(**fields), moved(batch.target))


class TrainingRun(Stateful):
    """Made and called by all ranks. With a balancer its steps compute the same, elsewhere."""

    def __init__(self, options: TrainingOptions, device: torch.device, balancer: SequenceBalancer | None) -> None:
        self.options = options
        self.balancer = balancer
        self.device = device
        self.num_steps_done = 0
        self.model = build_model(options, device)
        self.ema = build_model(options, device).requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.learning_rate, (0.9, 0.95), weight_decay=0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / options.warmup_steps)
        )
        self._loss = torch.zeros((), device=device)  # of the step so far
        self._average = get_ema_multi_avg_fn(options.ema_decay)

    def step(self, batches: Iterable[PictureBatch]) -> tuple[float, float]:
        """An optimizer step: this rank's micro-batches, which may be fetched while it runs. The mean loss over the
        samples of all ranks and micro-batches, and the norm of its gradient."""
        for batch in batches:
            self.accumulate(batch)
        return self.finish_step()

    def accumulate(self, batch: PictureBatch) -> None:
        """Forward and backward of a micro-batch. A balancer, where there is one, holds its plan."""
        batch = on_device(batch, self.device)
        velocity = self.model(batch.inputs, self.balancer, planned=self.balancer is not None)
        per_token = (velocity.to(batch.target.dtype) - batch.target).square().mean(1)
        loss = sample_mean(per_token, batch.inputs.image_lens, total=self.options.batch_size)
        loss.backward()
        self._loss = self._loss + loss.detach()

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
        """For torch.distributed.checkpoint. The data needs none: a step's samples follow from its number."""
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
