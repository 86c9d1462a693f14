"""What every named model can do: be drawn batches for, be run by kinds of blocks, be written to JSON and read."""

from __future__ import annotations

import json
import math
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from knapformer.adapters import registry
from knapformer.adapters.drawn import grid_of
from knapformer.adapters.named import (
    build_model,
    config_from_dict,
    config_names,
    load_config,
    materialize,
    random_batch,
)
from knapformer.models import PackedStep, init_weights
from knapformer.tools.measure.blocks import kinds_of
from knapformer.tools.model_presets import PRESETS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from knapformer import ArgumentError, DataMix, Sample, WorkloadModel

pytest.importorskip("diffusers")
CPU = torch.device("cpu")
SMALL = [name for name in config_names() if name.endswith(("-tiny", "-demo"))]


def test_every_family_has_published_sizes_and_a_small_one() -> None:
    for class_name in registry.names():
        named = registry.adapter_named(class_name).named_configs
        if named and "." not in class_name:  # of diffusers
            assert {name.endswith("-demo") for name in named} == {True, False}, class_name
    assert len(set(config_names())) == len(config_names()) >= 19


@pytest.mark.parametrize("name", SMALL)
def test_batches_are_reproducible_and_shaped_by_the_samples(name: str) -> None:
    config = load_config(name)
    samples = [config.possible(size) for size in DataMix.parse("g1b3i128f1s0", max_text_tokens=20).draw(0, 0, 0)]
    model = build_model(config)
    init_weights(model)
    outputs = []
    for seed in (5, 5, 6):
        batch, target = random_batch(config, samples, seed, CPU, torch.float32)
        outputs.append(model(batch))
        assert outputs[-1].shape == target.shape and torch.isfinite(outputs[-1]).all()
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2])
    batch, target = random_batch(config, [], 0, CPU, torch.float32)
    assert model(batch).shape == target.shape and len(target) == 0


@pytest.mark.parametrize("name", SMALL)
def test_the_kinds_of_blocks_are_all_of_the_model(name: str) -> None:
    """One block of each kind, taken as often as it is there, has the parameters of the whole model's blocks; and what
    its inputs are made of reaches every parameter."""
    config = load_config(name)
    counted: Counter[tuple[int, ...]] = Counter()
    kinds = kinds_of(config, CPU, torch.float32)
    for kind in kinds:
        counted += Counter({shape: kind.count * n for shape, n in shapes([kind.block]).items()})
        kind.work(PackedStep([17, 1, 101], config.d_model), [3, 0, 8], checkpointing=True)()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in kind.block.parameters()), kind.name
    blocks = [block for blocks in build_model(config, device="meta").block_lists() for block in blocks]
    whole = shapes(blocks)
    if name.startswith("sd3"):  # whose last block writes no text: it is counted as the others
        assert counted.total() >= whole.total() and counted.keys() >= whole.keys() - shapes(blocks[-1:]).keys()
    else:
        assert counted == whole
    assert sum(kind.count for kind in kinds) == config.depth == len(blocks)


def shapes(blocks: list[torch.nn.Module]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for block in blocks for p in block.parameters())


