r"""Trains a LoRA of FLUX.1 on a folder of pictures and captions of any sizes, with accelerate and PEFT: no buckets.

    accelerate launch --num_processes 2 examples/train_lora.py --data ~/pictures --out runs/lora
    accelerate launch --num_processes 2 examples/train_lora.py --data ~/pictures --out runs/lora --resume
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        examples/train_lora.py --data ~/pictures --out runs/full --full        # all weights, sharded by FSDP2

A picture is trained at its own size, its caption (the .txt file beside it) at its own length. BalancedBatchSampler
gives every rank pictures of equal work, and `knapformer.balance` lets the transformer take them in one packed call.
`--plain` is the loop without both, on the same samples: one picture after another, however uneven the ranks' work is.

It runs without downloads, so three parts are stand-ins; a real training replaces them by the pipeline's own:
`tiny_flux` (FluxTransformer2DModel.from_pretrained), `latents_of` (the VAE) and `embeddings_of` (the text encoders).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from diffusers import FluxTransformer2DModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import knapformer

PATCH = 16  # pixels of a token's side: 8 of the VAE, 2 of the patches
TEXT_CHANNELS, POOLED_CHANNELS = 32, 16


def tiny_flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=TEXT_CHANNELS, pooled_projection_dim=POOLED_CHANNELS, axes_dims_rope=(4, 14, 14),
    )  # fmt: skip


def latents_of(picture: Tensor) -> Tensor:
    """(3, height, width) in -1..1 -> (tokens, 64)."""
    rows, columns = picture.shape[1] // PATCH, picture.shape[2] // PATCH
    small = F.interpolate(picture.mean(0)[None, None], (8 * rows, 8 * columns), mode="area")
    return F.pixel_unshuffle(small, 8)[0].flatten(1).T.contiguous()


def embeddings_of(caption: str) -> tuple[Tensor, Tensor]:
    """-> (tokens, TEXT_CHANNELS), one token a word, and pooled, (1, POOLED_CHANNELS)."""
    words = [sum(map(ord, word)) for word in caption.split()]
    rows = [torch.randn(TEXT_CHANNELS, generator=torch.Generator().manual_seed(word)) for word in words]
    text = torch.stack(rows) if rows else torch.zeros(0, TEXT_CHANNELS)
    return text, text.sum(0, keepdim=True)[:, :POOLED_CHANNELS]


class Pictures(Dataset[dict[str, Any]]):
    """For each picture the arguments of FluxTransformer2DModel.forward, with its own noise, and the target.

    The noise is a function of the epoch and the picture: it does not depend on the rank that computes it.
    """

    def __init__(self, folder: Path) -> None:
        self.files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
        if not self.files:
            raise SystemExit(f"--data: got {folder}, without pictures, expected a folder with some")
        self.captions = [
            f.with_suffix(".txt").read_text() if f.with_suffix(".txt").exists() else "" for f in self.files
        ]
        self.sizes = [Image.open(f).size for f in self.files]
        self.epoch = 0

    def lengths(self) -> list[int]:
        """Tokens of each picture, text and image. They are known before any picture is loaded."""
        texts = (len(caption.split()) for caption in self.captions)
        return [text + (w // PATCH) * (h // PATCH) for (w, h), text in zip(self.sizes, texts, strict=True)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.from_numpy(np.array(Image.open(self.files[index]).convert("RGB"))).permute(2, 0, 1)
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        picture = latents_of(pixels[:, : rows * PATCH, : columns * PATCH].float() / 127.5 - 1)
        text, pooled = embeddings_of(self.captions[index])
        draw = torch.Generator().manual_seed(100_003 * self.epoch + index)
        noise, time = torch.randn(picture.shape, generator=draw), torch.rand(1, generator=draw)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        return {
            "target": (noise - picture)[None],
            "hidden_states": torch.lerp(picture, noise, time)[None],
            "encoder_hidden_states": text[None],
            "pooled_projections": pooled,
            "timestep": time,
            "img_ids": torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float(),
            "txt_ids": torch.zeros(len(text), 3),
        }


class Progress:
    """What accelerate saves beside the models: the optimizer steps taken, the epoch, and the place in it.

    The place is that of the steps taken, as the loader's workers have drawn more lists from the sampler than that.
    """

    def __init__(self, sampler: knapformer.BalancedBatchSampler | None) -> None:
        self.sampler = sampler
        self.step = self.epoch = self.step_of_pass = 0

    def state_dict(self) -> dict[str, Any]:
        place = None if self.sampler is None else self.sampler.state_dict(self.step_of_pass)
        return {"step": self.step, "epoch": self.epoch, "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]
        if self.sampler is not None:
            self.sampler.load_state_dict(state["place"])


class Average(EMAModel):
    """The running average of weights, which FSDP2 may have sharded. All ranks save and load it together, as a whole."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        shadow = [s.full_tensor() if isinstance(s, DTensor) else s for s in self.shadow_params]
        return {**state, "shadow_params": shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shadow = [
            distribute_tensor(whole, own.device_mesh, own.placements)
            if isinstance(own, DTensor)
            else whole.to(own.device)
            for own, whole in zip(self.shadow_params, state["shadow_params"], strict=True)
        ]
        super().load_state_dict({**state, "shadow_params": shadow})


def transformer_of(arguments: argparse.Namespace) -> FluxTransformer2DModel:
    transformer = tiny_flux()
    if not arguments.full:
        transformer.requires_grad_(False)
        transformer.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return transformer


def train(arguments: argparse.Namespace) -> list[float]:
    """Returns the loss of each optimizer step, over all ranks."""
    accumulated = arguments.accumulate
    plugin = GradientAccumulationPlugin(num_steps=accumulated, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, cpu=arguments.cpu)
    num_ranks, rank = accelerator.num_processes, accelerator.process_index

    transformer = transformer_of(arguments)
    data = Pictures(arguments.data)
    if arguments.plain:
        order: Any = DistributedSampler(data, num_ranks, rank, drop_last=True)
        batches: Any = BatchSampler(order, arguments.batch_size, drop_last=True)
    else:
        knapformer.balance(transformer)  # (1)
        order = batches = knapformer.BalancedBatchSampler(  # (2)
            data.lengths(), batch_size=arguments.batch_size, d_model=transformer.inner_dim, micro_batches=accumulated,
            drop_last=True, model=knapformer.TrainedModel(mode="training" if arguments.full else "lora"),
        )  # fmt: skip
    loader = DataLoader(data, batch_sampler=batches, collate_fn=list, num_workers=arguments.workers)
    if len(loader) < accumulated:
        raise SystemExit(
            f"--data: got {len(data)} pictures, expected at least {arguments.batch_size * accumulated * num_ranks}, "
            "those of a step"
        )

    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    # The loader is not prepared: the sampler already gives each rank its own batches.
    model, optimizer = accelerator.prepare(transformer, torch.optim.AdamW(trained, lr=arguments.learning_rate))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]  # shards under FSDP2
    average = Average(weights, decay=0.99)
    progress = Progress(None if arguments.plain else order)
    accelerator.register_for_checkpointing(average, progress)
    if arguments.resume:
        accelerator.load_state(str(arguments.out / "state"))

    losses = []
    while progress.step < arguments.steps:
        data.epoch = progress.epoch
        order.set_epoch(data.epoch)
        progress.step_of_pass = 0
        total = torch.zeros((), device=accelerator.device)
        for samples in loader:
            samples = [{name: value.to(accelerator.device) for name, value in sample.items()} for sample in samples]
            targets = [sample.pop("target") for sample in samples]
            with accelerator.accumulate(model):
                predictions = [model(**s).sample for s in samples] if arguments.plain else model(samples)  # (3)
                loss = sum(F.mse_loss(p, t) for p, t in zip(predictions, targets, strict=True))
                # The mean over all samples of the step. DDP takes the mean over ranks, accelerate over micro-batches.
                num_samples = arguments.batch_size * accumulated * num_ranks
                accelerator.backward(loss * (num_ranks * accumulated / num_samples))
                total += loss.detach() / num_samples
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            average.step(weights)
            progress.step += 1
            progress.step_of_pass += 1
            losses.append(accelerator.reduce(total, "sum").item())
            total.zero_()
            accelerator.print(json.dumps({"step": progress.step, "loss": losses[-1]}))
            if progress.step == arguments.steps or progress.step % arguments.save_every == 0:
                accelerator.save_state(str(arguments.out / "state"))
            if progress.step == arguments.steps:
                break
        progress.epoch += 1
    average.copy_to(weights)
    whole = accelerator.get_state_dict(model)  # all ranks call
    if accelerator.is_main_process:
        result = transformer_of(arguments)
        result.load_state_dict(whole)
        result.save_pretrained(arguments.out) if arguments.full else result.save_lora_adapter(arguments.out)
    accelerator.wait_for_everyone()
    return losses


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with pictures, and their captions in .txt files"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the state and of the adapters")
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer, in all")
    parser.add_argument("--workers", type=int, default=0, help="processes of a rank that load pictures")
    parser.add_argument("--batch-size", type=int, default=2, help="samples of a rank in a micro-batch, in the mean")
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="micro-batches of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="from the state in --out")
    parser.add_argument("--full", action="store_true", help="train all weights in place of adapters")
    parser.add_argument("--plain", action="store_true", help="diffusers' own calls, one picture after another")
    parser.add_argument("--cpu", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.plain and parsed.resume:
        parser.error("--plain: got --resume too, expected one: a DistributedSampler does not know where it stood")
    return parsed


if __name__ == "__main__":
    train(parse_arguments())
