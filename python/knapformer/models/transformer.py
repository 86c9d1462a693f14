"""A plain pre-norm transformer, for what needs no diffusers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from knapformer.attention.packed_rows import rotate


class Transformer(nn.Module):
    """Takes samples through `knapformer.balance`, as models of diffusers do. A sample is {"hidden_states": x}, with x
    (1, tokens, in_channels); its prediction is (1, tokens, out_channels).

    One block computes 24 l d^2 + 4 l^2 d FLOPs on a sequence of l tokens at the defaults (mlp_ratio 4, as many
    key/value heads as query heads): the workload model, exactly. mask: of attention, as in PackedAttention.
    """

    def __init__(
        self,
        num_blocks: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        num_kv_heads: int = 12,
        mlp_ratio: float = 4.0,
        in_channels: int = 64,
        out_channels: int = 64,
        rope_theta: float = 10000.0,
        mask: str = "full",
    ) -> None:
        super().__init__()
        self.head_dim, self.rope_theta, self.mask = d_model // num_heads, rope_theta, mask
        self.in_proj = nn.Linear(in_channels, d_model)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, (num_heads, num_kv_heads, num_kv_heads), int(d_model * mlp_ratio))
            for _ in range(num_blocks)
        )
        self.norm_out = nn.LayerNorm(d_model)
        self.out_proj = nn.Linear(d_model, out_channels)
        self.gradient_checkpointing = False  # as models of diffusers have it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("transformer: expected knapformer.balance(transformer), and a list of samples")


class TransformerBlock(nn.Module):
    def __init__(self, d_model: int, heads: tuple[int, int, int], mlp_width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, d_model // heads[0]
        self.norm1 = nn.LayerNorm(d_model)
        self.to_qkv = nn.Linear(d_model, sum(heads) * self.head_dim)
        self.to_out = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, mlp_width), nn.GELU("tanh"), nn.Linear(mlp_width, d_model))

    def forward(self, x: Tensor, chunks: Any) -> Tensor:
        """x: packed tokens (tokens, d_model). chunks: as packed blocks of knapformer.adapters get it."""
        q, k, v = self.to_qkv(self.norm1(x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, 1)
        x = x + self.to_out(chunks.attention(self, rotate(q, chunks.rotation), rotate(k, chunks.rotation), v))
        out: Tensor = x + self.ff(self.norm2(x))
        return out
