"""A FLUX-shaped diffusion transformer over packed sequences.

A sample is one sequence, [text; image]. Double-stream blocks hold separate weights for text and image and join them in
attention; single-stream blocks treat all tokens alike, with one product for queries, keys, values and the hidden layer
and one for both outputs. A conditioning vector per sample (time step, guidance, pooled text) modulates every block
(adaLN). Queries and keys are RMS-normed and rotated by their (frame, row, column) position.

Modules are named after diffusers' FluxTransformer2DModel, whose weights diffusers_flux.py loads and saves. These of its
products are fused here along the output axis, in this order:

    attn.to_qkv        to_q, to_k, to_v               (double blocks)
    attn.add_qkv_proj  add_q_proj, add_k_proj, add_v_proj
    attn.to_out        to_out.0
    proj_in            attn.to_q, attn.to_k, attn.to_v, proj_mlp   (single blocks)

Rows of a modulation are in that model's order too: shift, scale, gate for attention, then for the hidden layer; in
norm_out scale comes before shift.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knapformer import Sample
from knapformer.models.config import BaseConfig
from knapformer.models.layers import Block, Embedder, FeedForward, rotate, rotations, tanh_gelu, timestep_embedding
from knapformer.models.model import BlockInputs, Draw, PackedModel, Rows
from knapformer.models.packing import (
    Segments,
    TwoStreams,
    check_num_lengths,
    check_num_rows,
    gated_add,
    modulate,
    positions,
    segment_index,
    text_flags,
)
from knapformer.models.patches import square_positions
from knapformer.models.step import PackedStep

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer

_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class FluxConfig(BaseConfig):
    """A FLUX-shaped diffusion transformer. The defaults are the published one: 12 B parameters."""

    kind: ClassVar[str] = "flux"
    block_counts: ClassVar[dict[str, str]] = {"double": "num_double_blocks", "single": "num_single_blocks"}

    num_double_blocks: int = 19
    num_single_blocks: int = 38
    d_model: int = 3072
    num_heads: int = 24
    mlp_ratio: float = 4.0
    in_channels: int = 64  # a 2x2 patch of 16 latent channels
    out_channels: int = 64
    text_channels: int = 4096
    pooled_channels: int = 768
    time_channels: int = 256  # sines and cosines of the time step
    rope_axes: tuple[int, ...] = (16, 56, 56)  # features of a head per axis: (frame, row, column)
    rope_theta: float = 10000.0
    guidance: bool = True
    qkv_bias: bool = True  # in the double blocks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(
            sum(self.rope_axes) == self.head_dim and all(axis % 2 == 0 for axis in self.rope_axes),
            "rope_axes",
            f"even numbers that add up to d_model / num_heads = {self.head_dim}",
        )
        self._expect(self.time_channels % 2 == 0, "time_channels", "an even number")

    @property
    def mlp_width(self) -> int:
        return int(self.d_model * self.mlp_ratio)


@dataclasses.dataclass(frozen=True)
class FluxBatch:
    """The samples of one rank, packed: text tokens of all samples one after another, image tokens likewise.

    A sample without text has a text length of 0; a rank without samples has tensors of no rows. What is None is taken
    as zeros.
    """

    image: Tensor  # (image tokens, in_channels)
    image_ids: Tensor  # (image tokens, 3) integers: frame, row, column
    image_lens: Sequence[int]  # image tokens of each sample
    text: Tensor  # (text tokens, text_channels)
    text_lens: Sequence[int]  # text tokens of each sample
    pooled: Tensor  # (samples, pooled_channels)
    timestep: Tensor  # (samples,) in [0, 1]
    guidance: Tensor | None = None  # (samples,)
    text_ids: Tensor | None = None  # (text tokens, 3) integers

    def __post_init__(self) -> None:
        num_samples, num_image, num_text = len(self.image_lens), sum(self.image_lens), sum(self.text_lens)
        check_num_lengths("text_lens", self.text_lens, num_samples, "image_lens")
        check_num_rows(
            image=(self.image, num_image),
            image_ids=(self.image_ids, num_image),
            text=(self.text, num_text),
            text_ids=(self.text_ids, num_text),
            pooled=(self.pooled, num_samples),
            timestep=(self.timestep, num_samples),
            guidance=(self.guidance, num_samples),
        )

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sample."""
        return [text + image for text, image in zip(self.text_lens, self.image_lens, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Of the chunks on this rank, computed once a step. Not a tensor, so that FSDP leaves its precision alone."""

    step: PackedStep
    streams: TwoStreams
    rotation: Tensor
    chunk_of_token: Segments
    chunk_of_text: Segments
    chunk_of_image: Segments


class ConditionEmbedding(nn.Module):
    """Time step, guidance and pooled text of each sample -> its conditioning vector, (samples, d_model)."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.num_channels = config.time_channels
        self.timestep_embedder = Embedder(config.time_channels, config.d_model)
        if config.guidance:
            self.guidance_embedder = Embedder(config.time_channels, config.d_model)
        self.text_embedder = Embedder(config.pooled_channels, config.d_model)

    def forward(self, timestep: Tensor, guidance: Tensor | None, pooled: Tensor) -> Tensor:
        cond: Tensor = self.timestep_embedder(timestep_embedding(timestep, self.num_channels))
        if hasattr(self, "guidance_embedder"):
            guidance = torch.zeros_like(timestep) if guidance is None else guidance
            cond = cond + self.guidance_embedder(timestep_embedding(guidance, self.num_channels))
        out: Tensor = cond + self.text_embedder(pooled)
        return out


class _Modulation(nn.Module):
    """A conditioning vector -> the rows that modulate a block: `count` of (sequences, d_model)."""

    def __init__(self, d_model: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(d_model, count * d_model)

    def forward(self, cond: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(cond)).chunk(self.count, -1)  # type: ignore[no-any-return]


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=_EPS)


class JointAttention(nn.Module):
    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        d_model = config.d_model
        self.head_dim = config.head_dim
        self.to_qkv = nn.Linear(d_model, 3 * d_model, bias=config.qkv_bias)
        self.add_qkv_proj = nn.Linear(d_model, 3 * d_model, bias=config.qkv_bias)
        self.to_out = nn.Linear(d_model, d_model)
        self.to_add_out = nn.Linear(d_model, d_model)
        self.norm_q = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.norm_k = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.norm_added_q = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.norm_added_k = nn.RMSNorm(config.head_dim, eps=_EPS)

    def forward(self, text: Tensor, image: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
        q_image, k_image, v_image = self.to_qkv(image).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q_text, k_text, v_text = self.add_qkv_proj(text).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        join = layout.streams.join
        q = rotate(join(self.norm_added_q(q_text), self.norm_q(q_image)), layout.rotation)
        k = rotate(join(self.norm_added_k(k_text), self.norm_k(k_image)), layout.rotation)
        out = layout.step.attention(q, k, join(v_text, v_image)).flatten(1)
        out_text, out_image = layout.streams.split(out)
        return self.to_add_out(out_text), self.to_out(out_image)


class FluxDoubleBlock(Block):
    """(text tokens, d), (image tokens, d), (chunks, d) -> the first two."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.norm1 = _Modulation(config.d_model, 6)
        self.norm1_context = _Modulation(config.d_model, 6)
        self.attn = JointAttention(config)
        self.ff = FeedForward(config.d_model, config.mlp_width)
        self.ff_context = FeedForward(config.d_model, config.mlp_width)

    def compute(self, text: Tensor, image: Tensor, cond: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
        of_image, of_text = layout.chunk_of_image, layout.chunk_of_text
        shift, scale, gate, shift_ff, scale_ff, gate_ff = self.norm1(cond)
        t_shift, t_scale, t_gate, t_shift_ff, t_scale_ff, t_gate_ff = self.norm1_context(cond)
        attended_text, attended_image = self.attn(
            modulate(_norm(text), t_shift, t_scale, of_text), modulate(_norm(image), shift, scale, of_image), layout
        )
        image = gated_add(image, attended_image, gate, of_image)
        text = gated_add(text, attended_text, t_gate, of_text)
        image = gated_add(image, self.ff(modulate(_norm(image), shift_ff, scale_ff, of_image)), gate_ff, of_image)
        text = gated_add(
            text, self.ff_context(modulate(_norm(text), t_shift_ff, t_scale_ff, of_text)), t_gate_ff, of_text
        )
        return text, image


class _QueryKeyNorm(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.norm_q = nn.RMSNorm(head_dim, eps=_EPS)
        self.norm_k = nn.RMSNorm(head_dim, eps=_EPS)


class FluxSingleBlock(Block):
    """(tokens, d), (chunks, d) -> (tokens, d)."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.sizes = (3 * config.d_model, config.mlp_width)
        self.head_dim = config.head_dim
        self.norm = _Modulation(config.d_model, 3)
        self.proj_in = nn.Linear(config.d_model, sum(self.sizes))
        self.attn = _QueryKeyNorm(config.head_dim)
        self.proj_out = nn.Linear(config.d_model + config.mlp_width, config.d_model)

    def compute(self, x: Tensor, cond: Tensor, layout: _Layout) -> Tensor:
        shift, scale, gate = self.norm(cond)
        qkv, hidden = self.proj_in(modulate(_norm(x), shift, scale, layout.chunk_of_token)).split(self.sizes, -1)
        q, k, v = qkv.unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q = rotate(self.attn.norm_q(q), layout.rotation)
        k = rotate(self.attn.norm_k(k), layout.rotation)
        attended = layout.step.attention(q, k, v).flatten(1)
        update = self.proj_out(torch.cat([attended, tanh_gelu(hidden)], -1))
        return gated_add(x, update, gate, layout.chunk_of_token)


def _named_configs() -> dict[str, BaseConfig]:
    small: dict[str, Any] = {"text_channels": 64, "pooled_channels": 32, "time_channels": 32}
    return {
        "flux": FluxConfig(),
        # An eighth of the width, with as many heads and blocks: what replaying plans of FLUX takes on a CPU.
        "flux-narrow": FluxConfig(d_model=384, rope_axes=(4, 6, 6), **small),
        # Width and depth for one core per rank: wide enough that matrix products dominate, as they do at full size.
        "flux-demo": FluxConfig(
            num_double_blocks=1, num_single_blocks=2, d_model=256, num_heads=4, rope_axes=(8, 28, 28), **small
        ),
        "flux-tiny": FluxConfig(
            num_double_blocks=2, num_single_blocks=2, d_model=64, num_heads=4, in_channels=8, out_channels=8,
            rope_axes=(4, 6, 6), text_channels=24, pooled_channels=12, time_channels=16,
        ),
    }  # fmt: skip


class FluxTransformer(PackedModel):
    """FluxBatch -> (image tokens, out_channels), in the order of batch.image."""

    config_class = FluxConfig
    named_configs: ClassVar[dict[str, BaseConfig]] = _named_configs()

    def __init__(self, config: FluxConfig) -> None:
        super().__init__(config)
        d_model = config.d_model
        self.x_embedder = nn.Linear(config.in_channels, d_model)
        self.context_embedder = nn.Linear(config.text_channels, d_model)
        self.time_text_embed = ConditionEmbedding(config)
        self.transformer_blocks = nn.ModuleList(FluxDoubleBlock(config) for _ in range(config.num_double_blocks))
        self.single_transformer_blocks = nn.ModuleList(FluxSingleBlock(config) for _ in range(config.num_single_blocks))
        self.norm_out = _Modulation(d_model, 2)
        self.proj_out = nn.Linear(d_model, config.out_channels)

    def block_lists(self) -> list[nn.ModuleList]:
        return [self.transformer_blocks, self.single_transformer_blocks]

    def forward(self, batch: FluxBatch, balancer: SequenceBalancer | None = None, *, planned: bool = False) -> Tensor:
        dtype, device = self.x_embedder.weight.dtype, batch.image.device
        is_text = text_flags(batch.text_lens, batch.image_lens)
        home = TwoStreams.of_flags(is_text, device)
        text_ids = batch.image_ids.new_zeros((batch.text.shape[0], 3)) if batch.text_ids is None else batch.text_ids
        position_ids = home.join(text_ids, batch.image_ids)
        cond = self.time_text_embed(batch.timestep, batch.guidance, batch.pooled)
        x = home.join(self.context_embedder(batch.text.to(dtype)), self.x_embedder(batch.image.to(dtype)))

        step = PackedStep(batch.seq_lens, self.config.d_model, balancer, planned=planned)
        x, (position_ids, is_text), (chunk_cond,) = step.enter(x, [position_ids, is_text], [cond])
        layout = self._layout(step, position_ids, is_text, x)
        text, image = layout.streams.split(x)
        for block in self.transformer_blocks:
            text, image = block(text, image, chunk_cond, layout)
        x = layout.streams.join(text, image)
        for block in self.single_transformer_blocks:
            x = block(x, chunk_cond, layout)
        _, image = home.split(step.leave(x))

        scale, shift = self.norm_out(cond)
        out: Tensor = self.proj_out(modulate(_norm(image), shift, scale, Segments.of_lengths(batch.image_lens, device)))
        return out

    def _layout(self, step: PackedStep, position_ids: Tensor, is_text: Tensor, x: Tensor) -> _Layout:
        """is_text: on the CPU, a flag for each token of the chunks."""
        of_chunks = torch.zeros(len(step.chunk_lens), dtype=torch.int64)
        text_lens = of_chunks.index_add_(0, segment_index(step.chunk_lens), is_text.long()).tolist()
        image_lens = [length - text for length, text in zip(step.chunk_lens, text_lens, strict=True)]
        return _Layout(
            step=step,
            streams=TwoStreams.of_flags(is_text, x.device),
            rotation=rotations(position_ids, self.config.rope_axes, self.config.rope_theta, x.dtype),
            chunk_of_token=step.segments(x),
            chunk_of_text=Segments.of_lengths(text_lens, x.device),
            chunk_of_image=Segments.of_lengths(image_lens, x.device),
        )

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], rows: Rows) -> BlockInputs:
        x = rows(sum(step.chunk_lens))
        image_lens = [length - text for length, text in zip(step.chunk_lens, text_lens, strict=True)]
        place = positions(step.chunk_lens, x.device)
        position_ids = place.unsqueeze(1).expand(-1, len(self.config.rope_axes))
        layout = self._layout(step, position_ids, text_flags(text_lens, image_lens), x)
        rest = (rows(len(step.chunk_lens)), layout)
        if self.config.num_double_blocks == 0:
            return (x,), rest
        return (rows(layout.streams.text_rows.numel()), rows(layout.streams.image_rows.numel())), rest

    @staticmethod
    def random_batch(config: FluxConfig, samples: Sequence[Sample], draw: Draw) -> tuple[FluxBatch, Tensor]:
        text_lens = [sample.text_tokens for sample in samples]
        image_lens = [sample.visual_tokens for sample in samples]
        # Times stay in float32: 1000 t in bfloat16 has steps of 4.
        times = draw.uniform(2, len(samples))
        batch = FluxBatch(
            image=draw.normal(sum(image_lens), config.in_channels),
            image_ids=square_positions(image_lens).to(draw.device, torch.int32),
            image_lens=image_lens,
            text=draw.normal(sum(text_lens), config.text_channels),
            text_lens=text_lens,
            pooled=draw.normal(len(samples), config.pooled_channels),
            timestep=times[0],
            guidance=times[1] if config.guidance else None,
        )
        return batch, draw.normal(sum(image_lens), config.out_channels)
