"""Small models of diffusers in random configurations, and samples for them: what the adapters are tested with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Sample = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """make(): a model with seeded weights. sample(size, num_text, seed): its arguments in diffusers' form."""

    make: Callable[[], nn.Module]
    sample: Callable[[tuple[int, int, int], int, int], Sample]


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that let every part matter: what diffusers initialises as 0 or 1 is drawn, too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.add_(1)
    return model


class Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self) -> Tensor:
        return torch.rand(1, generator=self.generator)


def image_ids(rows: int, columns: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float()


def flux(**config: Any) -> Case:
    from diffusers import FluxTransformer2DModel

    settings = {
        "in_channels": 6, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 14, "num_attention_heads": 3,
        "joint_attention_dim": 11, "pooled_projection_dim": 9, "guidance_embeds": True, "axes_dims_rope": (2, 4, 8),
        **config,
    }  # fmt: skip

    def sample(size: tuple[int, int, int], num_text: int, seed: int) -> Sample:
        draw, (_, rows, columns) = Draw(seed), size
        return {
            "hidden_states": draw.normal(1, rows * columns, settings["in_channels"]),
            "encoder_hidden_states": draw.normal(1, num_text, settings["joint_attention_dim"]),
            "pooled_projections": draw.normal(1, settings["pooled_projection_dim"]),
            "timestep": draw.uniform(),
            "img_ids": image_ids(rows, columns),
            "txt_ids": torch.zeros(num_text, 3),
            "guidance": 4 * draw.uniform() if settings["guidance_embeds"] else None,
        }

    return Case(lambda: seeded(FluxTransformer2DModel(**settings)), sample)


def flux2(**config: Any) -> Case:
    from diffusers import Flux2Transformer2DModel

    settings = {
        "in_channels": 5, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 12, "num_attention_heads": 3,
        "joint_attention_dim": 10, "timestep_guidance_channels": 16, "mlp_ratio": 2.5, "axes_dims_rope": (2, 4, 4, 2),
        **config,
    }  # fmt: skip

    def sample(size: tuple[int, int, int], num_text: int, seed: int) -> Sample:
        draw, (_, rows, columns) = Draw(seed), size
        ids = image_ids(rows, columns)
        places = torch.arange(num_text).float()
        return {
            "hidden_states": draw.normal(1, rows * columns, settings["in_channels"]),
            "encoder_hidden_states": draw.normal(1, num_text, settings["joint_attention_dim"]),
            "timestep": draw.uniform(),
            "img_ids": torch.cat([ids, torch.zeros(len(ids), 1)], 1),
            "txt_ids": torch.stack([torch.zeros(num_text)] * 3 + [places], 1),
            "guidance": 4 * draw.uniform(),
        }

    return Case(lambda: seeded(Flux2Transformer2DModel(**settings)), sample)


def qwen_image(**config: Any) -> Case:
    from diffusers import QwenImageTransformer2DModel

    settings = {
        "in_channels": 7, "out_channels": 2, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
        "joint_attention_dim": 10, "axes_dims_rope": (4, 6, 6), **config,
    }  # fmt: skip

    def sample(size: tuple[int, int, int], num_text: int, seed: int) -> Sample:
        draw = Draw(seed)
        # diffusers refuses an empty text: it gets one token, masked. Of longer texts the end is masked.
        num_text, kept = max(num_text, 1), num_text - num_text // 3
        mask = (torch.arange(num_text) < kept).float().unsqueeze(0)
        return {
            "hidden_states": draw.normal(1, size[0] * size[1] * size[2], settings["in_channels"]),
            "encoder_hidden_states": draw.normal(1, num_text, settings["joint_attention_dim"]),
            "encoder_hidden_states_mask": None if num_text == kept else mask,
            "timestep": draw.uniform(),
            "img_shapes": [[size]],
        }

    return Case(lambda: seeded(QwenImageTransformer2DModel(**settings)), sample)


def sd3(**config: Any) -> Case:
    from diffusers import SD3Transformer2DModel

    settings = {
        "sample_size": 16, "patch_size": 2, "in_channels": 3, "num_layers": 3, "attention_head_dim": 8,
        "num_attention_heads": 3, "joint_attention_dim": 10, "caption_projection_dim": 24, "pooled_projection_dim": 9,
        "out_channels": 5, "pos_embed_max_size": 12, "qk_norm": "rms_norm", **config,
    }  # fmt: skip

    def sample(size: tuple[int, int, int], num_text: int, seed: int) -> Sample:
        draw, (_, rows, columns) = Draw(seed), size
        return {
            "hidden_states": draw.normal(1, 3, 2 * rows, 2 * columns),
            "encoder_hidden_states": draw.normal(1, num_text, settings["joint_attention_dim"]),
            "pooled_projections": draw.normal(1, settings["pooled_projection_dim"]),
            "timestep": 1000 * draw.uniform(),
        }

    return Case(lambda: seeded(SD3Transformer2DModel(**settings)), sample)


def wan(per_token: bool = False, **config: Any) -> Case:
    from diffusers import WanTransformer3DModel

    settings = {
        "patch_size": (1, 2, 2), "num_attention_heads": 3, "attention_head_dim": 14, "in_channels": 3,
        "out_channels": 2, "text_dim": 10, "freq_dim": 16, "ffn_dim": 50, "num_layers": 2, "rope_max_seq_len": 32,
        **config,
    }  # fmt: skip

    def sample(size: tuple[int, int, int], num_text: int, seed: int) -> Sample:
        draw, (frames, rows, columns) = Draw(seed), size
        image_dim, of_image = settings.get("image_dim"), settings.get("added_kv_proj_dim")
        drawn = {
            "hidden_states": draw.normal(1, 3, frames, 2 * rows, 2 * columns),
            "timestep": 1000 * draw.uniform(),
            # With layers for the image, diffusers takes the last 512 tokens for the text.
            "encoder_hidden_states": draw.normal(1, 512 if of_image else num_text, settings["text_dim"]),
        }
        if per_token:  # the first frame is known: its time step is 0
            drawn["timestep"] = drawn["timestep"].repeat(1, frames * rows * columns)
            drawn["timestep"][:, : rows * columns] = 0
        if image_dim:
            two = settings.get("pos_embed_seq_len")
            drawn["encoder_hidden_states_image"] = draw.normal(2 if two else 1, two // 2 if two else 7, image_dim)
        return drawn

    return Case(lambda: seeded(WanTransformer3DModel(**settings)), sample)


def cases() -> dict[str, Case]:
    return {
        "flux": flux(),
        "flux-plain": flux(
            num_layers=1,
            num_single_layers=3,
            num_attention_heads=5,
            attention_head_dim=8,
            axes_dims_rope=(4, 2, 2),
            guidance_embeds=False,
            patch_size=1,
            out_channels=10,
        ),
        "flux-double": flux(num_layers=3, num_single_layers=0, num_attention_heads=2),
        "flux2": flux2(),
        "flux2-plain": flux2(num_layers=2, num_single_layers=1, num_attention_heads=2, rope_theta=500),
        "qwen-image": qwen_image(),
        "sd3": sd3(),
        "sd3-plain": sd3(num_layers=2, qk_norm=None, num_attention_heads=2, attention_head_dim=12),
        "wan": wan(cross_attn_norm=False),
        "wan-time-per-token": wan(per_token=True, num_attention_heads=2),
        "wan-image": wan(image_dim=11, added_kv_proj_dim=42),
        "wan-image-as-text": wan(image_dim=11, num_layers=1),
        "wan-two-images": wan(image_dim=11, added_kv_proj_dim=42, pos_embed_seq_len=12, num_layers=1),
    }


# ((frames, rows, columns) of tokens, text tokens): odd sizes, an empty caption, neighbours of one length.
SIZES = [((1, 3, 5), 7), ((2, 4, 3), 0), ((1, 1, 1), 2), ((1, 5, 3), 7), ((3, 7, 2), 12)]


def target_of(sample: Sample, shape: torch.Size) -> Tensor:
    """What a sample's prediction is compared with: a function of the sample alone."""
    seed = int(sample["hidden_states"].sum().item() * 1e4) % (1 << 30)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample_loss(prediction: Tensor, sample: Sample) -> Tensor:
    return (prediction - target_of(sample, prediction.shape)).square().mean()


def one_by_one(model: nn.Module, samples: list[Sample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The oracle: diffusers' own forward on each sample alone, and the gradients of the sum of their losses."""
    model = copy.deepcopy(model)
    outputs = [model(**sample).sample for sample in samples]
    sum(sample_loss(output, sample) for output, sample in zip(outputs, samples, strict=True)).backward()
    return [output.detach() for output in outputs], gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def assert_gradients_equal(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 5e-5) -> None:
    """Relative to each parameter's largest value; where that is only rounding, to a thousandth of that of all."""
    assert got.keys() >= expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in got.items():
        reference = expected.get(name, torch.zeros_like(gradient))
        bound = tolerance * max(reference.abs().max().item(), 1e-3 * largest)
        assert (gradient - reference).abs().max().item() <= bound, name
