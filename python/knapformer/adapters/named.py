"""Models by name, for commands, benchmarks and tests: configurations, in the words of a model's own class; the models,
balanced; and random batches for them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from knapformer import ArgumentError, Sample
from knapformer.adapters import registry
from knapformer.adapters.adapter import MAX_TEXT_TOKENS, Adapter, expect
from knapformer.adapters.balance import balance, balanced
from knapformer.adapters.chunks import Home, Moved
from knapformer.adapters.drawn import Draw, grid_of, random_sample
from knapformer.json_file import read_json
from knapformer.models.packed_step import PackedStep
from knapformer.models.transformer import Transformer

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer

PLAIN = "knapformer.models.transformer.Transformer"


class ModelConfig:
    """The configuration of a class of diffusers, given by name, or of the plain transformer. It is constant. Every
    field is an attribute, too: config.num_layers.

    fields: those that differ from the defaults of the class. Raises ArgumentError where diffusers is missing, the class
    has no adapter, or a field is wrong.
    """

    def __init__(self, class_name: str, **fields: Any) -> None:
        self.class_name, self.adapter = class_name, registry.adapter_named(class_name)
        if not self.adapter.named_configs:
            raise ArgumentError(f"got a model of class {class_name}, which is balanced, and not simulated")
        defaults, counts = defaults_of(_class_of(class_name)), self.adapter.block_counts
        for name in fields:
            if name not in defaults:
                raise ArgumentError(f"got unknown field {name!r}, expected some of {', '.join(sorted(defaults))}")
        self.fields: dict[str, Any] = {
            name: _checked_field(name, fields.get(name, default), default, low=0 if name in counts.values() else 1)
            for name, default in defaults.items()
        }
        # A kind without blocks is left out.
        self.block_counts: dict[str, int] = {kind: of for kind, name in counts.items() if (of := self.fields[name]) > 0}
        self.depth = sum(self.block_counts.values())  # each block computes 24 l d^2 + 4 l^2 d FLOPs, or about that
        expect(self.depth > 0, next(reversed(counts.values())), 0, "at least one block")
        self.num_heads = int(self.fields.get("num_heads") or self.num_attention_heads)
        self.num_kv_heads = int(self.fields.get("num_kv_heads") or self.num_heads)
        self.d_model = int(self.fields.get("d_model") or self.num_heads * self.attention_head_dim)
        self.head_dim = self.d_model // self.num_heads
        self.mask = str(self.fields.get("mask", "full"))
        channels = self.out_channels or self.in_channels
        self._patch_size = math.prod(self.adapter.patch(self))
        self.out_width = int(channels * (1 if self.adapter.of_grids else self._patch_size))  # of a row of a prediction
        # True: a sample's text is a stream beside the planned sequence. False: it is the front of that sequence.
        self.text_beside = self.adapter.text_beside
        # Text tokens that a sample may have at most; None: any number.
        self.text_limit = MAX_TEXT_TOKENS if self.text_beside else None
        self.adapter.check_config(self)

    def __getattr__(self, name: str) -> Any:
        if name in (fields := self.__dict__.get("fields", {})):
            return fields[name]
        raise AttributeError(f"{self.__class__.__name__} has no field {name}", name=name)

    def replace(self, **fields: Any) -> ModelConfig:
        return ModelConfig(self.class_name, **{**self.fields, **fields})

    def num_rows(self, sample: Sample) -> int:
        """Of a sample's prediction: as many for each token as a patch has latent pixels, or 1 without grids. Text that
        is an argument of its own has none."""
        has_text = "encoder_hidden_states" in self.adapter.required
        num_tokens = sample.visual_tokens if has_text else sample.num_tokens
        return num_tokens * (self._patch_size if self.adapter.of_grids else 1)

    def alone(self, kind: str) -> ModelConfig:
        counts = dict.fromkeys(self.adapter.block_counts.values(), 0)
        return self.replace(**counts | {self.adapter.block_counts[kind]: self.adapter.min_blocks})

    def possible(self, sample: Sample, *, at_least: bool = False) -> Sample:
        """at_least: the result has no fewer tokens."""
        if not self.adapter.of_grids:
            return sample
        return Sample(sample.text_tokens, math.prod(grid_of(sample.visual_tokens, at_least=at_least)))

    def text_tokens(self, seq_len: int) -> int:
        """The text tokens taken for a sequence of which only the length is known: a tenth. Both halves of a
        double-stream block run then, and neither decides the time."""
        return seq_len // 10 if self.text_limit is None else min(seq_len // 10, self.text_limit)

    def sample_of(self, seq_len: int, text_tokens: int) -> Sample:
        """One whose planned sequence has this length, with so many text tokens in it or beside it."""
        return Sample(text_tokens, seq_len if self.text_beside else seq_len - text_tokens)

    def planned_tokens(self, sample: Sample) -> int:
        """Length of the sequence that a balancer plans for a sample."""
        return sample.visual_tokens if self.text_beside else sample.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """As diffusers writes it to config.json; of the plain transformer {"kind": "transformer", ...}."""
        name = {"kind": "transformer"} if self.class_name == PLAIN else {"_class_name": self.class_name}
        return {**name, **self.fields}


def _checked_field(name: str, value: Any, default: object, low: int = 1) -> Any:
    """Checks a field's value by the type of its default: integers are counts from `low` on, floats finite and positive.

    Returns the value, lists of integers as tuples. Where the default is None or a text, any value is taken. Raises
    ArgumentError.
    """
    kind = type(value)
    if isinstance(default, bool):
        expect(kind is bool, name, value, "true or false")
    elif isinstance(default, tuple):
        good = kind in (list, tuple) and all(type(item) is int and item >= 0 for item in value)
        expect(good, name, value, "a list of integers >= 0")
        return tuple(value)
    elif isinstance(default, float):
        expect(kind in (int, float) and 0 < value < math.inf, name, value, "a finite number > 0")
    elif isinstance(default, int):
        expect(kind is int and low <= value <= 1 << 24, name, value, f"an integer from {low} to 2^24")
    return value


def _class_of(class_name: str) -> Any:
    if class_name == PLAIN:
        return Transformer
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError:
        raise ArgumentError(
            f"{class_name} is a model of diffusers, which is not installed: pip install 'knapformer[models]', or take "
            "transformer-demo, which needs none"
        ) from None
    if not hasattr(diffusers, class_name):
        raise ArgumentError(
            f"diffusers: got version {diffusers.__version__}, which has no {class_name}: take a newer one"
        )
    return getattr(diffusers, class_name)


@functools.cache
def defaults_of(model_class: Any) -> dict[str, Any]:
    """The arguments of a class with their defaults."""
    arguments = inspect.signature(model_class.__init__).parameters
    return {name: argument.default for name, argument in arguments.items() if name != "self"}


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
        of_samples = (of.squeeze(0) for of in predictions)  # (tokens, channels), or (channels, sizes ...)
        return torch.cat([of if of.ndim == 2 else of.flatten(1).t() for of in of_samples])

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
                return reached.args
        raise AssertionError("a model without blocks")

    def _embedded(self, adapter: Adapter, sizes: Sequence[Sample], draw: Draw) -> Home:
        """Embeds random samples. A model of grids takes only some sizes: of a larger sample the first rows are kept."""
        possible = [self.config.possible(size, at_least=True) for size in sizes]
        samples = [random_sample(self.config, size, draw) for size in possible]
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
    """Its args are those of a block."""


def _stop_at(block: nn.Module, *arguments: Any) -> Any:
    raise _Reached(*arguments)


def config_names() -> list[str]:
    """The names of all configurations. Needs no diffusers."""
    return [name for of in registry.names() for name in registry.adapter_named(of).named_configs]


def load_config(name_or_path: str) -> ModelConfig:
    """A named configuration, or one from a JSON file (a name that ends in .json or holds a slash).

    Raises ArgumentError for an unknown name, wrong content, or where diffusers is missing; OSError where the file
    cannot be read.
    """
    for class_name in registry.names():
        fields = registry.adapter_named(class_name).named_configs.get(name_or_path)
        if fields is not None:
            return config_from_dict({"_class_name": class_name, **fields}, f"model: {name_or_path}")
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        names = ", ".join(config_names())
        raise ArgumentError(f"model: got {name_or_path!r}, expected one of {names}, or a path to a .json file")
    return config_from_dict(read_json(name_or_path, "model"))


def config_from_dict(given: object, where: str = "model") -> ModelConfig:
    """given: diffusers' config.json, or {"kind": "transformer", ...}, with the fields that differ from the defaults.

    Raises ArgumentError, naming the field.
    """
    if not isinstance(given, dict):
        raise ArgumentError(f"{where}: got {type(given).__name__}, expected a JSON object")
    fields = {name: of for name, of in given.items() if not name.startswith("_")}
    class_name = given.get("_class_name")
    if class_name is None:
        if (kind := fields.pop("kind", None)) != "transformer":
            expected = "'transformer', or a config.json of diffusers, with its '_class_name'"
            raise ArgumentError(f"{where}: kind: got {kind!r}, expected {expected}")
        class_name = PLAIN
    try:
        return ModelConfig(class_name, **fields)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None


def build_model(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PackedModel:
    """The model, with weights as torch draws them; on the device "meta" without weights: see `materialize`.

    Parameters have the dtype. Buffers keep theirs: they are tables of positions, whose precision models rely on.
    """

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        return nn.Parameter(parameter.detach().to(device, dtype), parameter.requires_grad)

    # Parameters move as modules are made: no rank ever holds a large model whole, in float32, on its host.
    with register_module_parameter_registration_hook(moved):  # type: ignore[arg-type]
        model = PackedModel(config, _class_of(config.class_name)(**config.fields))
    return model if torch.device(device).type == "meta" else model.to(device)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Tensors on "meta", sharded or not, get memory of any content on `device`; buffers move there as they are."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def random_batch(
    config: ModelConfig, samples: Sequence[Sample], seed: int | Sequence[int], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """A batch of samples of these sizes, and its target. The same arguments give the same numbers; with a seed for each
    sample, a sample has the same numbers in every batch."""

    def draw(seed: int) -> Draw:
        return Draw(torch.Generator().manual_seed(seed), device, dtype)

    draws = [draw(seed)] * len(samples) if isinstance(seed, int) else list(map(draw, seed))
    pairs = list(zip(samples, draws, strict=True))
    drawn = [random_sample(config, size, of) for size, of in pairs]
    targets = [of.normal(config.num_rows(size), config.out_width) for size, of in pairs]
    return drawn, torch.cat([torch.empty(0, config.out_width, device=device, dtype=dtype), *targets])
