"""`check`: whether a packed call computes what the model itself does, on a small random model of a class."""

from __future__ import annotations

import copy
import datetime
import importlib.util
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.modules.module import register_module_forward_hook

from knapformer import ArgumentError, Cluster, StateError, TrainedModel
from knapformer.adapters.adapter import Adapter
from knapformer.adapters.balance import balance, balanced
from knapformer.adapters.checks import modules_in_parts
from knapformer.adapters.drawn import Draw, random_sample
from knapformer.adapters.named import defaults_of
from knapformer.adapters.registry import adapter_of, find_model, register
from knapformer.adapters.samples import Sample
from knapformer.balancer import SequenceBalancer
from knapformer.models.training import init_weights, train_adapters

OUTPUTS, GRADIENTS = 1e-5, 5e-5  # tolerances: of an output's largest value, and of a parameter's largest gradient
# So slow that sharing of a few dozen tokens pays; and, with a slow network, that their keys travel in stages.
_CLUSTER = Cluster(flops_per_s=1e9, node_bytes_per_s=2e8, network_bytes_per_s=2e8)
_SLOW = _CLUSTER.replace(node_bytes_per_s=1e7, network_bytes_per_s=1e7)
_TOPOLOGIES = {1: "g1n1", 2: "g2/1n1", 4: "g4/2/1n1"}


@dataclass(frozen=True)
class Size:
    """Of a random sample. grid: frames, rows and columns of tokens; a model of images has no frames."""

    grid: tuple[int, int, int]
    text_tokens: int

    @property
    def visual_tokens(self) -> int:
        return math.prod(self.grid)


# Odd sizes, an empty caption, neighbours of one length.
SIZES = [Size((1, 3, 5), 7), Size((2, 4, 3), 0), Size((1, 1, 1), 2), Size((1, 5, 3), 7), Size((3, 7, 2), 12)]


class SmallModel:
    """A small model of a class, in a random configuration; and samples for it.

    fields: in place of those of `Adapter.small`. No weight is 0: every part matters. The same arguments give the same
    numbers, on every rank. controlled: most samples have residuals of a ControlNet, which require gradients.
    """

    def __init__(self, model_class: Any, controlled: bool = False, **fields: Any) -> None:
        found = adapter_of(model_class)
        if found is None or not found.small:
            raise ArgumentError(
                f"transformer: got {model_class.__name__}, expected a class with an adapter that has `small`"
            )
        self.model_class, self.adapter = model_class, found
        self.fields = found.small | fields
        self.controls = dict.fromkeys(found.controls, 2) if controlled else {}

    def make(self) -> Any:
        model = self.model_class(**self.fields)
        init_weights(model)
        return model

    def sample(self, size: Size, seed: int) -> dict[str, Any]:
        size = Size(size.grid, max(size.text_tokens, self.adapter.min_text_tokens))
        draw = Draw(torch.Generator().manual_seed(seed), torch.device("cpu"), torch.float32)
        config = SimpleNamespace(adapter=self.adapter, **defaults_of(self.model_class) | self.fields)
        sample = random_sample(config, size, draw, conditions=True)
        if self.controls and size.grid[2] > 2:
            sides = size.grid[-len(found.patch(config)) :] if (found := self.adapter).of_grids else size.grid
            shape = 1, math.prod(sides), config.num_attention_heads * config.attention_head_dim
            for name, count in self.controls.items():
                sample[name] = [draw.normal(*shape).requires_grad_() for _ in range(count)]
        return sample

    def balance(self, model: Any, balancer: SequenceBalancer | None = None) -> Any:
        return balance(model, balancer, controls=self.controls)

    def samples(self) -> list[dict[str, Any]]:
        return [self.sample(size, seed) for seed, size in enumerate(SIZES)]


def sample_loss(prediction: Any, sample: Sample, own: Any = True) -> Tensor:
    """Against a target that is a function of the sample alone. own: which numbers count here."""
    drawn = next(leaf for leaf in pytree.tree_leaves(dict(sample)) if isinstance(leaf, Tensor) and leaf.numel() > 1)
    generator = torch.Generator().manual_seed(int(drawn.sum().item() * 1e4) % (1 << 30))
    parts = pytree.tree_leaves(prediction)
    flags = [torch.tensor(True)] * len(parts) if own is True else pytree.tree_leaves(own)
    errors = [(part - torch.randn(part.shape, generator=generator)).square() for part in parts]
    return torch.stack([torch.where(of, error, 0).mean() for of, error in zip(flags, errors, strict=True)]).sum()


def one_by_one(model: nn.Module, samples: Sequence[Sample]) -> tuple[list[Any], dict[str, Tensor]]:
    """The model's own forward on each sample alone, and the gradients of the sum of their losses."""
    model = copy.deepcopy(model)
    adapter = find_model(model)[1]
    outputs = [adapter.expected(model, sample) for sample in samples]
    torch.stack([sample_loss(output, sample) for output, sample in zip(outputs, samples, strict=True)]).sum().backward()
    return pytree.tree_map(torch.detach, outputs), gradients(model, samples)


