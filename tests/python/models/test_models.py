"""The plain transformer against a second implementation: one sample at a time, nothing packed, formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from knapformer.adapters.named import ModelConfig, build_model, load_config
from knapformer.models import init_weights, set_checkpointing
from torch import Tensor

PLAIN = load_config("transformer-tiny")


class Weights:
    """A state dict read by name, so that the reference shares no module with the models."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].t() + self.state[f"{name}.bias"]


def normed(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x: Tensor, theta: float) -> Tensor:
    """(heads, tokens, head_dim), pair by pair with 2 x 2 matrices."""
    places, width, columns = torch.arange(x.shape[1]).double(), x.shape[-1], []
    for pair in range(width // 2):
        angle = places / theta ** (2 * pair / width)
        a, b = x[..., 2 * pair], x[..., 2 * pair + 1]
        columns += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.stack(columns, -1)


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    return x.reshape(len(x), x.shape[1] // head_dim, head_dim).transpose(0, 1)


def transformer_reference(w: Weights, c: ModelConfig, x: Tensor) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return normed(x, 1e-5) * w.state[f"{name}.weight"] + w.state[f"{name}.bias"]

    hd = c.head_dim
    x = w.linear("in_proj", x)
    for i in range(c.num_blocks):
        block = f"blocks.{i}"
        sizes = [c.num_heads * hd, c.num_kv_heads * hd, c.num_kv_heads * hd]
        q, k, v = (
            heads_of(part, hd) for part in w.linear(f"{block}.to_qkv", norm(f"{block}.norm1", x)).split(sizes, 1)
        )
        k, v = (part.repeat_interleave(c.num_heads // c.num_kv_heads, 0) for part in (k, v))
        q, k = rotated(q, c.rope_theta), rotated(k, c.rope_theta)
        scores = q @ k.transpose(1, 2) / math.sqrt(hd)
        if c.mask == "causal":
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        x = x + w.linear(f"{block}.to_out", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        x = x + w.linear(f"{block}.ff.2", gelu(w.linear(f"{block}.ff.0", norm(f"{block}.norm2", x))))
    return w.linear("out_proj", norm("norm_out", x))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("seq_lens", [[7], [3, 1, 8, 8]])
def test_transformer_is_the_reference(seq_lens: list[int], mask: str, checkpointed: bool) -> None:
    config = PLAIN.replace(mask=mask)
    model = build_model(config, torch.float64)
    init_weights(model, seed=3)
    set_checkpointing(model, checkpointed)
    x = torch.randn(sum(seq_lens), config.in_channels, dtype=torch.float64)
    out = model([{"hidden_states": part} for part in x.split(seq_lens)])
    named = {name.removeprefix("transformer."): p for name, p in model.named_parameters()}
    state = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    expected = torch.cat([transformer_reference(Weights(state), config, part) for part in x.split(seq_lens)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)

    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-8, atol=1e-10, msg=name)


def test_weights_are_nowhere_zero_and_depend_on_the_seed() -> None:
    model, other = build_model(PLAIN), build_model(PLAIN)
    init_weights(model, 1)
    init_weights(other, 2)
    assert all(p.abs().min() > 0 for p in model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    init_weights(other, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
