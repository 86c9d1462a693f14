"""What test_torchtitan.py runs on two ranks: torchtitan's FLUX by its own trainer, on pictures of several sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from adapters.cases import SIZES, gradients, relative_error, seeded
from exactness_ranks import CLUSTER
from torch import nn
from torch.distributed.fsdp import FSDPModule

import knapformer

NUM_TEXT, NUM_CLIP = 5, 7
# [step][rank]: the batch that a rank draws. It has one size: (pictures, height, width in pixels).
BATCHES = [[(2, 32, 32), (1, 64, 96)], [(1, 16, 48), (3, 32, 48)], [(2, 96, 64), (1, 16, 16)]]


def _on_cpu() -> None:
    """Makes the CPU torchtitan's device: it asks torch for an accelerator once, when it is imported, and calls these
    functions of it."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    if not hasattr(dist, "set_timeout"):  # of newer torch; torchtitan 0.3 calls it after the first step
        dist.set_timeout = lambda timeout, group: dist.distributed_c10d._set_pg_timeout(timeout, group)
    from torchtitan.tools import utils

    utils.device_module = SimpleNamespace(
        set_device=lambda device: None, device_count=lambda: dist.get_world_size(), current_device=lambda: 0,
        synchronize=lambda: None, get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30, name="cpu"),
        reset_peak_memory_stats=lambda: None, empty_cache=lambda: None, memory_stats=lambda device: {},
    )  # fmt: skip


def _encoders(folder: Path) -> None:
    from transformers import CLIPTextConfig, T5Config

    CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=NUM_CLIP,
    ).save_pretrained(folder / "clip")  # fmt: skip
    T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(folder / "t5")


def _tiny_flux(folder: Path) -> Any:
    """torchtitan's debug model, smaller."""
    from torchtitan.models import flux
    from torchtitan.models.flux.model.autoencoder import AutoEncoder

    width, heads = 32, 2
    spec = flux.model_registry("flux-debug")
    model = spec.model
    model.hidden_size, model.num_heads, model.axes_dim = width, heads, (4, 6, 6)
    model.vec_in_dim = model.context_in_dim = 16
    model.pe_config.axes_dim = (4, 6, 6)
    for linear, sizes in (
        (model.img_in, (64, width)), (model.txt_in, (16, width)),
        (model.time_in_config.in_layer, (256, width)), (model.time_in_config.out_layer, (width, width)),
        (model.vector_in_config.in_layer, (16, width)), (model.vector_in_config.out_layer, (width, width)),
        (model.final_layer_config.linear, (width, 64)), (model.final_layer_config.adaln_linear, (width, 2 * width)),
    ):  # fmt: skip
        linear.in_features, linear.out_features = sizes
    model.final_layer_config.hidden_size = width
    model.double_blocks = [flux._make_double_block_config(width, heads, 4.0, True) for _ in model.double_blocks]
    model.single_blocks = [flux._make_single_block_config(width, heads, 4.0) for _ in model.single_blocks]
    # Weights that start as zeros would hide the blocks from the first losses.
    modulations = [m.lin for block in model.double_blocks for m in (block.img_mod, block.txt_mod)]
    modulations += [block.modulation.lin for block in model.single_blocks]
    for linear in (*modulations, model.final_layer_config.linear, model.final_layer_config.adaln_linear):
        linear.param_init = {"weight": nn.init.xavier_normal_, "bias": nn.init.normal_}
    model.autoencoder = AutoEncoder.Config(resolution=64, ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1, z_channels=16)
    model.clip_encoder.version, model.t5_encoder.version = str(folder / "clip"), str(folder / "t5")
    return spec


