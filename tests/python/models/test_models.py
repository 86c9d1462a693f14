"""The reference models against a second implementation: one sample at a time, nothing packed, formulas written out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from knapformer.models import (
    NAMED_CONFIGS,
    FluxBatch,
    FluxConfig,
    TransformerBatch,
    TransformerConfig,
    build_model,
    init_weights,
    set_checkpointing,
)
from knapformer.models.registry import config_from_dict, config_to_dict
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from knapformer import WorkloadModel

FLUX = NAMED_CONFIGS["flux-tiny"]
PLAIN = NAMED_CONFIGS["transformer-tiny"]
assert isinstance(FLUX, FluxConfig) and isinstance(PLAIN, TransformerConfig)


class Weights:
    """A state dict read by name, so that the reference shares no module with the models."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].t() + self.state[f"{name}.bias"]

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.state[f"{name}.weight"]


def normed(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x: Tensor, ids: Tensor, axes: Iterable[int], theta: float) -> Tensor:
    """(heads, tokens, head_dim), pair by pair with 2 x 2 matrices."""
    columns, first = [], 0
    for axis, width in enumerate(axes):
        for pair in range(width // 2):
            angle = ids[:, axis].double() / theta ** (2 * pair / width)
            a, b = x[..., first], x[..., first + 1]
            columns += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
            first += 2
    return torch.stack(columns, -1)


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    return x.reshape(len(x), x.shape[1] // head_dim, head_dim).transpose(0, 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def flux_reference(
    w: Weights,
    c: FluxConfig,
    image: Tensor,
    image_ids: Tensor,
    text: Tensor,
    pooled: Tensor,
    timestep: Tensor,
    guidance: Tensor,
) -> Tensor:
    """One sample."""

    def embed(name: str, x: Tensor) -> Tensor:
        return w.linear(f"time_text_embed.{name}.linear_2", F.silu(w.linear(f"time_text_embed.{name}.linear_1", x)))

    def waves(t: Tensor) -> Tensor:
        half = c.time_channels // 2
        angles = torch.stack([1000 * t * 10000 ** (-i / half) for i in range(half)])
        return torch.cat([angles.cos(), angles.sin()])

    cond = (
        embed("timestep_embedder", waves(timestep))
        + embed("guidance_embedder", waves(guidance))
        + embed("text_embedder", pooled)
    )
    num_text, d, hd = len(text), c.d_model, c.head_dim
    ids = torch.cat([torch.zeros(num_text, 3, dtype=torch.int64), image_ids])
    x_text, x_image = w.linear("context_embedder", text), w.linear("x_embedder", image)
    for i in range(c.num_double_blocks):
        block = f"transformer_blocks.{i}"
        mod = w.linear(f"{block}.norm1.linear", F.silu(cond)).reshape(6, d)
        mod_text = w.linear(f"{block}.norm1_context.linear", F.silu(cond)).reshape(6, d)
        parts = []
        for x, m, name, added in ((x_text, mod_text, "add_qkv_proj", "added_"), (x_image, mod, "to_qkv", "")):
            qkv = w.linear(f"{block}.attn.{name}", normed(x, 1e-6) * (1 + m[1]) + m[0])
            q, k, v = (heads_of(part, hd) for part in qkv.split(d, 1))
            parts.append((w.rms(f"{block}.attn.norm_{added}q", q), w.rms(f"{block}.attn.norm_{added}k", k), v))
        q, k, v = (torch.cat(pair, 1) for pair in zip(*parts, strict=True))
        out = attention(rotated(q, ids, c.rope_axes, c.rope_theta), rotated(k, ids, c.rope_axes, c.rope_theta), v)
        x_text = x_text + mod_text[2] * w.linear(f"{block}.attn.to_add_out", out[:num_text])
        x_image = x_image + mod[2] * w.linear(f"{block}.attn.to_out", out[num_text:])
        hidden = gelu(w.linear(f"{block}.ff.net.0.proj", normed(x_image, 1e-6) * (1 + mod[4]) + mod[3]))
        x_image = x_image + mod[5] * w.linear(f"{block}.ff.net.2", hidden)
        hidden = gelu(
            w.linear(f"{block}.ff_context.net.0.proj", normed(x_text, 1e-6) * (1 + mod_text[4]) + mod_text[3])
        )
        x_text = x_text + mod_text[5] * w.linear(f"{block}.ff_context.net.2", hidden)
    x = torch.cat([x_text, x_image])
    for i in range(c.num_single_blocks):
        block = f"single_transformer_blocks.{i}"
        shift, scale, gate = w.linear(f"{block}.norm.linear", F.silu(cond)).reshape(3, d)
        fused = w.linear(f"{block}.proj_in", normed(x, 1e-6) * (1 + scale) + shift)
        q, k, v = (heads_of(part, hd) for part in fused[:, : 3 * d].split(d, 1))
        q = rotated(w.rms(f"{block}.attn.norm_q", q), ids, c.rope_axes, c.rope_theta)
        k = rotated(w.rms(f"{block}.attn.norm_k", k), ids, c.rope_axes, c.rope_theta)
        x = x + gate * w.linear(f"{block}.proj_out", torch.cat([attention(q, k, v), gelu(fused[:, 3 * d :])], 1))
    scale, shift = w.linear("norm_out.linear", F.silu(cond)).reshape(2, d)
    return w.linear("proj_out", normed(x[num_text:], 1e-6) * (1 + scale) + shift)


def flux_samples(lens: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    double = torch.float64
    return [
        {
            "image": torch.randn(num_image, FLUX.in_channels, dtype=double),
            "image_ids": torch.randint(0, 9, (num_image, 3)),
            "text": torch.randn(num_text, FLUX.text_channels, dtype=double),
            "pooled": torch.randn(FLUX.pooled_channels, dtype=double),
            "timestep": torch.rand((), dtype=double),
            "guidance": torch.rand((), dtype=double),
        }
        for num_text, num_image in lens
    ]


def packed(samples: list[dict[str, Tensor]]) -> FluxBatch:
    return FluxBatch(
        **{name: torch.cat([s[name] for s in samples]) for name in ("image", "image_ids", "text")},
        **{name: torch.stack([s[name] for s in samples]) for name in ("pooled", "timestep", "guidance")},
        image_lens=[len(s["image"]) for s in samples],
        text_lens=[len(s["text"]) for s in samples],
    )


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lens", [[(3, 5)], [(2, 4), (0, 6), (5, 1), (0, 3)], [(0, 4), (0, 7)], [(4, 0), (1, 2)]])
def test_flux_is_the_reference(lens: list[tuple[int, int]], checkpointed: bool) -> None:
    model = build_model(FLUX, torch.float64)
    init_weights(model, seed=3)
    set_checkpointing(model, checkpointed)
    samples = flux_samples(lens)
    out = model(packed(samples))
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.cat([flux_reference(Weights(state), FLUX, **s) for s in samples])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)

    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in model.named_parameters():
        wanted = state[name].grad
        wanted = torch.zeros_like(parameter) if wanted is None else wanted
        assert parameter.grad is not None, f"{name} takes no part in the backward pass"
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-10, msg=name)


