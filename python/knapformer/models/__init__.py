"""The parts of models over packed sequences, and a plain transformer that needs only torch."""

from knapformer.models.attention import PackedAttention, varlen_attention
from knapformer.models.config import BaseConfig
from knapformer.models.model import PackedModel
from knapformer.models.parallel import init_weights, set_checkpointing, shard_model
from knapformer.models.step import PackedStep
from knapformer.models.transformer import Transformer, TransformerBatch, TransformerConfig

__all__ = [
    "BaseConfig",
    "PackedAttention",
    "PackedModel",
    "PackedStep",
    "Transformer",
    "TransformerBatch",
    "TransformerConfig",
    "init_weights",
    "set_checkpointing",
    "shard_model",
    "varlen_attention",
]
