"""What every model of the registry can do: be drawn batches for, be run by kinds of blocks, be named in JSON."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from knapformer.models import NAMED_CONFIGS, BaseConfig, TransformerConfig, build_model, init_weights, load_config
from knapformer.models.patches import square_positions
from knapformer.models.registry import MODELS, config_from_dict, config_to_dict, random_batch
from knapformer.tools.measure.blocks import kinds_of

from knapformer import ArgumentError, DataMix

CPU = torch.device("cpu")
TINY = {config.kind: config for name, config in NAMED_CONFIGS.items() if name.endswith("-tiny")}


def test_every_model_has_a_tiny_configuration() -> None:
    assert list(TINY) == [model.config_class.kind for model in MODELS] and len(MODELS) >= 3


@pytest.mark.parametrize("config", TINY.values(), ids=list(TINY))
def test_batches_are_reproducible_and_shaped_by_the_samples(config: BaseConfig) -> None:
    samples = DataMix.parse("g1b3i128f1s0", max_text_tokens=20).draw(0, 0, 0)
    batch, target = random_batch(config, samples, 5, CPU, torch.float32)
    again, _ = random_batch(config, samples, 5, CPU, torch.float32)
    other, _ = random_batch(config, samples, 6, CPU, torch.float32)
    tensors = [name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in tensors)
    assert not all(torch.equal(getattr(batch, name), getattr(other, name)) for name in tensors)
    assert batch.seq_lens == [config.planned_tokens(sample) for sample in samples]
    beside = sum(batch.text_lens) if config.text_beside else 0
    assert sum(batch.seq_lens) + beside == sum(sample.num_tokens for sample in samples)
    model = build_model(config)
    init_weights(model)
    out = model(batch)
    assert out.shape == target.shape and torch.isfinite(out).all()


@pytest.mark.parametrize("config", TINY.values(), ids=list(TINY))
def test_a_rank_without_samples_touches_every_parameter(config: BaseConfig) -> None:
    model = build_model(config)
    batch, target = random_batch(config, [], 0, CPU, torch.float32)
    out = model(batch)
    assert out.shape == target.shape and len(out) == 0
    out.sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("config", TINY.values(), ids=list(TINY))
def test_the_kinds_of_blocks_are_all_of_the_model(config: BaseConfig) -> None:
    """One block of each kind, taken as often as it is there, has the parameters of the whole model's blocks."""

    def shapes(of: BaseConfig) -> Counter[tuple[int, ...]]:
        lists = build_model(of, device="meta").block_lists()
        return Counter(tuple(p.shape) for blocks in lists for block in blocks for p in block.parameters())

    together: Counter[tuple[int, ...]] = Counter()
    for _, count, alone in kinds_of(config):
        assert sum(len(blocks) for blocks in build_model(alone, device="meta").block_lists()) == alone.depth == 1
        together += Counter({shape: count * n for shape, n in shapes(alone).items()})
    assert together == shapes(config) and sum(count for _, count, _ in kinds_of(config)) == config.depth


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_configurations_come_back_from_their_dict(name: str) -> None:
    assert config_from_dict(config_to_dict(NAMED_CONFIGS[name])) == NAMED_CONFIGS[name]


def test_a_mask_is_given_by_its_text() -> None:
    causal = config_from_dict({"kind": "transformer", "mask": "causal"})
    assert causal.mask == "causal"
    assert all(c.mask == "full" for c in NAMED_CONFIGS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "flux", "num_heads": 23}', "num_heads: got 23, expected a divisor of d_model 3072"),
        ('{"kind": "flux", "rope_axes": [16, 56]}', "rope_axes"),
        ('{"kind": "flux", "depth": 3}', "unknown field 'depth'"),
        ('{"kind": "flux", "d_model": "wide"}', "d_model: got 'wide', expected an integer"),
        ('{"kind": "flux", "d_model": true}', "d_model: got True"),
        ('{"kind": "flux", "mlp_ratio": NaN}', "mlp_ratio: got nan"),
        ('{"kind": "flux", "guidance": 1}', "guidance: got 1, expected true or false"),
        (
            '{"kind": "flux", "num_single_blocks": 0, "num_double_blocks": 0}',
            "num_single_blocks: got 0, expected at least",
        ),
        ('{"kind": "transformer", "num_kv_heads": 5}', "num_kv_heads: got 5"),
        ('{"kind": "transformer", "d_model": 12}', "an even d_model / num_heads"),
        ('{"kind": "transformer", "mask": "star"}', "mask: got 'star', expected one of full, causal"),
        ('{"kind": "transformer", "mask": true}', "mask: got True, expected one of full, causal"),
        ('{"kind": "transformer", "num_blocks": 0}', "num_blocks: got 0, expected at least one block"),
        ('{"kind": "wan", "patch_size": [1, 2]}', "patch_size: got (1, 2), expected three numbers"),
        ('{"kind": "gpt"}', "kind: got 'gpt', expected one of flux, transformer, wan"),
        ('{"kind": [1]}', "kind: got [1], expected one of"),
        ("[1, 2]", "expected a JSON object"),
        ('{"kind": "flux"', "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
    ],
)
def test_wrong_configurations_are_named(text: str, message: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as raised:
        load_config(str(path))
    assert str(raised.value).startswith("model: ") and message in str(raised.value)


def test_unknown_names_and_missing_files() -> None:
    with pytest.raises(ArgumentError, match="model: got 'fluxx', expected one of flux,"):
        load_config("fluxx")
    with pytest.raises(OSError):
        load_config("nowhere/model.json")


def test_square_positions_are_distinct_and_near_square() -> None:
    ids = square_positions([12, 1, 7]).tolist()
    assert len({tuple(row) for row in ids[:12]}) == 12 and max(max(row) for row in ids[:12]) == 3
    assert ids[12] == [0, 0, 0] and ids[13:] == [[0, i // 2, i % 2] for i in range(7)]


def test_key_value_heads_are_those_of_the_queries_but_where_a_field_says_otherwise() -> None:
    assert TransformerConfig(num_kv_heads=3).num_kv_heads == 3
    assert all(TINY[kind].num_kv_heads == TINY[kind].num_heads for kind in ("flux", "wan"))
