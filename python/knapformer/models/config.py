"""Sizes of the reference models: dataclasses, published configurations by name, and JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar

from knapformer import ArgumentError


class BaseConfig:
    """What all configurations share: fields that are checked by type and range when constructed, heads of one width."""

    kind: ClassVar[str]
    d_model: int
    num_heads: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            self._check_field(field.name, field.default)
        self._expect(self.d_model % self.num_heads == 0, "num_heads", f"a divisor of d_model {self.d_model}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    def _check_field(self, name: str, default: object) -> None:
        """Checks one field against the type of its default; integers are counts, floats are finite and positive."""
        value: Any = getattr(self, name)
        if isinstance(default, bool):
            expected, good = "true or false", isinstance(value, bool)
        elif isinstance(default, tuple):
            expected = "a list of integers >= 1"
            good = isinstance(value, (list, tuple)) and all(type(item) is int and item >= 1 for item in value)
            if good:
                object.__setattr__(self, name, tuple(value))
        elif isinstance(default, float):
            expected = "a finite number > 0"
            good = type(value) in (int, float) and math.isfinite(value) and value > 0
        else:
            least = 0 if name.startswith("num_") and name.endswith("_blocks") else 1
            expected, good = f"an integer from {least} to 2^24", type(value) is int and least <= value <= 1 << 24
        self._expect(good, name, expected)

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(BaseConfig):
    """A plain pre-norm transformer over packed sequences of feature rows.

    One block computes 24 l d^2 + 4 l^2 d FLOPs on a sequence of l tokens at the defaults (mlp_ratio 4, as many
    key/value heads as query heads): the workload model, exactly.
    """

    kind: ClassVar[str] = "transformer"

    num_blocks: int = 12
    d_model: int = 768
    num_heads: int = 12
    num_kv_heads: int = 12
    mlp_ratio: float = 4.0
    in_channels: int = 64
    out_channels: int = 64
    rope_theta: float = 10000.0
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(self.head_dim % 2 == 0, "num_heads", "an even d_model / num_heads, for the rotation of pairs")
        self._expect(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"a divisor of {self.num_heads} heads")

    @property
    def mlp_width(self) -> int:
        return int(self.d_model * self.mlp_ratio)

    @property
    def depth(self) -> int:
        """Blocks of 24 l d^2 + 4 l^2 d FLOPs."""
        return self.num_blocks


@dataclasses.dataclass(frozen=True)
class FluxConfig(BaseConfig):
    """A FLUX-shaped diffusion transformer. The defaults are the published one: 12 B parameters."""

    kind: ClassVar[str] = "flux"

    num_double_blocks: int = 19
    num_single_blocks: int = 38
    d_model: int = 3072
    num_heads: int = 24
    mlp_ratio: float = 4.0
    in_channels: int = 64  # a 2x2 patch of 16 latent channels
    out_channels: int = 64
    text_channels: int = 4096
    pooled_channels: int = 768
    time_channels: int = 256  # sines and cosines of the time step
    rope_axes: tuple[int, ...] = (16, 56, 56)  # features of a head per axis: (frame, row, column)
    rope_theta: float = 10000.0
    guidance: bool = True
    qkv_bias: bool = True  # in the double blocks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(
            sum(self.rope_axes) == self.head_dim and all(axis % 2 == 0 for axis in self.rope_axes),
            "rope_axes",
            f"even numbers that add up to d_model / num_heads = {self.head_dim}",
        )
        self._expect(self.time_channels % 2 == 0, "time_channels", "an even number")
        self._expect(self.depth > 0, "num_single_blocks", "at least one block, double or single")

    @property
    def mlp_width(self) -> int:
        return int(self.d_model * self.mlp_ratio)

    @property
    def depth(self) -> int:
        """Blocks of 24 l d^2 + 4 l^2 d FLOPs."""
        return self.num_double_blocks + self.num_single_blocks


ModelConfig = TransformerConfig | FluxConfig


def mask_factor(config: ModelConfig) -> float:
    """Share of the (query, key) pairs that the model's attention computes."""
    return 0.5 if isinstance(config, TransformerConfig) and config.causal else 1.0


_SMALL_FLUX = {"text_channels": 64, "pooled_channels": 32, "time_channels": 32}
NAMED_CONFIGS: dict[str, ModelConfig] = {
    "flux": FluxConfig(),
    # An eighth of the width, with as many heads and blocks: what replaying plans of FLUX takes on a CPU.
    "flux-narrow": FluxConfig(d_model=384, rope_axes=(4, 6, 6), **_SMALL_FLUX),  # type: ignore[arg-type]
    # Width and depth for one core per rank: wide enough that matrix products dominate, as they do at full size.
    "flux-demo": FluxConfig(
        num_double_blocks=1,
        num_single_blocks=2,
        d_model=256,
        num_heads=4,
        rope_axes=(8, 28, 28),
        **_SMALL_FLUX,  # type: ignore[arg-type]
    ),
    "flux-tiny": FluxConfig(
        num_double_blocks=2,
        num_single_blocks=2,
        d_model=64,
        num_heads=4,
        in_channels=8,
        out_channels=8,
        rope_axes=(4, 6, 6),
        text_channels=24,
        pooled_channels=12,
        time_channels=16,
    ),
    "transformer": TransformerConfig(),
    "transformer-demo": TransformerConfig(num_blocks=3, d_model=256, num_heads=4, num_kv_heads=4),
    "transformer-tiny": TransformerConfig(
        num_blocks=2, d_model=32, num_heads=4, num_kv_heads=2, in_channels=8, out_channels=6
    ),
}


def config_from_dict(fields: object) -> ModelConfig:
    """{"kind": "flux" or "transformer", ...fields to change from the defaults}. Raises ArgumentError, naming it."""
    if not isinstance(fields, dict):
        raise ArgumentError(f"model: got {type(fields).__name__}, expected a JSON object")
    rest = dict(fields)
    kind = rest.pop("kind", None)
    if kind not in ("flux", "transformer"):
        raise ArgumentError(f"model: kind: got {kind!r}, expected 'flux' or 'transformer'")
    cls: type[ModelConfig] = FluxConfig if kind == "flux" else TransformerConfig
    known = {field.name for field in dataclasses.fields(cls)}
    for name in rest:
        if name not in known:
            raise ArgumentError(f"model: got unknown field {name!r}, expected some of {', '.join(sorted(known))}")
    try:
        return cls(**rest)
    except ArgumentError as error:
        raise ArgumentError(f"model: {error}") from None


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The inverse of config_from_dict."""
    return {"kind": config.kind, **dataclasses.asdict(config)}


def load_config(name_or_path: str) -> ModelConfig:
    """A named configuration, or one from a JSON file (a name that ends in .json or holds a slash).

    Raises ArgumentError for an unknown name or wrong content, OSError where the file cannot be read.
    """
    if name_or_path in NAMED_CONFIGS:
        return NAMED_CONFIGS[name_or_path]
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        names = ", ".join(NAMED_CONFIGS)
        raise ArgumentError(f"model: got {name_or_path!r}, expected one of {names}, or a path to a .json file")
    try:
        fields = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"model: {name_or_path}: not readable as JSON: {error}") from None
    return config_from_dict(fields)
