"""What packed calls work on: the tokens of samples, at home and in chunks on the ranks, and their attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knapformer.attention.kernels import pairing_of
from knapformer.attention.packed_rows import Lengths, Rotation, Segments, lengths_list, rotate
from knapformer.models.packed_step import Attend, PackedStep

# (module, its tensors, Packed) -> its tensors: the module's forward on packed rows, by its own submodules.
PackedForward = Callable[..., Any]
# run(block, *arguments): calls a block as the model does, with its checkpointing.
RunBlock = Callable[..., Any]


def call(block: nn.Module, *arguments: Any) -> Any:
    """The RunBlock of blocks that are not checkpointed."""
    return block(*arguments)


@dataclass
class Home:
    """This rank's samples with their tokens embedded, at home: before the route and after the reverse route."""

    x: Tensor  # (tokens, width of the blocks)
    seq_lens: list[int]  # tokens of each sample
    features: list[Tensor] = field(default_factory=list)  # each (tokens, ...): a row goes where its token goes
    sequence_features: list[Tensor] = field(default_factory=list)  # each (samples, ...): a row goes where a chunk goes
    rest: Any = None  # what the head needs
    grids: list[Any] = field(default_factory=list)  # where samples are grids: sizes of each, in patches


class Moved(NamedTuple):
    """What Home holds, where the chunks are, while the blocks run."""

    step: PackedStep
    x: Tensor  # (chunk tokens, width)
    features: list[Tensor]
    of_chunk: list[Tensor]  # sequence_features


@dataclass(frozen=True, eq=False)
class Part:
    """What predictions are made of: one, or of video and audio each one."""

    out: Tensor  # (rows, channels), packed
    lens: list[int]  # rows of each sample
    rows: Tensor | None = None  # where they lie among the tokens at home, on the device; None: they are all tokens


@dataclass(frozen=True, eq=False)
class Packed:
    """The last argument of every packed call of a module.

    FSDP's mixed precision casts floating-point tensors in a dataclass. A tensor that has to keep its precision is held
    by a class that is no dataclass, such as Rotation.
    """

    of_token: Segments  # for each token its row of modulation


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunks(Packed):
    """What packed blocks get for the chunks on this rank, computed once a step. Adapters add fields."""

    step: PackedStep
    rotation: Rotation | None = None

    def through(self, blocks: nn.ModuleList, run: RunBlock, x: Tensor, *arguments: Any) -> Tensor:
        """The tokens after these blocks, each of which gets the same arguments."""
        for block in blocks:
            x = run(block, x, *arguments, self)
        return x

    def rotated(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys (chunk tokens, heads, head_dim), by the positions of their tokens."""
        return heads if self.rotation is None else tuple(rotate(x, self.rotation) for x in heads)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective, or a kernel that takes lengths
    def attention(self, attn: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every token attends to its whole sequence. q, k, v (chunk tokens, heads, head_dim) -> (chunk tokens, width).

        attn: the module whose attention this is; its processor names the backend.
        """
        return self.step.attention(q, k, v, attend_by(attn)).flatten(1)

    @staticmethod
    def alone(lens: Sequence[int], x: Tensor, rotation: Rotation | None = None) -> Chunks:
        """Of whole sequences on this rank, which attend to themselves: of texts, before they are a part of the balanced
        sequences, for the blocks that refine them."""
        step = PackedStep(lens, x.shape[1])
        return Chunks(step=step, of_token=step.segments(x), rotation=rotation)


def rotation_rows(cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' cos and sin, (tokens, head_dim) with every number twice, as rows to route: (tokens, pairs, 2)."""
    return torch.stack([cos[:, 0::2], sin[:, 1::2]], -1)


def rotations_of_grids(rope: Any, grids: Sequence[Tensor]) -> Tensor:
    """Rows to route by the rope of a model that takes pictures or videos: (tokens, pairs, 2); none of a batch of 0."""
    of_each = [rotation_rows(*(of.flatten(0, -2) for of in rope(grid))) for grid in grids]
    return torch.cat([rows[: len(rows) * len(grid)] for rows, grid in zip(of_each, grids, strict=True)])


def clip_half(x: Tensor) -> Tensor:
    """Clips float16 as diffusers' blocks do."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def attend_by(attn: nn.Module) -> Attend | None:
    """The function that computes the attention of this module by the backend that the user chose in diffusers
    (`set_attention_backend`); None: torch's, as the PackedStep does."""
    if not hasattr(attn, "processor"):  # not of diffusers
        return None
    from diffusers.models import attention_dispatch as dispatch

    backend = getattr(attn.processor, "_attention_backend", None)
    if backend is None:
        backend = dispatch._AttentionBackendRegistry.get_active_backend()[0]
    if (backend := dispatch.AttentionBackendName(backend)) == dispatch.AttentionBackendName.NATIVE:
        return None
    kernel = partial(dispatch.dispatch_attention_fn, backend=backend)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, query_lens: Lengths, key_lens: Lengths | None = None, _: Any = None
    ) -> Tensor:
        pairing = pairing_of(query_lens, query_lens if key_lens is None else key_lens)
        out: Tensor = pairing.attend(q, k, v, kernel=kernel)
        return out

    attend.cuts_queries = True  # type: ignore[attr-defined]
    return attend


class OfSequences:
    """Facts about whole sequences that this rank's attention kernels need, worked out once a step.

    of_chunks: for each chunk on this rank a row about its whole sequence.
    prepare(rows, spans, device): what is worked out of the rows of sequences with queries here. spans: for each, the
        place of its first query here, and how many are here.
    """

    def __init__(self, of_chunks: Tensor, prepare: Callable[..., Any]) -> None:
        self._of_chunks, self._prepare = of_chunks, prepare
        self._prepared: dict[tuple[int, Any], Any] = {}

    def attention(self, step: PackedStep, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """step.attention by the kernel attend(q, k, v, *prepared)."""
        total = len(self._of_chunks)
        called = 0  # it calls its kernel for sequences in the order of the chunks, and once more without queries

        def call(
            q: Tensor, k: Tensor, v: Tensor, lens: Lengths, key_lens: Any = None, starts: Lengths | None = None
        ) -> Tensor:
            nonlocal called
            counts, first = lengths_list(lens), called
            spans = tuple(zip([0] * len(counts) if starts is None else lengths_list(starts), counts, strict=True))
            if (key := (first, spans)) not in self._prepared:
                here = [i for i, count in enumerate(counts) if count]  # where no queries come, no keys do
                rows = self._of_chunks[[first + i for i in here]]
                self._prepared[key] = self._prepare(rows, [spans[i] for i in here], q.device)
            called += len(counts)
            return attend(q, k, v, *self._prepared[key])

        call.cuts_queries = True  # type: ignore[attr-defined]
        o = step.attention(q, k, v, call)
        assert called >= total, f"{called} of {total} chunks were attended to"
        return o