def _config(folder: Path, name: str, steps: int, parallelize: Any) -> Any:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import MSELoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.flux.configs import FluxEncoderConfig
    from torchtitan.models.flux.trainer import FluxTrainer

    class Pictures(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            img_size: int = 32  # torchtitan computes from it the tokens of a sample

        def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
            self.rank, self.step = dp_rank, 0

        def __iter__(self) -> Any:
            while True:
                count, height, width = BATCHES[self.step % len(BATCHES)][self.rank]
                torch.manual_seed(
                    100 * self.step + self.rank
                )  # seeds the trainer's noise, too: a resumed run has the same
                self.step += 1
                texts = {"clip": torch.randint(64, (count, 1, NUM_CLIP)), "t5": torch.randint(64, (count, 1, NUM_TEXT))}
                yield texts, torch.randn(count, 3, height, width)

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            max_t5_encoding_len: int = NUM_TEXT

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        decode = get_vocab_size = encode

    spec = _tiny_flux(folder)
    return FluxTrainer.Config(
        model_spec=replace(spec, parallelize_fn=parallelize), dump_folder=str(folder / name),
        loss=MSELoss.Config(), tokenizer=NoTokenizer.Config(), encoder=FluxEncoderConfig(random_init=True),
        metrics=MetricsProcessor.Config(log_freq=1), optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=2, max_norm=1.0, steps=steps, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        # Its default backend shards tensors in a way that torch 2.13 refuses.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        debug=DebugConfig(seed=0), dataloader=Pictures.Config(), activation_checkpoint=FullAC.Config(),
        checkpoint=CheckpointManager.Config(enable=True, interval=1000, last_save_model_only=False),
    )  # fmt: skip


def _losses(config: Any) -> list[float]:
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    trainer.train()
    trainer.close()
    return losses


def _errors_of_a_packed_call(folder: Path) -> tuple[float, float]:
    """Errors of outputs and gradients against the model's own calls, one a sample, relative to the largest of each."""
    model = seeded(_tiny_flux(folder).model.build())
    samples = []
    for size in SIZES:
        ids = torch.cartesian_prod(*(torch.arange(float(count)) for count in size.grid))
        samples.append(
            {
                "img": torch.randn(1, len(ids), 64), "img_ids": ids.unsqueeze(0),
                "txt": torch.randn(1, size.text_tokens, 16), "txt_ids": torch.zeros(1, size.text_tokens, 3),
                "timesteps": torch.rand(1), "y": torch.randn(1, 16),
            }
        )  # fmt: skip
    targets = [torch.randn(sample["img"].shape) for sample in samples]
    outputs = [model(**sample) for sample in samples]
    sum((o - t).square().mean() for o, t in zip(outputs, targets, strict=True)).backward()
    expected = gradients(model)
    model.zero_grad()
    predictions = knapformer.balance(model)(samples)
    sum((p - t).square().mean() for p, t in zip(predictions, targets, strict=True)).backward()
    return (
        max(relative_error(p, o) for p, o in zip(predictions, outputs, strict=True)),
        max(relative_error(gradient, expected[name]) for name, gradient in gradients(model).items()),
    )


def on_ranks(rank: int, world: int, folder: Path, steps: int) -> tuple[dict[str, list[float]], tuple[float, float]]:
    """Losses of torchtitan as it is, of the balanced model, and of one resumed from a checkpoint; errors of a call."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    _on_cpu()
    from torchtitan.models.flux import parallelize_flux

    def parallelize(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        parallelize_flux(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction
        return model

    shared: list[int] = []  # sequences of a step that both ranks share

    def parallelize_balanced(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        balancer = knapformer.SequenceBalancer("g2/1n1", cluster=CLUSTER)
        model.register_forward_hook(lambda *_: shared.append(sum(d > 1 for d in balancer.plan.degree_of_sequence)))
        return knapformer.balance(parallelize(model, **options), balancer, batches=True)

    if rank == 0:
        _encoders(folder)
    dist.barrier()
    errors = _errors_of_a_packed_call(folder)
    losses = {
        "plain": _losses(_config(folder, "plain", steps, parallelize)),
        "balanced": _losses(_config(folder, "balanced", steps, parallelize_balanced)),
        "resumed": [
            *_losses(_config(folder, "resumed", steps // 2 - 1, parallelize_balanced)),
            *_losses(_config(folder, "resumed", steps, parallelize_balanced)),
        ],
    }
    assert any(shared), "no sequence was shared"
    return losses, errors
