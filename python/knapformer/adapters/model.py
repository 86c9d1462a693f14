"""A balanced model in the form in which models are simulated, calibrated and replayed, and the numbers it is fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from knapformer import Sample
from knapformer.adapters.adapter import Adapter, Home, Moved
from knapformer.adapters.balance import balance, balanced
from knapformer.models.step import PackedStep

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random tensors of a batch, drawn on the generator's device.

    On the CPU a seed gives the same numbers for every device; on an accelerator drawing needs no host and no copy.
    """

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.generator.device, dtype=torch.float32)
        return drawn.to(self.device, self.dtype)

    def time(self) -> Tensor:
        """(1,) float32, a power of two up to 1: FLUX embeds 1000 t in its dtype, and bfloat16 would round 1000 t
        of other numbers t by up to 2."""
        drawn = torch.randint(8, (1,), generator=self.generator, device=self.generator.device)
        return torch.exp2(-drawn).to(self.device, torch.float32)


class PackedModel(nn.Module):
    """Samples -> (tokens, channels) of all of them, packed; where they are images or videos, (pixels, channels). A
    sample is the arguments of diffusers' forward.

    With a balancer a forward pass is collective: every rank of its group calls it, also one without samples, and every
    parameter takes part in forward and backward on every rank. planned: the balancer holds the plan of this batch
    already, as in a loop over a BalancedLoader.
    """

    def __init__(self, config: Any, transformer: nn.Module) -> None:
        super().__init__()
        self.config: Any = config
        self.transformer = balance(transformer)

    def forward(
        self, samples: Sequence[dict[str, Any]], balancer: SequenceBalancer | None = None, *, planned: bool = False
    ) -> Tensor:
        balanced(self.transformer).balancer = balancer
        predictions = self.transformer(samples, planned=planned)
        if not predictions:
            return predictions.zero.expand(0, self.config.out_width)  # which carries the graph
        return torch.cat([rows_of(prediction) for prediction in predictions])

    def block_lists(self) -> list[nn.ModuleList]:
        """All blocks in the order in which they run; each is a unit of FSDP and of checkpointing."""
        model: Any = self.transformer
        return [model.get_submodule(name) for name in self.config.adapter.blocks]

    def block_inputs(self, step: PackedStep, text_lens: Sequence[int], draw: Draw) -> tuple[Any, ...]:
        """The arguments in the first call of a block, for random samples of the chunks of `step`. text_lens: for each
        chunk, how many of its first tokens are text; where text is beside the sequence, the tokens of its text."""
        sizes = list(map(self.config.sample_of, step.chunk_lens, text_lens))
        adapter = balanced(self.transformer).adapter
        with torch.no_grad():
            home = self._embedded(adapter, sizes, draw)
            moved = Moved(step, home.x, home.features, home.sequence_features)
            try:
                adapter.compute(self.transformer, moved, _stop_at)
            except _Reached as reached:
                return reached.arguments
        raise AssertionError("a model without blocks")

    def _embedded(self, adapter: Adapter, sizes: Sequence[Sample], draw: Draw) -> Home:
        """Embeds random samples. A model of grids takes only some sizes: of a larger sample the first rows are kept."""
        possible = [self.config.possible(size, at_least=True) for size in sizes]
        samples = [self.config.random_sample(size, draw) for size in possible]
        home = adapter.embed(self.transformer, adapter.read(self.transformer, samples))
        lens = [self.config.planned_tokens(size) for size in sizes]
        if home.seq_lens == lens:
            return home
        kept = [torch.arange(n) < length for n, length in zip(home.seq_lens, lens, strict=True)]
        rows = torch.cat(kept).nonzero().squeeze(1)

        def cut(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows.to(tensor.device))

        return dataclasses.replace(home, x=cut(home.x), seq_lens=lens, features=[cut(t) for t in home.features])


class _Reached(Exception):
    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments


def _stop_at(block: nn.Module, *arguments: Any) -> Any:
    raise _Reached(arguments)


def rows_of(prediction: Tensor) -> Tensor:
    """(1, tokens, channels), or (1, channels, sizes ...) -> (tokens or pixels, channels)."""
    return prediction[0] if prediction.ndim == 3 else prediction[0].flatten(1).t()
