"""A ControlNet of diffusers trains through a packed call of the frozen model that it controls."""

from __future__ import annotations

import copy
from typing import Any

import torch
from adapters.cases import Sample, assert_gradients_equal, of
from knapformer.adapters.parity import gradients, sample_loss
from knapformer.models import init_weights

import knapformer

CASE = of("FluxTransformer2DModel", num_layers=3, num_single_layers=2)


def controlled(controlnet: Any) -> list[Sample]:
    """Samples with residuals, but for one."""
    samples = CASE.samples()
    for sample in samples[1:]:
        image = sample["hidden_states"].flip(1)
        double, single = controlnet(**sample, controlnet_cond=image, return_dict=False)
        sample |= {"controlnet_block_samples": double, "controlnet_single_block_samples": list(single)}
    return samples


def test_a_controlnet_trains() -> None:
    from diffusers import FluxControlNetModel

    names = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim")
    fields = {name: CASE.fields[name] for name in (*names, "guidance_embeds", "axes_dims_rope")}
    controlnet = FluxControlNetModel(num_layers=2, num_single_layers=1, **fields)
    init_weights(controlnet)
    expected, model = copy.deepcopy(controlnet), CASE.make().requires_grad_(False)
    losses = [sample_loss(CASE.adapter.expected(model, sample), sample) for sample in controlled(expected)]
    torch.stack(losses).sum().backward()

    knapformer.balance(model, controls={"controlnet_block_samples": 2, "controlnet_single_block_samples": 1})
    predictions = model(samples := controlled(controlnet))
    losses = [sample_loss(*pair) for pair in zip(predictions, samples, strict=True)]
    torch.stack([*losses, predictions.zero]).sum().backward()
    assert_gradients_equal(gradients(controlnet), gradients(expected))
    model([]).zero.backward()  # a rank without samples takes part
