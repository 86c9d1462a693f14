"""Random samples of a model: arguments of diffusers' forward, for checks, benchmarks and commands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knapformer import ArgumentError, Sample


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
        """(1,) float32 on the CPU, a power of two up to 1: FLUX embeds 1000 t in its dtype, and bfloat16 would round
        1000 t of other numbers t by up to 2."""
        drawn = torch.randint(8, (1,), generator=self.generator, device=self.generator.device)
        return torch.exp2(-drawn.cpu().float())


def random_sample(config: Any, size: Any, draw: Draw, conditions: bool = False) -> dict[str, Any]:
    """The arguments of diffusers' forward for a sample of this size.

    config: with the adapter and the fields of the model's configuration. size: a Sample that is a
    `ModelConfig.possible` one, or a Size of parity.py. conditions: with those of Adapter.conditions, of which some
    samples have more than others.
    """
    drawn = _DRAWN | (config.adapter.conditions if conditions else {})
    sample = {}
    for name in (*config.adapter.required, *config.adapter.optional):
        if conditions and name not in drawn:
            raise ArgumentError(f"{name}: got nothing that draws it, expected Adapter.conditions[{name!r}]")
        try:
            if name in drawn:
                sample[name] = drawn[name](config, size, draw)
        except AttributeError as error:
            of = f"Adapter.conditions[{name!r}]"
            raise ArgumentError(f"{name}: got no field {error.name}, by which it is drawn, expected {of}") from error
    return {name: value for name, value in sample.items() if value is not None}


def random_mask(size: Any, needed: bool = False) -> Any:
    """float32 (1, text tokens), at least one: the last third is padding; an empty text is nothing but padding. None of
    a text without padding, unless the model needs one."""
    count = max(size.text_tokens, 1)
    kept = size.text_tokens - count // 3
    return None if kept == count and not needed else (torch.arange(count) < kept).float().unsqueeze(0)


def random_times(size: Any, draw: Draw) -> Tensor:
    """One for all tokens; of videos with several frames one for each, that of the first frame, which is known, 0."""
    time: Tensor = 1000 * draw.time()
    frames = size.grid[0]
    if frames > 1:
        time = time.repeat(1, size.visual_tokens)
        time[:, : size.visual_tokens // frames] = 0
    return time


def random_image(config: Any, draw: Draw, tokens: int = 257) -> Tensor | None:
    """What Wan gets of a picture, by default as many tokens as CLIP gives."""
    if getattr(config, "image_dim", None) is None:
        return None
    room = config.pos_embed_seq_len
    return draw.normal(*((1, tokens) if room is None else (2, room // 2)), config.image_dim)


def grid_of(num_tokens: int, *, at_least: bool = False) -> tuple[int, int]:
    """Rows and columns of a grid near a square, with about num_tokens tokens: a few more or less where no such grid has
    as many; never less with at_least. For the number of tokens of a grid that it returned, it returns that grid."""
    side = math.isqrt(num_tokens)
    quotients = ((rows, num_tokens / rows) for rows in range(side, side // 2, -1))
    grids = [(rows, math.ceil(q) if at_least else round(q)) for rows, q in quotients] or [(0, 0)]
    return min(grids, key=lambda grid: abs(math.prod(grid) - num_tokens))


def _tokens(config: Any, size: Any, draw: Draw) -> Tensor:
    if not config.adapter.of_grids:
        has_text = "encoder_hidden_states" in config.adapter.required
        return draw.normal(1, size.visual_tokens if has_text else size.num_tokens, config.in_channels)
    return random_grid(config, size, draw, config.in_channels)


def random_grid(config: Any, size: Any, draw: Draw, channels: int) -> Tensor:
    """(1, channels, *sizes): a picture, or a video."""
    patch = config.adapter.patch(config)
    grid = getattr(size, "grid", (1, *grid_of(size.visual_tokens)))[-len(patch) :]
    return draw.normal(1, channels, *(count * side for count, side in zip(grid, patch, strict=True)))


def _text(config: Any, size: Any, draw: Draw) -> Tensor:
    width = config.text_dim if hasattr(config, "text_dim") else config.joint_attention_dim
    return draw.normal(1, size.text_tokens, width)


def _places(config: Any, size: Any, draw: Draw) -> Tensor:
    """(tokens, axes): frame, row and column in a picture near a square, for any number of tokens. The last third of
    larger pictures are tokens of a reference, as FLUX.1 Kontext has them."""
    place = torch.arange(size.visual_tokens, device=draw.device)
    width = max(1, math.isqrt(size.visual_tokens))
    ids = torch.stack([(3 * place >= 2 * size.visual_tokens).long(), place // width, place % width], 1).float()
    return torch.nn.functional.pad(ids, (0, len(config.axes_dims_rope) - 3))


def _shapes(config: Any, size: Sample, draw: Draw) -> list[Any]:
    """A picture of whole rows; the rest of the tokens is a second picture, one row high."""
    width = max(1, math.isqrt(size.visual_tokens))
    rows, rest = divmod(size.visual_tokens, width)
    return [[(1, rows, width), *([(1, 1, rest)] if rest else [])]]


#: Random arguments of diffusers' forward, by name.
_DRAWN: dict[str, Callable[[Any, Any, Draw], Any]] = {
    "hidden_states": _tokens,
    "encoder_hidden_states": _text,
    "encoder_hidden_states_image": lambda config, size, draw: random_image(config, draw),
    "pooled_projections": lambda config, size, draw: draw.normal(1, config.pooled_projection_dim),
    "timestep": lambda config, size, draw: draw.time(),
    "guidance": lambda config, size, draw: 4 * draw.time() if getattr(config, "guidance_embeds", True) else None,
    "img_ids": _places,
    "txt_ids": lambda config, size, draw: draw.normal(size.text_tokens, len(config.axes_dims_rope)).float(),
    "img_shapes": _shapes,
}