def gradients(model: nn.Module, samples: Sequence[Sample] = ()) -> dict[str, Tensor]:
    """Of parameters; and of what requires them in samples, where they are taken away: zeros of those not computed."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    for path, leaf in pytree.tree_leaves_with_path([dict(sample) for sample in samples]):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            found[f"samples{pytree.keystr(path)}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
    return found


def relative_error(got: Any, expected: Any) -> float:
    """The largest difference of tensors, or of tuples of tensors, relative to the largest value; infinite where shapes
    differ."""
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return max(float((a - b).detach().abs().max() / b.abs().max()) for a, b in pairs)


def gradient_errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each parameter, relative to its largest gradient; where that is only rounding, to a thousandth of that of all.
    A parameter that one side alone has no gradient of counts as zeros there."""
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    errors = {}
    for name in {**expected, **got}:
        pair = [gradients[name] for gradients in (got, expected) if name in gradients]
        reference = expected.get(name, torch.zeros_like(pair[0]))
        difference = (got.get(name, torch.zeros_like(reference)) - reference).abs().max().item()
        errors[name] = difference / max(reference.abs().max().item(), 1e-3 * largest)
    return errors


def check(transformer: Any, *, ranks: int = 2, **fields: Any) -> str:
    """Whether a packed call computes what the model itself does: outputs and gradients of a few random samples of all
    sizes, with every conditioning that the adapter takes, against the model's own forward, one sample at a time.

    transformer: a class that has an adapter, or a model of it, of which the class alone is taken: the model that is
        checked is small and random (`Adapter.small`).
    ranks: so many processes share the samples, over Gloo; one of them has none. 1: no process is started. As with
        every program that starts processes, a script calls this under `if __name__ == "__main__":`.
    fields: of the small model's configuration, in place of those of `Adapter.small`.

    Returns a report. Raises StateError with what differs; ArgumentError where the class has no adapter.
    """
    if ranks not in _TOPOLOGIES:
        raise ArgumentError(f"ranks: got {ranks!r}, expected one of {', '.join(map(str, _TOPOLOGIES))}")
    model_class = transformer if isinstance(transformer, type) else type(find_model(transformer)[0])
    small = SmallModel(model_class, controlled=True, **fields)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other over so few numbers
    try:
        found = _found(small, ranks)
    finally:
        torch.set_num_threads(num_threads)
    lines = [f"{name:<18} {'; '.join(differences) or 'the same'}" for name, differences in found.items()]
    report = "\n".join([f"{model_class.__name__}, packed, against its own forward", *lines])
    if any(found.values()):
        raise StateError(report)
    return report


def _found(small: SmallModel, ranks: int) -> dict[str, list[str]]:
    found = {"packed": _compared(small, small.make())}
    if hasattr(small.model_class, "enable_gradient_checkpointing"):
        found["checkpointed"] = _compared(small, small.make(), lambda model: model.enable_gradient_checkpointing())
    if importlib.util.find_spec("peft"):
        found["LoRA"] = _compared(small, with_lora(small.make(), small.adapter))
    found["no samples"] = _without_samples(small.balance(small.make()))
    found["called modules"] = _passed_by(small)
    if ranks > 1:
        found[f"shared by {ranks} ranks"] = _on_ranks(small, ranks)
    return found


def _compared(small: SmallModel, model: Any, change: Callable[[Any], None] | None = None) -> list[str]:
    """What differs. change: applied to the packed model alone."""
    samples = small.samples()
    outputs, expected = one_by_one(model, samples)
    if change is not None:
        change(model)
    try:
        predictions = small.balance(model)(samples)
    except TypeError as error:
        raise StateError(f"{error}: if a module was called with Packed, it needs an entry in Adapter.packed") from error
    sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero).backward()
    return _differences(dict(enumerate(predictions)), outputs, gradients(model, samples), expected)


