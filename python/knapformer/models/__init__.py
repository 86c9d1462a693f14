"""Reference models over packed sequences, written once for runs with and without a balancer. Needs torch."""

from knapformer.models.attention import PackedAttention, varlen_attention
from knapformer.models.config import NAMED_CONFIGS, FluxConfig, ModelConfig, TransformerConfig, load_config
from knapformer.models.flux import FluxBatch, FluxTransformer
from knapformer.models.parallel import build_model, init_weights, set_checkpointing, shard_model
from knapformer.models.step import PackedStep
from knapformer.models.transformer import Transformer, TransformerBatch
from knapformer.models.wan import WanBatch, WanConfig, WanTransformer

__all__ = [
    "NAMED_CONFIGS",
    "FluxBatch",
    "FluxConfig",
    "FluxTransformer",
    "ModelConfig",
    "PackedAttention",
    "PackedStep",
    "Transformer",
    "TransformerBatch",
    "TransformerConfig",
    "WanBatch",
    "WanConfig",
    "WanTransformer",
    "build_model",
    "init_weights",
    "load_config",
    "set_checkpointing",
    "shard_model",
    "varlen_attention",
]
