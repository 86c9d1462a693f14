"""A plain pre-norm transformer over packed sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from knapformer import Sample
from knapformer.models.attention import MASKS
from knapformer.models.config import BaseConfig, checked_field, expect
from knapformer.models.layers import Block, Rotation, rotate, rotations
from knapformer.models.model import Draw, PackedModel
from knapformer.models.packing import positions
from knapformer.models.step import PackedStep

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer


@dataclasses.dataclass(frozen=True)
class TransformerConfig(BaseConfig):
    """A plain pre-norm transformer over packed sequences of feature rows.

    One block computes 24 l d^2 + 4 l^2 d FLOPs on a sequence of l tokens at the defaults (mlp_ratio 4, as many
    key/value heads as query heads): the workload model, exactly.
    """

    num_blocks: int = 12
    d_model: int = 768
    num_heads: int = 12
    num_kv_heads: int = 12
    mlp_ratio: float = 4.0
    in_channels: int = 64
    out_channels: int = 64
    rope_theta: float = 10000.0
    mask: str = "full"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked_field(field.name, getattr(self, field.name), field.default)
        expect(self.mask in MASKS, "mask", self.mask, f"one of {', '.join(MASKS)}")
        expect(self.d_model % self.num_heads == 0, "num_heads", self.num_heads, f"a divisor of d_model {self.d_model}")
        even = "an even d_model / num_heads, for the rotation of pairs"
        expect(self.head_dim % 2 == 0, "num_heads", self.num_heads, even)
        expect(
            self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads,
            f"a divisor of {self.num_heads} heads",
        )  # fmt: skip

    @property
    def mlp_width(self) -> int:
        return int(self.d_model * self.mlp_ratio)

    @property
    def block_counts(self) -> dict[str, int]:
        return {"block": self.num_blocks}

    def build(self) -> Transformer:
        return Transformer(self)

    def random_batch(
        self, samples: Sequence[Sample], draw: Draw, seeds: Sequence[int] | None = None
    ) -> tuple[TransformerBatch, Tensor]:
        seq_lens = [sample.num_tokens for sample in samples]
        pairs = list(zip(seq_lens, draw.each(len(samples), seeds), strict=True))
        x, target = (
            torch.cat([draw.normal(0, channels), *(of.normal(length, channels) for length, of in pairs)])
            for channels in (self.in_channels, self.out_channels)
        )
        return TransformerBatch(x, seq_lens), target

    def alone(self, kind: str) -> TransformerConfig:
        return dataclasses.replace(self, num_blocks=1)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "transformer", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class TransformerBatch:
    """The sequences of one rank, packed. A rank without sequences has tensors of 0 rows."""

    x: Tensor  # (tokens, in_channels)
    seq_lens: Sequence[int]  # tokens of each sequence


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.to_qkv = nn.Linear(config.d_model, sum(self.heads) * config.head_dim)
        self.to_out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, step: PackedStep, rotation: Rotation) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, 1)
        out: Tensor = self.to_out(step.attention(rotate(q, rotation), rotate(k, rotation), v).flatten(1))
        return out


class TransformerBlock(Block):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        linear_in, linear_out = nn.Linear(config.d_model, config.mlp_width), nn.Linear(config.mlp_width, config.d_model)
        self.ff = nn.Sequential(linear_in, nn.GELU("tanh"), linear_out)

    def compute(self, x: Tensor, step: PackedStep, rotation: Rotation) -> Tensor:
        x = x + self.attn(self.norm1(x), step, rotation)
        out: Tensor = x + self.ff(self.norm2(x))
        return out


class Transformer(PackedModel):
    """(tokens, in_channels) -> (tokens, out_channels), every token attending to its own sequence."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.in_channels, config.d_model)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_blocks))
        self.norm_out = nn.LayerNorm(config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.out_channels)

    def block_lists(self) -> list[nn.ModuleList]:
        return [self.blocks]

    def forward(
        self, batch: TransformerBatch, balancer: SequenceBalancer | None = None, *, planned: bool = False
    ) -> Tensor:
        x = self.in_proj(batch.x.to(self.in_proj.weight.dtype))
        step = PackedStep(batch.seq_lens, self.config.d_model, balancer, self.config.mask, planned)
        x, (place,), _ = step.enter(x, [positions(batch.seq_lens, x.device)], [])
        rotation = self._rotation(place, x)
        for block in self.blocks:
            x = block(x, step, rotation)
        out: Tensor = self.out_proj(self.norm_out(step.leave(x)))
        return out

    def _rotation(self, place: Tensor, x: Tensor) -> Rotation:
        return rotations(place, self.config.head_dim, self.config.rope_theta, x.dtype)

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(sum(step.chunk_lens), self.config.d_model)
        return x, step, self._rotation(positions(step.chunk_lens, x.device), x)