def _differences(
    predictions: Mapping[int, Any], outputs: Sequence[Any], got: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[str]:
    of_outputs = {f"samples[{i}]": relative_error(prediction, outputs[i]) for i, prediction in predictions.items()}
    of_gradients = gradient_errors(got, expected)
    found = []
    for what, errors, tolerance in (("output", of_outputs, OUTPUTS), ("gradient", of_gradients, GRADIENTS)):
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            found.append(
                f"{what} of {worst} is off by {wrong[worst]:.1e} of its largest value, expected at most "
                f"{tolerance:.0e} ({len(wrong)} of {len(errors)} are off)"
            )
    return found


def with_lora(model: Any, adapter: type[Adapter]) -> Any:
    """Adapters of PEFT on all linear layers of its blocks, drawn at random: PEFT starts B as zeros, which would hide
    A's gradients."""
    train_adapters(model, (block for name in adapter.lists() for block in model.get_submodule(name)), rank=2)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def _without_samples(model: Any) -> list[str]:
    model([]).zero.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    return [f"no gradient of {missing[0]} ({len(missing)} have none), expected zeros"] if missing else []


def _passed_by(small: SmallModel) -> list[str]:
    """Modules with weights that the model's own calls go through, and a packed call neither does nor looks at."""
    model, samples = small.make(), small.samples()
    own = _called_by(lambda: [small.adapter.expected(model, sample) for sample in samples])
    small.balance(model)
    in_parts = {module for _, module in modules_in_parts(balanced(model).adapter, model)}
    known = _called_by(partial(model, samples)) | in_parts
    passed_by = {module for module in own - known if next(module.parameters(), None) is not None}
    names = [name for name, module in model.named_modules() if module in passed_by]
    expected = "a call, or Adapter.in_parts of the model or a block in Adapter.blocks or refiners"
    return [f"{names[0]} is not called ({len(names)} are not), expected {expected}"] if names else []


def _called_by(call: Callable[[], Any]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    with register_module_forward_hook(lambda module, *_: found.add(module)):
        call()
    return found


def _on_ranks(small: SmallModel, ranks: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (ranks, folder, small), nprocs=ranks)
        found = [Path(folder, str(rank)).read_text().splitlines() for rank in range(ranks)]
    return [f"rank {rank}: {difference}" for rank, of in enumerate(found) for difference in of]


def _rank_main(rank: int, ranks: int, folder: str, small: SmallModel) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, rank=rank, world_size=ranks)
    if adapter_of(small.model_class) is not small.adapter:
        register(small.model_class, small.adapter)
    found: list[str] = []
    cut: dict[str, Any] = {"model": TrainedModel(num_heads=1, cuts_queries=True)}
    in_stages = cut | {"topology": f"g{ranks}n1", "cluster": _SLOW}
    for way, options in (("", {}), ("with queries cut, ", cut), ("with keys in stages, ", in_stages)):
        found += [f"{way}{difference}" for difference in shared(small, rank, ranks, **options)]
    Path(folder, str(rank)).write_text("\n".join(found))
    dist.destroy_process_group()


def shared(small: SmallModel, rank: int, ranks: int, group: Any = None, **options: Any) -> list[str]:
    """What differs on this rank of a group, the default one if None. First all samples are those of the last ranks, and
    the first rank has none; then each is on all ranks that compute a part of it. options: of the balancer."""
    samples, models = small.samples(), [small.make(), small.make()]
    outputs, expected = one_by_one(models[0], samples)
    options = {"topology": _TOPOLOGIES[ranks], "cluster": _CLUSTER, "group": group} | options
    balancer = SequenceBalancer(**options)

    homes = [list(range(i - 1, len(samples), ranks - 1)) if i > 0 else [] for i in range(ranks)]
    predictions = small.balance(models[0], balancer)([samples[i] for i in homes[rank]])
    losses = [sample_loss(p, samples[i]) for i, p in zip(homes[rank], predictions, strict=True)]
    sum(losses, predictions.zero).backward()
    plan = balancer.plan
    found = [] if max(plan.degree_of_sequence) > 1 else ["no sequence was shared"]
    if options["cluster"] is _SLOW and max(plan.stages.values()) == 1:
        found.append("keys came in one stage")
    by_sample = dict(zip(homes[rank], predictions, strict=True))
    found += _differences(by_sample, outputs, _summed_gradients(models[0], samples, group), expected)

    of_sequence = [i for home in homes for i in home]
    placed = [of_sequence[i] for i, _, _ in plan.chunks_on(rank)]
    balancer.follow(plan)
    predictions = small.balance(models[1], balancer)([samples[i] for i in placed], placed=True)
    whole, losses = [pytree.tree_map(lambda of: torch.zeros(of.shape), output) for output in outputs], []
    for i, prediction, own in zip(placed, predictions, predictions.own, strict=True):
        losses.append(sample_loss(prediction, samples[i], own))
        whole[i] = pytree.tree_map(lambda of, flags: torch.where(flags, of.detach(), 0).contiguous(), prediction, own)
    sum(losses, predictions.zero).backward()
    for part in pytree.tree_leaves(whole):
        dist.all_reduce(part, group=group)
    differences = _differences(dict(enumerate(whole)), outputs, _summed_gradients(models[1], samples, group), expected)
    return found + [f"loaded by all ranks that share, {difference}" for difference in differences]


def _summed_gradients(model: nn.Module, samples: Sequence[Sample], group: Any) -> dict[str, Tensor]:
    for gradient in (found := gradients(model, samples)).values():
        dist.all_reduce(gradient, group=group)
    return found
