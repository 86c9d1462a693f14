"""What a packed call needs to know of a class of models: an adapter, one file for each.

    samples --embed--> tokens at home --(route)--> chunks --blocks--> chunks --(reverse route)--> --head--> predictions

The mechanism (balance.py) knows no model by name; an adapter knows nothing of ranks.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from knapformer import ArgumentError
from knapformer.adapters.chunks import Home, Moved, PackedForward, Part, RunBlock
from knapformer.adapters.samples import Sample, Samples

MAX_TEXT_TOKENS = 512  # the default: the limit with which published models are trained


class Adapter(ABC):
    """For one class of models. Everything here is called with the user's own model and the model's own modules."""

    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    # The layer that reads the samples' tokens: tensors without rows get the device and dtype of its weight.
    input_layer: ClassVar[str]
    # The lists of blocks, by their names in the model; and those that refine a text where the sample is, before it is a
    # part of a balanced sequence.
    blocks: ClassVar[tuple[str, ...]]
    refiners: ClassVar[tuple[str, ...]] = ()
    # For classes of diffusers, or of the adapter's own package, the packed forward that goes by theirs: of blocks, and
    # of other modules that are called with Packed: FSDP gathers a module when it is called, not when its parts are.
    packed: ClassVar[dict[str, PackedForward]]
    # Modules of the blocks and of the model whose parts a packed call calls in place of the module, such as those that
    # attend; and their attention processors that compute what the packed blocks do.
    in_parts: ClassVar[tuple[str, ...]] = ("attn",)
    processors: ClassVar[tuple[str, ...]] = ()
    # Fields of the model's config with which, where they are set, it computes what packed blocks do not.
    refused: ClassVar[tuple[str, ...]] = ()

    # Arguments with residuals of a ControlNet: lists of tensors (1, image tokens, width), and the list of blocks behind
    # which they are added to the tokens of the image. Only of a JointAdapter.
    controls: ClassVar[dict[str, str]] = {}

    # For check(): fields of a small model, of sizes that cannot be mistaken for each other; and random arguments,
    # (config, size, Draw) -> the argument, where drawn.py does not draw them as training has them.
    small: ClassVar[dict[str, Any]] = {}
    conditions: ClassVar[dict[str, Callable[..., Any]]] = {}
    min_text_tokens: ClassVar[int] = 0

    # Only for models that are simulated, calibrated or replayed. named_configs: by name, fields that differ from the
    # defaults of the class. block_counts: for each list in `blocks`, its kind and the field that counts it. min_blocks:
    # with at least so many, the first block is like those of a large model.
    named_configs: ClassVar[dict[str, dict[str, Any]]] = {}
    block_counts: ClassVar[dict[str, str]] = {"block": "num_layers"}
    min_blocks: ClassVar[int] = 1
    # Whether the text is cross-attended to and no part of the sequence; whether samples and predictions are images or
    # videos (1, channels, ...) in place of tokens.
    text_beside: ClassVar[bool] = False
    of_grids: ClassVar[bool] = False
    channels_first: ClassVar[bool] = False  # whether they are so among the numbers that the model predicts for a patch

    def __init_subclass__(cls) -> None:
        cls.named_configs = cls.__dict__.get("named_configs", {})  # those of a base are of its class of models

    def __init__(self, max_text_tokens: int, num_controls: Mapping[str, int]) -> None:
        self.max_text_tokens = max_text_tokens
        self.num_controls = num_controls  # residuals in such an argument, where a sample has it

    @classmethod
    def lists(cls) -> tuple[str, ...]:
        return *cls.blocks, *cls.refiners

    @staticmethod  # noqa: B027  (most have nothing to check)
    def check_config(config: Any) -> None:
        """Raises ArgumentError where fields of a ModelConfig do not go with each other."""

    @staticmethod
    def patch(config: Any) -> tuple[int, ...]:
        """How many numbers of a picture or video, in each direction, make a token."""
        size = getattr(config, "patch_size", 1)
        return (size, size) if isinstance(size, int) else tuple(size)

    @staticmethod
    def mask(model: Any) -> str:
        """Of the model's attention."""
        return "full"

    @staticmethod
    def control_of(block: int, num_blocks: int, num_controls: int) -> int:
        """Which residual is added behind this block."""
        return block // math.ceil(num_blocks / num_controls)

    def read(self, model: Any, samples: Sequence[Sample]) -> Samples:
        """Raises ArgumentError where samples are not what `required` and `optional` say."""
        like: Tensor = model.get_submodule(self.input_layer).weight
        if isinstance(like, DTensor):  # a unit of FSDP, which casts what it gets; other layers do not
            plain = (p for p in model.parameters() if not isinstance(p, DTensor) and p.is_floating_point())
            like = next(plain, like)
        elif hasattr(model, "enable_layerwise_casting"):
            like = cast_for(model.get_submodule(self.input_layer), like[:0])
        return Samples(samples, self.required, (*self.optional, *self.controls), like)

    @abstractmethod
    def embed(self, model: Any, samples: Samples) -> Home: ...

    @abstractmethod
    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        """All blocks: (chunk tokens, width) -> the same."""

    @abstractmethod
    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        """(tokens, width) at home -> the parts of a prediction, each of which `predictions` splits into samples."""

    def predictions(self, model: Any, out: Tensor, lens: Sequence[int], home: Home) -> list[Tensor]:
        """(tokens, channels) -> (1, tokens, channels) of each sample, or what its grid is a picture or video of."""
        # Not views: FSDP puts its backward hooks on them.
        parts: list[Tensor] = torch.ops.aten.split_with_sizes_copy(out.unsqueeze(0), list(lens), 1)
        if not self.of_grids:
            return parts
        patch = self.patch(model.config)
        return [unpatched(part, of, patch, self.channels_first) for part, of in zip(parts, home.grids, strict=True)]

    @staticmethod
    def expected(model: Any, sample: Sample) -> Any:
        """What the model's own forward gives for a sample, in the form of a prediction: a tensor, or several."""
        out = model(**sample)
        parts = (out,) if isinstance(out, Tensor) else out.to_tuple()
        return parts if len(parts) > 1 else parts[0]

    def check(self, model: Any) -> None:  # noqa: B027
        """Raises StateError where the model is set to compute what only this class refuses (others: checks.py)."""


def expect(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ArgumentError(f"{name}: got {value!r}, expected {expected}")


def cast_for(module: nn.Module, x: Tensor) -> Tensor:
    """In the dtype in which a module of diffusers computes: models may have several, or cast weights in the call."""
    from diffusers.models.modeling_utils import get_parameter_dtype

    dtype = get_parameter_dtype(module)
    return x.to(dtype) if dtype.is_floating_point else x  # quantized weights take floating-point numbers all the same


def unpatched(patches: Tensor, grid: Sequence[int], patch: Sequence[int], channels_first: bool) -> Tensor:
    """(1, tokens, numbers of a patch) -> (1, channels, *sizes), of patches that lie in a grid."""
    count = len(grid)
    rows = patches.unflatten(2, (-1, *patch) if channels_first else (*patch, -1))
    rows = (rows.movedim(2, -1) if channels_first else rows).unflatten(1, tuple(grid))  # (1, *grid, *patch, channels)
    moved: Tensor = rows.permute([0, -1, *itertools.chain(*((1 + i, 1 + count + i) for i in range(count)))])
    sizes = [size * side for size, side in zip(grid, patch, strict=True)]
    return moved.reshape([1, -1, *sizes])
