"""What a rank's memory holds in a training step: parameters, optimizer, activations. For full training with Adam."""

from __future__ import annotations

from dataclasses import dataclass

from knapformer import TrainedModel

GIB = 2**30
# GiB of one accelerator, by cluster name (Cluster.names()): from data sheets, less 5 % for the runtime.
DEVICE_GIB = {"h100": 76.0, "h200": 134.0, "h100-pcie": 76.0, "b200": 171.0, "a100": 76.0}

# Sharded bytes of a parameter in fp32: the master copy and two moments. Weight and gradient, in the model's type, are
# counted beside them.
_OPTIMIZER_BYTES = 12
# Numbers that a block keeps of a token for its backward pass, in units of d_model, without attention's matrix (flash
# attention): FLUX's and Wan's, in bfloat16. On an H200 (docs/gpu.md) FLUX took 506 KiB a token, less 57 inputs of
# blocks of 6 KiB each, for the one block that is computed again and differentiated.
_KEPT_PER_TOKEN = 27
_KEPT_WITH_CROSS_ATTENTION = 45
# FSDP holds the gathered parameters of this block and the next, and one block's gradients before they are reduced.
_GATHERED_BLOCKS = 3


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on the fullest rank: a fixed part, and a part for each token that the rank holds in a micro-batch."""

    fixed_bytes: float
    bytes_per_token: float

    @classmethod
    def of(cls, model: TrainedModel, d_model: int, num_ranks: int, cross_attends: bool = False) -> MemoryModel:
        """cross_attends: whether captions enter the blocks by an attention of their own."""
        size = model.element_size
        shards = min(model.shard_ranks, num_ranks)
        trained = 2 * size + _OPTIMIZER_BYTES if model.mode == "training" else size
        block = model.num_parameters / model.num_blocks * size
        fixed = model.num_parameters * trained / shards + _GATHERED_BLOCKS * block
        kept = _KEPT_WITH_CROSS_ATTENTION if cross_attends else _KEPT_PER_TOKEN
        if model.mode == "inference":
            per_token = kept
        elif model.recomputes:  # the inputs of all blocks, and one block whole
            per_token = model.num_blocks + kept
        else:
            per_token = model.num_blocks * kept
        return cls(fixed, per_token * d_model * size)

    def gib(self, tokens: int) -> float:
        """GiB on a rank that holds this many tokens."""
        return (self.fixed_bytes + tokens * self.bytes_per_token) / GIB

    def tokens_within(self, limit_gib: float) -> int:
        """How many fit; 0 where even the fixed part does not fit."""
        return max(0, int((limit_gib * GIB - self.fixed_bytes) / self.bytes_per_token))