def transformer_reference(w: Weights, c: TransformerConfig, x: Tensor) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return normed(x, 1e-5) * w.state[f"{name}.weight"] + w.state[f"{name}.bias"]

    ids, hd = torch.arange(len(x))[:, None], c.head_dim
    x = w.linear("in_proj", x)
    for i in range(c.num_blocks):
        block = f"blocks.{i}"
        sizes = [c.num_heads * hd, c.num_kv_heads * hd, c.num_kv_heads * hd]
        q, k, v = (
            heads_of(part, hd) for part in w.linear(f"{block}.attn.to_qkv", norm(f"{block}.norm1", x)).split(sizes, 1)
        )
        k, v = (part.repeat_interleave(c.num_heads // c.num_kv_heads, 0) for part in (k, v))
        q, k = rotated(q, ids, (hd,), c.rope_theta), rotated(k, ids, (hd,), c.rope_theta)
        scores = q @ k.transpose(1, 2) / math.sqrt(hd)
        if c.mask == "causal":
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        x = x + w.linear(f"{block}.attn.to_out", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        x = x + w.linear(f"{block}.ff.net.2", gelu(w.linear(f"{block}.ff.net.0.proj", norm(f"{block}.norm2", x))))
    return w.linear("out_proj", norm("norm_out", x))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("seq_lens", [[7], [3, 1, 8, 8]])
def test_transformer_is_the_reference(seq_lens: list[int], mask: str) -> None:
    config = config_from_dict({**config_to_dict(PLAIN), "mask": mask})
    assert isinstance(config, TransformerConfig)
    model = build_model(config, torch.float64)
    init_weights(model, seed=3)
    x = torch.randn(sum(seq_lens), config.in_channels, dtype=torch.float64)
    out = model(TransformerBatch(x, seq_lens))
    weights = Weights({name: p.detach() for name, p in model.named_parameters()})
    expected = torch.cat([transformer_reference(weights, config, part) for part in x.split(seq_lens)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_weights_are_nowhere_zero_and_depend_on_the_seed() -> None:
    model, other = build_model(FLUX), build_model(FLUX)
    init_weights(model, 1)
    init_weights(other, 2)
    assert all(p.abs().min() > 0 for p in model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    init_weights(other, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_the_published_flux() -> None:
    config = NAMED_CONFIGS["flux"]
    assert isinstance(config, FluxConfig)
    assert (config.num_double_blocks, config.num_single_blocks, config.d_model, config.head_dim) == (19, 38, 3072, 128)
    model = build_model(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == 11_901_408_320  # as FLUX.1-dev is published


@pytest.mark.parametrize("name", ["flux-tiny", "transformer-demo"])
def test_a_block_computes_what_the_workload_model_says(name: str) -> None:
    config = NAMED_CONFIGS[name]
    model, tokens = build_model(config), 32
    batch: FluxBatch | TransformerBatch = TransformerBatch(torch.randn(tokens, config.in_channels), [tokens])
    if isinstance(config, FluxConfig):
        ids = torch.zeros(tokens - 8, 3, dtype=torch.int64)
        batch = FluxBatch(
            torch.randn(tokens - 8, config.in_channels), ids, [tokens - 8], torch.randn(8, config.text_channels), [8],
            torch.randn(1, config.pooled_channels), torch.rand(1), torch.rand(1),
        )  # fmt: skip
    # The counter knows no fused attention of the CPU; its two products it does.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch)
    counts = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    blocks = [flops for name, flops in counts.items() if "blocks." in name and name.count(".") == 2]
    per_block = WorkloadModel(gamma=1.0).work(tokens, config.d_model)
    modulation = 24 * config.d_model**2 if isinstance(config, FluxConfig) else 0  # a row per sample, not per token
    assert len(blocks) == config.depth
    assert all(per_block <= flops <= per_block + modulation for flops in blocks)


def test_batches_that_contradict_their_lengths() -> None:
    good = flux_samples([(2, 4)])
    with pytest.raises(ValueError, match="text: got 2 rows, expected 3"):
        batch = packed(good)
        FluxBatch(**{**vars(batch), "text_lens": [3]})
    with pytest.raises(ValueError, match="text_lens: got 2 lengths, expected 1"):
        FluxBatch(**{**vars(packed(good)), "text_lens": [1, 1]})
