"""A Wan-shaped video diffusion transformer over packed sequences.

A sample is one sequence, the patches of its video, and beside it a text. Every block attends first over the video, its
queries and keys RMS-normed across all heads and rotated by their (frame, row, column) position, then from the video to
the text, and has a hidden layer at its end. The time step modulates each block (adaLN): one vector per sample plus a
table per block. Norms, modulation and residual sums are computed in float32 or better.

With a balancer the sequences that are planned and moved are the video's. The text travels with them as a second stream:
one row a sequence, which reaches every rank that holds a chunk of it; its gradients come home as a sum over the chunks.

    video  a a a a a a | b b    -- route -->    a a a a          a a b b
    text   A           | B                      A                A   B

Modules are named after diffusers' WanTransformer3DModel, whose weights diffusers_wan.py loads and saves. These of its
products are fused here along the output axis, in this order:

    attn1.to_qkv       to_q, to_k, to_v
    attn2.to_kv        to_k, to_v
    patch_embedding    a product over a patch's (channel, frame, row, column) numbers instead of a convolution

Not here: the image branch of the image-to-video models of Wan 2.1, and a time step per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knapformer import Sample
from knapformer.device_copies import to_device
from knapformer.models.attention import PackedCrossAttention
from knapformer.models.config import BaseConfig
from knapformer.models.layers import Block, Embedder, FeedForward, rotate, rotations, tanh_gelu, timestep_embedding
from knapformer.models.model import BlockInputs, Draw, PackedModel, Rows
from knapformer.models.packing import (
    Segments,
    check_num_lengths,
    check_num_rows,
    gated_add,
    lengths_list,
    modulate,
    positions,
    segment_index,
)
from knapformer.models.patches import grid_of, grid_positions, patchify, square_positions
from knapformer.models.step import PackedStep

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer


@dataclasses.dataclass(frozen=True)
class WanConfig(BaseConfig):
    """The defaults are the published text-to-video model of 14 B parameters.

    On a video of l patches a block computes (12 + 4 mlp_width / d_model) l d^2 + 4 l^2 d FLOPs, at the defaults
    22.8 l d^2 and not 24, and 4 (l + d) d for each token of its text.
    """

    kind: ClassVar[str] = "wan"
    text_beside: ClassVar[bool] = True

    num_blocks: int = 40
    d_model: int = 5120
    num_heads: int = 40
    mlp_width: int = 13824
    in_channels: int = 16
    out_channels: int = 16
    patch_size: tuple[int, ...] = (1, 2, 2)  # (frames, rows, columns) of the latent video
    text_channels: int = 4096
    time_channels: int = 256  # sines and cosines of the time step
    cross_attention_norm: bool = True
    eps: float = 1e-6
    rope_theta: float = 10000.0
    max_text_tokens: int = 512  # of a sample; the room that the text takes while it travels

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(
            self.head_dim % 2 == 0 and self.head_dim >= 6,
            "num_heads",
            "an even d_model / num_heads of at least 6, for the rotation of pairs on three axes",
        )
        self._expect(len(self.patch_size) == 3, "patch_size", "three numbers: frames, rows, columns")
        self._expect(self.time_channels % 2 == 0, "time_channels", "an even number")

    @property
    def text_limit(self) -> int:
        return self.max_text_tokens

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """Features of a head per axis: two thirds for row and column, the rest for the frame."""
        side = self.head_dim // 6 * 2
        return self.head_dim - 2 * side, side, side


@dataclasses.dataclass(frozen=True)
class WanBatch:
    """The samples of one rank, packed: patches of all samples one after another, text tokens likewise.

    A sample without text has a text length of 0; a rank without samples has tensors of no rows.
    """

    video: Tensor  # (patches, in_channels * numbers of a patch), as patchify makes them
    position_ids: Tensor  # (patches, 3) integers: frame, row, column
    video_lens: Sequence[int]  # patches of each sample
    text: Tensor  # (text tokens, text_channels)
    text_lens: Sequence[int]  # text tokens of each sample
    timestep: Tensor  # (samples,) in [0, 1000]

    def __post_init__(self) -> None:
        num_samples, num_patches, num_text = len(self.video_lens), sum(self.video_lens), sum(self.text_lens)
        check_num_lengths("text_lens", self.text_lens, num_samples, "video_lens")
        check_num_rows(
            video=(self.video, num_patches),
            position_ids=(self.position_ids, num_patches),
            text=(self.text, num_text),
            timestep=(self.timestep, num_samples),
        )

    @property
    def seq_lens(self) -> Sequence[int]:
        """Of the sequences that a balancer plans: the video's."""
        return self.video_lens

    @staticmethod
    def of_samples(
        videos: Sequence[Tensor], texts: Sequence[Tensor], timestep: Tensor, patch_size: Sequence[int] = (1, 2, 2)
    ) -> WanBatch:
        """Of at least one sample. videos: (channels, frames, height, width); texts: (text tokens, text_channels)."""
        grids = [grid_of(video, patch_size) for video in videos]
        return WanBatch(
            video=torch.cat([patchify(video, patch_size) for video in videos]),
            position_ids=torch.cat([grid_positions(grid, videos[0].device) for grid in grids]),
            video_lens=[math.prod(grid) for grid in grids],
            text=torch.cat(list(texts)),
            text_lens=[len(text) for text in texts],
            timestep=timestep,
        )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Of the chunks on this rank, computed once a step. Not a tensor, so that FSDP leaves its precision alone."""

    step: PackedStep
    to_text: PackedCrossAttention
    rotation: Tensor
    chunk_of_token: Segments


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, segments: Segments, eps: float) -> Tensor:
    """LayerNorm, then `modulate`, in float32 or better; in the dtype of x."""
    return modulate(F.layer_norm(_wide(x), x.shape[-1:], eps=eps), shift, scale, segments).to(x.dtype)


class WanConditionEmbedding(nn.Module):
    """Time step -> (samples, d), and the rows that modulate the blocks, (samples, 6 d); text -> (text tokens, d)."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.num_channels = config.time_channels
        self.time_embedder = Embedder(config.time_channels, config.d_model)
        self.time_proj = nn.Linear(config.d_model, 6 * config.d_model)
        self.text_embedder = Embedder(config.text_channels, config.d_model, tanh_gelu)

    def forward(self, timestep: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time: Tensor = self.time_embedder(timestep_embedding(timestep, self.num_channels, scale=1.0))
        return time, self.time_proj(F.silu(time)), self.text_embedder(text)


class _Attention(nn.Module):
    """What both attentions of a block share: queries and keys are normed across all heads."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.to_out = nn.Linear(config.d_model, config.d_model)
        self.norm_q = nn.RMSNorm(config.d_model, eps=config.eps)
        self.norm_k = nn.RMSNorm(config.d_model, eps=config.eps)

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        """(tokens, d) -> (tokens, heads, head_dim)."""
        return (t.unflatten(-1, (-1, self.head_dim)) for t in (self.norm_q(q), self.norm_k(k), v))


class WanSelfAttention(_Attention):
    def __init__(self, config: WanConfig) -> None:
        super().__init__(config)
        self.to_qkv = nn.Linear(config.d_model, 3 * config.d_model)

    def forward(self, x: Tensor, layout: _Layout) -> Tensor:
        q, k, v = self.heads(*self.to_qkv(x).chunk(3, -1))
        attended = layout.step.attention(rotate(q, layout.rotation), rotate(k, layout.rotation), v)
        out: Tensor = self.to_out(attended.flatten(1))
        return out


class WanCrossAttention(_Attention):
    def __init__(self, config: WanConfig) -> None:
        super().__init__(config)
        self.to_q = nn.Linear(config.d_model, config.d_model)
        self.to_kv = nn.Linear(config.d_model, 2 * config.d_model)

    def forward(self, x: Tensor, text: Tensor, layout: _Layout) -> Tensor:
        q, k, v = self.heads(self.to_q(x), *self.to_kv(text).chunk(2, -1))
        out: Tensor = self.to_out(layout.to_text(q, k, v).flatten(1))
        return out


class WanBlock(Block):
    """(chunk tokens, d), (text tokens, d), (chunks, 6, d) -> the first."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn1 = WanSelfAttention(config)
        self.attn2 = WanCrossAttention(config)
        self.norm2 = nn.LayerNorm(config.d_model, eps=config.eps) if config.cross_attention_norm else nn.Identity()
        self.ffn = FeedForward(config.d_model, config.mlp_width)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.d_model) * config.d_model**-0.5)

    def compute(self, x: Tensor, text: Tensor, modulation: Tensor, layout: _Layout) -> Tensor:
        rows = _wide(self.scale_shift_table) + _wide(modulation)
        shift, scale, gate, shift_ff, scale_ff, gate_ff = rows.unbind(1)
        of_chunk = layout.chunk_of_token
        attended = self.attn1(_modulated(x, shift, scale, of_chunk, self.eps), layout)
        x = gated_add(_wide(x), _wide(attended), gate, of_chunk).to(x.dtype)
        x = x + self.attn2(self.norm2(x), text, layout)
        hidden = self.ffn(_modulated(x, shift_ff, scale_ff, of_chunk, self.eps))
        return gated_add(_wide(x), _wide(hidden), gate_ff, of_chunk).to(x.dtype)


