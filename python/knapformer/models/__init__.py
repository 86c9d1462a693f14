"""The parts of models over packed sequences, and a plain transformer that needs only torch."""

from knapformer.attention.kernels import PackedAttention, varlen_attention
from knapformer.attention.masked import MaskedAttention
from knapformer.checkpointing import set_checkpointing
from knapformer.models.packed_step import PackedStep
from knapformer.models.training import init_weights, shard_model
from knapformer.models.transformer import Transformer

__all__ = [
    "MaskedAttention",
    "PackedAttention",
    "PackedStep",
    "Transformer",
    "init_weights",
    "set_checkpointing",
    "shard_model",
    "varlen_attention",
]
