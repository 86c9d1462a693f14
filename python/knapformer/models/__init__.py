"""Reference models over packed sequences, written once for runs with and without a balancer. Needs torch."""

from knapformer.models.attention import PackedAttention, varlen_attention
from knapformer.models.config import BaseConfig
from knapformer.models.flux import FluxBatch, FluxConfig, FluxTransformer
from knapformer.models.model import PackedModel
from knapformer.models.parallel import init_weights, set_checkpointing, shard_model
from knapformer.models.registry import NAMED_CONFIGS, build_model, load_config
from knapformer.models.step import PackedStep
from knapformer.models.transformer import Transformer, TransformerBatch, TransformerConfig
from knapformer.models.wan import WanBatch, WanConfig, WanTransformer

__all__ = [
    "NAMED_CONFIGS",
    "BaseConfig",
    "FluxBatch",
    "FluxConfig",
    "FluxTransformer",
    "PackedAttention",
    "PackedModel",
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