class WanTransformer(PackedModel):
    """WanBatch -> (patches, numbers of a patch * out_channels), in the order of batch.video; see unpatchify."""

    config_class = WanConfig
    named_configs: ClassVar[dict[str, BaseConfig]] = {
        "wan": WanConfig(),
        "wan-1.3b": WanConfig(num_blocks=30, d_model=1536, num_heads=12, mlp_width=8960),
        "wan-demo": WanConfig(
            num_blocks=3, d_model=256, num_heads=4, mlp_width=1024, text_channels=64, time_channels=32
        ),
        "wan-tiny": WanConfig(
            num_blocks=2, d_model=48, num_heads=4, mlp_width=144, in_channels=2, out_channels=2, text_channels=10,
            time_channels=16,
        ),
    }  # fmt: skip

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config)
        num_in_patch = math.prod(config.patch_size)
        self.patch_embedding = nn.Linear(config.in_channels * num_in_patch, config.d_model)
        self.condition_embedder = WanConditionEmbedding(config)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_blocks))
        self.proj_out = nn.Linear(config.d_model, num_in_patch * config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.d_model) * config.d_model**-0.5)

    def block_lists(self) -> list[nn.ModuleList]:
        return [self.blocks]

    def forward(self, batch: WanBatch, balancer: SequenceBalancer | None = None, *, planned: bool = False) -> Tensor:
        time, modulation, text = self.condition_embedder(batch.timestep, batch.text)
        x = self.patch_embedding(batch.video.to(self.patch_embedding.weight.dtype))

        step = PackedStep(batch.video_lens, self.config.d_model, balancer, planned=planned)
        text_lens: Sequence[int] = batch.text_lens
        if balancer is None:
            x, (position_ids,), (modulation,) = step.enter(x, [batch.position_ids], [modulation])
        else:
            text_rows, lens = self._rows_of_text(text, text_lens)
            x, (position_ids,), (modulation, text_rows, lens) = step.enter(
                x, [batch.position_ids], [modulation, text_rows, lens]
            )
            text, text_lens = self._text_of_rows(text_rows, lens)
        layout, rows = self._layout(step, position_ids, text_lens, x), modulation.unflatten(1, (6, -1))
        for block in self.blocks:
            x = block(x, text, rows, layout)
        x = step.leave(x)

        shift, scale = (_wide(self.scale_shift_table) + _wide(time).unsqueeze(1)).unbind(1)
        of_sample = Segments.of_lengths(batch.video_lens, x.device)
        out: Tensor = self.proj_out(_modulated(x, shift, scale, of_sample, self.config.eps))
        return out

    def _layout(self, step: PackedStep, position_ids: Tensor, text_lens: Sequence[int], x: Tensor) -> _Layout:
        return _Layout(
            step=step,
            to_text=PackedCrossAttention(step.chunk_lens, text_lens),
            rotation=rotations(position_ids, self.config.rope_axes, self.config.rope_theta, x.dtype),
            chunk_of_token=step.segments(x),
        )

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], rows: Rows) -> BlockInputs:
        x, text, modulation = rows(sum(step.chunk_lens)), rows(sum(text_lens)), rows(6 * len(step.chunk_lens))
        position_ids = square_positions(step.chunk_lens).to(x.device)
        layout = self._layout(step, position_ids, text_lens, x)
        return (x,), (text, modulation.unflatten(0, (-1, 6)), layout)

    @staticmethod
    def random_batch(config: WanConfig, samples: Sequence[Sample], draw: Draw) -> tuple[WanBatch, Tensor]:
        video_lens, text_lens = [s.visual_tokens for s in samples], [s.text_tokens for s in samples]
        num_in_patch = math.prod(config.patch_size)
        batch = WanBatch(
            video=draw.normal(sum(video_lens), num_in_patch * config.in_channels),
            position_ids=square_positions(video_lens).to(draw.device),
            video_lens=video_lens,
            text=draw.normal(sum(text_lens), config.text_channels),
            text_lens=text_lens,
            timestep=1000 * draw.uniform(len(samples)),
        )
        return batch, draw.normal(sum(video_lens), num_in_patch * config.out_channels)

    def _rows_of_text(self, text: Tensor, text_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(text tokens, d) -> (samples, max_text_tokens * d) with zeros behind each text; its lengths, on the CPU."""
        limit = self.config.max_text_tokens
        if max(text_lens, default=0) > limit:
            raise ValueError(f"text_lens: got {max(text_lens)} tokens, expected at most max_text_tokens = {limit}")
        rows = text.new_zeros((len(text_lens) * limit, text.shape[1]))
        rows = rows.index_copy(0, _places(text_lens, limit, text.device), text)
        lens = torch.tensor(list(text_lens), dtype=torch.int64)
        return rows.reshape(len(text_lens), limit * text.shape[1]), lens

    def _text_of_rows(self, rows: Tensor, lens: Tensor) -> tuple[Tensor, list[int]]:
        """The inverse, of this rank's chunks."""
        text_lens, limit = lengths_list(lens), self.config.max_text_tokens
        tokens = rows.reshape(len(text_lens) * limit, self.config.d_model)
        return tokens.index_select(0, _places(text_lens, limit, rows.device)), text_lens


def _places(lens: Sequence[int], limit: int, device: torch.device) -> Tensor:
    """(tokens,) int64: where packed tokens lie among rows of `limit` tokens a sequence."""
    return to_device(segment_index(lens) * limit + positions(lens), device)
