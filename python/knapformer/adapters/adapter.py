"""What a packed call needs to know of a class of models: an adapter, one file for each.

    samples --embed--> tokens at home --(route)--> chunks --blocks--> chunks --(reverse route)--> --head--> predictions

The mechanism (balance.py) knows no model by name; an adapter knows nothing of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knapformer import Sample, StateError
from knapformer.adapters.backend import attend_by
from knapformer.adapters.samples import Samples
from knapformer.models.layers import Rotation
from knapformer.models.model import Draw
from knapformer.models.packing import Segments
from knapformer.models.step import PackedStep

MAX_TEXT_TOKENS = 512  # the default: as published models are trained

# module, its tensors and Packed -> its tensors. The module's own modules, called on packed rows.
PackedForward = Callable[..., Any]
# run(block, *arguments): calls a block as the model does, with its checkpointing.
RunBlock = Callable[..., Any]


@dataclass
class Home:
    """Tokens of this rank's samples, embedded, before they are routed and behind it."""

    x: Tensor  # (tokens, width of the blocks)
    seq_lens: list[int]  # tokens of each sample
    features: list[Tensor] = field(default_factory=list)  # each (tokens, ...): go where their token goes
    sequence_features: list[Tensor] = field(default_factory=list)  # each (samples, ...): go where a chunk goes
    rest: Any = None  # what the head needs
    grids: list[Any] = field(default_factory=list)  # of each sample, where it is one: its sizes in patches


@dataclass(frozen=True, eq=False)
class Packed:
    """The last argument of every packed call of a module.

    FSDP's mixed precision casts what is in floating point in a dataclass. What has to keep its precision stands in a
    class that is none, as Rotation.
    """

    of_token: Segments  # of each token its row of modulation


@dataclass(frozen=True, eq=False)
class Chunks(Packed):
    """Of the chunks on this rank, computed once a step; what packed blocks get. Adapters add to it."""

    step: PackedStep

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective of the balancer, or a kernel that takes lengths
    def attention(self, attn: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every token attends to its whole sequence. q, k, v (chunk tokens, heads, head_dim) -> (chunk tokens, width).

        attn: the module whose attention this is; its processor names the backend.
        """
        return self.step.attention(q, k, v, attend_by(attn)).flatten(1)


class Adapter(ABC):
    """Of one class of diffusers. Everything here is called with the user's own model and its own modules."""

    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    # Where all arguments of the model's own forward have a batch as their first dimension: their names.
    batched: ClassVar[tuple[str, ...]] = ()
    # Of each list of blocks the packed forward of its blocks; and which modules of a block attend, by name.
    blocks: ClassVar[dict[str, PackedForward]]
    attentions: ClassVar[tuple[str, ...]] = ("attn",)
    # Of other modules of the model. A module whose parts are called without it would not be gathered by FSDP.
    modules: ClassVar[dict[str, PackedForward]] = {}
    # Classes of attention processors that the packed blocks compute the same as.
    processors: ClassVar[tuple[str, ...]]

    # What a model that is simulated, calibrated or replayed takes beside: sizes by name, as they differ from the
    # defaults of the class; of each list in `blocks` what its kind is called, and the field that counts it; and of how
    # many blocks the first one is like those that a large model has.
    named_configs: ClassVar[dict[str, dict[str, Any]]] = {}
    block_counts: ClassVar[dict[str, str]] = {"block": "num_layers"}
    fewest_blocks: ClassVar[int] = 1
    # Whether the text is attended to across, and no part of the sequence; whether samples, and predictions, are images
    # or videos (1, channels, ...) in place of tokens.
    text_beside: ClassVar[bool] = False
    of_grids: ClassVar[bool] = False

    def __init__(self, max_text_tokens: int) -> None:
        self.max_text_tokens = max_text_tokens

    @abstractmethod
    def input_weight(self, model: Any) -> Tensor:
        """Of the layer that reads the samples' tokens: its device and dtype are those of tensors without rows."""

    @abstractmethod
    def embed(self, model: Any, samples: Samples) -> Home: ...

    @abstractmethod
    def chunks(self, model: Any, step: PackedStep, x: Tensor, features: list[Tensor], of_chunk: list[Tensor]) -> Chunks:
        """features, of_chunk: those of Home, where the chunks are."""

    @abstractmethod
    def compute(self, model: Any, x: Tensor, of_chunk: list[Tensor], chunks: Any, run: RunBlock) -> Tensor:
        """All blocks: (chunk tokens, width) -> the same."""

    @abstractmethod
    def head(self, model: Any, x: Tensor, home: Home) -> tuple[list[Tensor], Tensor]:
        """(tokens, width) at home -> a prediction of each sample, and the tensor that they are parts of."""

    @staticmethod
    def random_sample(config: Any, size: Sample, draw: Draw) -> dict[str, Any]:
        """Of this size, as `embed` takes it; of_grids: of grid_of(size.visual_tokens)."""
        raise NotImplementedError

    def check(self, model: Any) -> None:
        """Raises StateError where the model computes what packed blocks do not."""
        for name in self.blocks:
            for i, block in enumerate(getattr(model, name)):
                for attention in self.attentions:
                    processor = getattr(getattr(block, attention), "processor", None)
                    got = type(processor).__name__
                    if got not in self.processors:
                        expected = " or ".join(self.processors)
                        raise StateError(f"{name}[{i}].{attention}.processor: got {got}, expected {expected}")
                    if getattr(processor, "_parallel_config", None) is not None:
                        raise StateError(
                            f"{name}[{i}].{attention}.processor: got a model with diffusers' context parallelism, "
                            "expected one without: bags of the balancer share sequences"
                        )


def original_of(block: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile and of activation checkpointing, or itself."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        block = getattr(block, name, block)
    return block


def rotation_rows(cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' (tokens, head_dim) with every number twice, as rows to route: (tokens, pairs, 2)."""
    return torch.stack([cos[:, 0::2], sin[:, 1::2]], -1)


def rotation_of(rows: Tensor, dtype: torch.dtype) -> Rotation:
    """Of these rows, for heads of `dtype`: what is rotated in float64 is not rounded to float32."""
    return Rotation(rows.to(torch.promote_types(rows.dtype, dtype)).contiguous().unsqueeze(1))


def grid_of(num_tokens: int, *, at_least: bool = False) -> tuple[int, int]:
    """Rows and columns near a square, of about as many tokens: of one or two more or less where no such grid has as
    many; of no less with at_least. Of what it returns it makes the same."""
    side = math.isqrt(num_tokens)
    quotients = ((rows, num_tokens / rows) for rows in range(side, side // 2, -1))
    grids = [(rows, math.ceil(q) if at_least else round(q)) for rows, q in quotients] or [(0, 0)]
    return min(grids, key=lambda grid: abs(math.prod(grid) - num_tokens))


def clip_half(x: Tensor) -> Tensor:
    """As diffusers' blocks do in float16."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def split_predictions(out: Tensor, lens: Sequence[int]) -> list[Tensor]:
    """(tokens, channels) -> of each sample (1, tokens, channels). Not views: FSDP hangs its backward hooks on them."""
    parts: list[Tensor] = torch.ops.aten.split_with_sizes_copy(out.unsqueeze(0), list(lens), 1)
    return parts