@pytest.mark.parametrize("name", ["flux-tiny", "qwen-image-demo", "sd3-demo", "transformer-demo"])
def test_a_block_computes_what_the_workload_model_says(name: str) -> None:
    config, tokens = load_config(name), 36
    model = build_model(config)
    size = config.possible(Sample(tokens - 25, 25))
    batch, _ = random_batch(config, [size], 0, CPU, torch.float32)
    # The counter knows no fused attention of the CPU; its two products it does.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch)
    counts = {where: sum(by_op.values()) for where, by_op in counter.get_flop_counts().items()}
    ends = tuple(f"blocks.{i}" for i in range(config.depth))
    blocks = [flops for where, flops in counts.items() if where.endswith(ends)]
    per_block = WorkloadModel(gamma=1.0).work(tokens, config.d_model)
    modulation = 0 if name.startswith("transformer") else 24 * config.d_model**2  # a row per sample, not per token
    assert len(blocks) == config.depth
    if name.startswith(("sd3", "qwen")):  # whose last block leaves the text as it is
        assert blocks.pop() < per_block
    assert all(per_block <= flops <= per_block + modulation for flops in blocks)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("flux", 11_901_408_320),
        ("wan-14b", 14_288_491_584),
        ("wan-1.3b", 1_418_996_800),
        ("qwen-image", 20_430_401_088),
    ],
)
def test_published_sizes(name: str, num_parameters: int) -> None:
    """Parameters as FLUX.1-dev, Wan 2.1 and Qwen-Image are published."""
    model = build_model(load_config(name), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_published_models_have_the_same_names_in_all_commands() -> None:
    sizes = ("-narrow", "-demo", "-tiny")
    published = {name for name in config_names() if not name.endswith(sizes) and name != "transformer"}
    assert published == PRESETS.keys() - {"hunyuan-video", "ltx-video"}


@pytest.mark.parametrize("name", PRESETS)
def test_doctors_models_are_these(name: str) -> None:
    preset = PRESETS[name]
    if name in ("hunyuan-video", "ltx-video"):  # which are not simulated
        return
    config = load_config(name)
    sizes = (config.d_model, config.depth, config.num_heads, config.text_beside)
    assert config.class_name == preset.transformer
    assert sizes == (preset.d_model, preset.num_blocks, preset.num_heads, preset.text_beside)


def test_models_are_made_in_their_dtype_without_rounding_their_tables() -> None:
    """Of positions, which are buffers of float32 or float64. What is made on "meta" keeps them, to compute the same."""
    for name in ("wan-tiny", "sd3-demo", "qwen-image-demo"):
        config = load_config(name)
        model, hollow = build_model(config, torch.bfloat16), build_model(config, torch.float32, "meta")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(b.dtype in (torch.float32, torch.float64) for b in model.buffers())
        assert all(p.is_meta for p in hollow.parameters()) and not any(b.is_meta for b in hollow.buffers())
        materialize(hollow, CPU)
        whole = build_model(config)
        for each in (hollow, whole):
            init_weights(each, 3)
        batch, _ = random_batch(config, [config.possible(Sample(4, 30))], 0, CPU, torch.float32)
        assert torch.equal(hollow(batch), whole(batch))


@pytest.mark.parametrize("name", config_names())
def test_configurations_come_back_from_their_dict(name: str) -> None:
    config = load_config(name)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()


def test_a_config_json_of_diffusers_is_read(tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    fields = dict(load_config("sd3-demo").fields)
    SD3Transformer2DModel(**fields).save_config(tmp_path)
    config = load_config(str(tmp_path / "config.json"))
    assert config.to_dict() == load_config("sd3-demo").to_dict() and config.depth == 3


def test_grids_have_about_as_many_tokens() -> None:
    for n in (*range(1, 300), 4093, 16381, 25_796):
        near, above = (math.prod(grid_of(n, at_least=at_least)) for at_least in (False, True))
        assert n <= above <= n + math.isqrt(n) and abs(near - n) <= min(above - n, math.isqrt(n) / 2)
        for of in (near, above):  # as a sample is drawn
            assert math.prod(grid_of(of)) == of
        rows, columns = grid_of(n)
        assert rows <= columns <= 4 * rows + 3
    assert math.prod(grid_of(0)) == 0


FLUX = '{"_class_name": "FluxTransformer2DModel", '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FLUX + '"layers": 3}', "got unknown field 'layers', expected some of attention_head_dim,"),
        (FLUX + '"num_layers": -1}', "num_layers: got -1, expected an integer from 0"),
        (FLUX + '"attention_head_dim": "wide"}', "attention_head_dim: got 'wide', expected an integer"),
        (FLUX + '"attention_head_dim": true}', "attention_head_dim: got True"),
        (FLUX + '"guidance_embeds": 1}', "guidance_embeds: got 1, expected true or false"),
        (FLUX + '"axes_dims_rope": [4, 6, 6]}', "axes_dims_rope: got (4, 6, 6), expected even numbers that add up to"),
        (
            FLUX + '"axes_dims_rope": [15, 57, 56]}',
            "axes_dims_rope: got (15, 57, 56), expected even numbers that add up to",
        ),
        (FLUX + '"axes_dims_rope": 4}', "axes_dims_rope: got 4, expected a list of integers"),
        (FLUX + '"num_layers": 0, "num_single_layers": 0}', "num_single_layers: got 0, expected at least one block"),
        ('{"_class_name": "Flux2Transformer2DModel", "mlp_ratio": NaN}', "mlp_ratio: got nan"),
        ('{"_class_name": "UNet2DModel"}', "got a model of class UNet2DModel, expected one of "),
        ('{"kind": "transformer", "num_kv_heads": 5}', "num_kv_heads: got 5"),
        ('{"kind": "transformer", "d_model": 12}', "an even d_model / num_heads"),
        ('{"kind": "transformer", "mask": "star"}', "mask: got 'star', expected 'full', 'causal'"),
        ('{"kind": "flux"}', "kind: got 'flux', expected 'transformer', or a config.json of diffusers"),
        ("[1, 2]", "expected a JSON object"),
        ('{"kind": "flux"', "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
    ],
)
def test_wrong_configurations_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as raised:
        load_config(str(path))
    assert str(raised.value).startswith("model: ") and message in str(raised.value)


def test_unknown_names_and_missing_files() -> None:
    with pytest.raises(ArgumentError, match="model: got 'fluxx', expected one of flux2,"):
        load_config("fluxx")
    with pytest.raises(OSError):
        load_config("nowhere/model.json")


def test_without_diffusers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapformer.adapters import named

    named.defaults_of.cache_clear()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ArgumentError, match=r"model: wan-14b: .* not installed: pip install 'knapformer\[models\]'"):
        load_config("wan-14b")
    assert "wan-14b" in config_names() and load_config("transformer-demo").depth == 3


def test_a_diffusers_without_the_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapformer.adapters import named

    older = types.ModuleType("diffusers")
    older.__version__ = "0.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers", older)
    named.defaults_of.cache_clear()
    with pytest.raises(ArgumentError, match=r"diffusers: got version 0\.1, which has no FluxTransformer2DModel"):
        config_from_dict({"_class_name": "FluxTransformer2DModel"})


def test_key_value_heads_are_those_of_the_queries_but_where_a_field_says_otherwise() -> None:
    assert load_config("transformer").replace(num_kv_heads=3).num_kv_heads == 3
    assert load_config("wan-tiny").num_kv_heads == load_config("wan-tiny").num_heads == 4
