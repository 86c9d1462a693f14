"""A balanced model stays the model that it was, and what users hang on a model goes on counting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters.cases import assert_gradients_equal, cases, of, packed_gradients
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from distributed.ranks import run_ranks
from knapformer.adapters import Predictions
from knapformer.adapters.chunks import attend_by
from knapformer.adapters.parity import SIZES, one_by_one, relative_error
from knapformer.models import PackedAttention, init_weights, set_checkpointing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import knapformer
from knapformer import SequenceBalancer

CASE = cases()["flux"]


@pytest.fixture(autouse=True)
def _backend_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What diffusers' set_attention_backend sets for one model, it sets for all others, too."""
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)


def test_a_balanced_model_stays_what_it_was(tmp_path: Any) -> None:
    model, samples = CASE.make(), CASE.samples()
    before = copy.deepcopy(model)
    assert knapformer.balance(model) is model
    assert type(model) is type(before)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(**samples[0]).sample, before(**samples[0]).sample)
    assert torch.equal(model(*samples[0].values(), return_dict=False)[0], before(*samples[0].values()).sample)
    model.save_pretrained(tmp_path)
    again = type(before).from_pretrained(tmp_path)
    for parameter in again.parameters():  # from the file's memory, whose alignment may change how a CPU adds up
        parameter.data = parameter.data.clone()
    assert torch.equal(again(**samples[0]).sample, before(**samples[0]).sample)


def test_unbalance_leaves_nothing_behind() -> None:
    model = CASE.make()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    knapformer.unbalance(knapformer.balance(knapformer.balance(model)))
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    with pytest.raises(TypeError):
        model(CASE.samples())
    knapformer.unbalance(model)


def test_a_deep_copy_is_balanced_and_its_own() -> None:
    model, samples = knapformer.balance(CASE.make()), CASE.samples()
    average = copy.deepcopy(model)
    expected = average(samples)[0].detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(average(samples)[0], expected)
    assert not torch.equal(model(samples)[0], expected)


@pytest.mark.parametrize(("when", "dora"), [("before", False), ("after", False), ("wrapped", False), ("before", True)])
def test_adapters_of_peft_count(when: str, dora: bool) -> None:
    peft = pytest.importorskip("peft")
    targets = ["to_q", "to_k", "to_out.0", "add_v_proj", "proj_mlp", "proj_out", "x_embedder", "norm1.linear"]
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, use_dora=dora)
    model: Any = CASE.make()
    if when == "after":
        knapformer.balance(model)
    if when == "wrapped":
        model = peft.get_peft_model(model, lora)
    else:
        model.add_adapter(lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    samples = CASE.samples()
    if when == "after":
        knapformer.unbalance(model)
    outputs, expected = one_by_one(model, samples)
    knapformer.balance(model)
    predictions = model(samples)
    assert all(relative_error(p, o) <= 1e-5 for p, o in zip(predictions, outputs, strict=True))
    got = packed_gradients(model, samples)
    assert got.keys() == expected.keys()
    assert all("lora_" in name for name in got)
    assert_gradients_equal(got, expected)


def checkpointed(model: Any) -> None:
    model.enable_gradient_checkpointing()


def compiled_in_place(model: Any) -> None:
    torch._dynamo.reset()
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        block.compile(backend="eager")


def compiled_wrapped(model: Any) -> None:
    torch._dynamo.reset()
    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        blocks[0] = torch.compile(blocks[0], backend="eager")


def other_backend(model: Any) -> None:
    model.set_attention_backend("_native_math")


@pytest.mark.parametrize(
    ("setting", "balanced_first"),
    [
        (checkpointed, False),
        (compiled_in_place, True),
        (compiled_wrapped, False),
        (other_backend, False),
        (other_backend, True),
    ],
)
def test_settings_of_diffusers_hold(setting: Callable[[Any], None], balanced_first: bool) -> None:
    model, samples = CASE.make(), CASE.samples()
    _, expected = one_by_one(model, samples)
    if balanced_first:
        knapformer.balance(model)
    setting(model)
    knapformer.balance(model)
    got = {name.replace("_orig_mod.", ""): gradient for name, gradient in packed_gradients(model, samples).items()}
    assert_gradients_equal(got, expected)


def saved_by_peft(part: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        peft = pytest.importorskip("peft")
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["x_embedder"], modules_to_save=[part]))
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data.mul_(1.5)

    return change


def merged_by_peft(model: Any) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["norm_out"], init_lora_weights=False)
    peft.get_peft_model(model, lora).merge_and_unload()


@pytest.mark.parametrize(
    "change",
    [
        saved_by_peft("norm_out"),
        saved_by_peft("transformer_blocks.0"),
        saved_by_peft("attn"),
        merged_by_peft,
        compiled_in_place,
        compiled_wrapped,
    ],
)
@torch.no_grad()
def test_modules_that_were_changed_since_are_balanced_and_unbalanced(change: Callable[[Any], None]) -> None:
    model, samples = knapformer.balance(CASE.make()), CASE.samples()
    change(model)
    expected = [model(**sample).sample for sample in samples]

    def is_packed() -> bool:
        return all(relative_error(p, output) <= 1e-5 for p, output in zip(model(samples), expected, strict=True))

    assert is_packed()
    knapformer.unbalance(model)
    assert not any("_knapformer" in module.__dict__ for module in model.modules())
    assert torch.equal(model(**samples[0]).sample, expected[0])
    knapformer.balance(model)
    assert is_packed()


def test_the_backend_that_was_set_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch
    from diffusers.models.attention_dispatch import AttentionBackendName

    calls = []
    backends = attention_dispatch._AttentionBackendRegistry._backends
    original = backends[AttentionBackendName._NATIVE_MATH]

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(query.shape[:2])
        return original(query, key, value, **options)

    monkeypatch.setitem(backends, AttentionBackendName._NATIVE_MATH, counted)
    monkeypatch.setitem(
        attention_dispatch._AttentionBackendRegistry._supported_arg_names,
        AttentionBackendName._NATIVE_MATH,
        {"query", "key", "value", "scale"},
    )
    model = knapformer.balance(CASE.make())
    samples = [CASE.samples()[i] for i in (0, 3, 1)]
    model.set_attention_backend("_native_math")
    model(samples)
    assert calls == [(2, 22), (1, 24)] * 3  # neighbours of one length are one batch; in each of three blocks
    q, k, v = torch.randn(3, 12, 2, 4)
    by_backend = attend_by(model.transformer_blocks[0].attn)
    of_parts = [attend(q[:7], k, v, [3, 0, 4], [5, 2, 5]) for attend in (by_backend, PackedAttention())]
    torch.testing.assert_close(*of_parts)


@pytest.mark.parametrize("sizes", [[], SIZES[:1]])
@pytest.mark.parametrize("name", cases())
def test_zero_reaches_every_parameter(name: str, sizes: list[Any]) -> None:
    """For a rank without samples, and one that drops the losses of its samples."""
    case = cases()[name]
    model = case.balance(case.make())
    predictions = model([case.sample(size, 0) for size in sizes])
    assert isinstance(predictions, Predictions) and len(predictions) == len(sizes) and predictions.zero == 0
    predictions.zero.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, parameter_name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"balancer": "g1n1"}, "balancer: got str, expected a SequenceBalancer, or None"),
        ({"max_text_tokens": "512"}, "max_text_tokens: got '512', expected an integer, at least 0"),
        ({"max_text_tokens": -1}, "max_text_tokens: got -1, expected an integer, at least 0"),
        (
            {"controls": {"img_ids": 1}},
            "controls: got {'img_ids': 1}, expected how many residuals are in controlnet_bl",
        ),
        ({"controls": {"controlnet_block_samples": 0}}, "controls: got {'controlnet_block_samples': 0}, expected how"),
    ],
)
def test_arguments_of_balance_are_named(arguments: dict[str, Any], message: str) -> None:
    model = CASE.make()
    with pytest.raises(knapformer.ArgumentError, match=message):
        knapformer.balance(model, **arguments)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_a_balancer_with_a_mask_is_refused(backend: str) -> None:
    model = knapformer.balance(CASE.make(), SequenceBalancer("g1n1", mask="causal"))
    model.set_attention_backend(backend)
    with pytest.raises(knapformer.ArgumentError, match=r"mask: got 'full', which .* expected 'causal'"):
        model(CASE.samples())


@pytest.mark.parametrize("block", [None, 0])
def test_a_forward_that_was_put_there_before_is_refused(block: int | None) -> None:
    """As accelerate's prepare and hooks put it: a packed call would pass it by."""
    model = CASE.make()
    module = model if block is None else model.transformer_blocks[block]
    module.forward = module.forward
    name = "transformer" if block is None else r"transformer_blocks\.0"
    with pytest.raises(knapformer.StateError, match=rf"{name}\.forward: got one that was put on the object"):
        knapformer.balance(model)
    del module.forward
    assert knapformer.balance(model) is model


@pytest.mark.parametrize("keep_exchanges", [False, True])
def test_dropout_is_the_same_when_it_is_recomputed(keep_exchanges: bool) -> None:
    peft = pytest.importorskip("peft")
    gradients = []
    for checkpointed in (False, True):
        model = CASE.make().requires_grad_(False)
        model.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q"], init_lora_weights=False))
        if checkpointed:
            set_checkpointing(model, keep_exchanges=keep_exchanges)
        init_weights(model)
        torch.manual_seed(1)
        gradients.append(packed_gradients(knapformer.balance(model.train()), CASE.samples()))
    assert_gradients_equal(*gradients)


def test_tables_of_positions_may_be_bfloat16() -> None:
    """As `to(torch.bfloat16)` makes those that are buffers."""
    case = cases()["wan"]
    model = case.make().bfloat16()
    sample = {name: of.bfloat16() for name, of in case.sample(SIZES[0], 0).items() if of is not None}
    output = model(**sample).sample
    assert relative_error(knapformer.balance(model)([sample])[0], output) <= 2e-2


@pytest.mark.parametrize("name", ["flux", "flux3", "qwen-image21"])
@torch.no_grad()
def test_weights_that_are_cast_in_each_call(name: str) -> None:
    """Where a rank has no samples, the layer that reads them gets numbers in the dtype in which it computes."""
    case = cases()[name]
    model: Any = case.balance(case.make())
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    samples = case.samples()
    expected = [case.adapter.expected(model, sample) for sample in samples]
    assert len(model([])) == 0
    assert all(relative_error(p, output) <= 1e-5 for p, output in zip(model(samples), expected, strict=True))


def wan_in_float64(rank: int, world_size: int) -> float:
    case = cases()["wan"]
    model = knapformer.balance(case.make().double(), SequenceBalancer("g2n1"))
    sample = {name: value.double() for name, value in case.sample(SIZES[0], 0).items() if value is not None}
    predictions = model([sample] if rank == 0 else [])
    return sum((p.square().mean().item() for p in predictions), 0.0)


def test_wan_in_float64_where_a_rank_has_no_samples() -> None:
    of_first, of_second = run_ranks(wan_in_float64, 2)
    assert of_first > 0 and of_second == 0


ONE_HEAD = of("SD3Transformer2DModel", num_attention_heads=1, attention_head_dim=24)


def under_autocast(rank: int, world_size: int) -> list[torch.Tensor]:
    model = knapformer.balance(ONE_HEAD.make(), SequenceBalancer("g2n1"))
    with torch.autocast("cpu", torch.bfloat16):
        predictions = model([ONE_HEAD.sample(SIZES[0], 0)] if rank == 0 else [])
    sum((p.float().square().mean() for p in predictions), predictions.zero.float()).backward()
    return [prediction.detach() for prediction in predictions]


def test_autocast_where_a_rank_has_no_head() -> None:
    """Norms give queries in float32 there, and attention is in bfloat16: also on the rank that computes none."""
    ((prediction,), _) = run_ranks(under_autocast, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = ONE_HEAD.make()(**ONE_HEAD.sample(SIZES[0], 0)).sample
    assert relative_error(prediction, output) <= 2e-2


def units_in_bfloat16(rank: int, world_size: int) -> list[torch.Tensor]:
    case, mesh = cases()["hunyuan-video"], init_device_mesh("cpu", (world_size,))
    model: Any = case.make()
    for unit in (model.x_embedder, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    predictions = knapformer.balance(model, SequenceBalancer("g2n1"))([case.sample(SIZES[0], 0)] if rank == 0 else [])
    sum((p.square().mean() for p in predictions), predictions.zero).backward()
    return [prediction.detach().float() for prediction in predictions]


def test_mixed_precision_where_the_layer_that_reads_samples_is_a_unit() -> None:
    """Where a rank has no samples, other layers get numbers in the dtype in which they compute, not in the unit's."""
    ((prediction,), _) = run_ranks(units_in_bfloat16, 2)
    case = cases()["hunyuan-video"]
    assert relative_error(prediction, case.make()(**case.sample(SIZES[0], 0)).sample) <= 5e-2


def test_a_forward_that_was_replaced_later_is_not_thrown_away() -> None:
    model: Any = knapformer.balance(CASE.make())
    model.forward = lambda *args: None
    with pytest.raises(knapformer.StateError, match=r"forward was replaced after balance"):
        knapformer.unbalance(model)


class Int8Linear(nn.Module):
    """As quantized layers are: the weights are no floating-point numbers, and the inputs are taken as such."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.weight * self.scale, self.bias)


def test_wan_with_a_quantized_time_embedding() -> None:
    model: Any = cases()["wan"].make()
    embedder = model.condition_embedder.time_embedder
    embedder.linear_1, embedder.linear_2 = Int8Linear(embedder.linear_1), Int8Linear(embedder.linear_2)
    samples = cases()["wan"].samples()
    outputs, _ = one_by_one(model, samples)
    predictions = knapformer.balance(model)(samples)
    assert all(relative_error(p, o) <= 1e-5 for p, o in zip(predictions, outputs, strict=True))


@pytest.mark.parametrize("count", [2, 0])
def test_predictions_are_float32_under_mixed_precision_of_accelerate(count: int) -> None:
    """As it makes diffusers' own."""
    accelerate = pytest.importorskip("accelerate")
    accelerator, samples = accelerate.Accelerator(mixed_precision="bf16", cpu=True), CASE.samples()[:count]
    try:
        plain = accelerator.prepare(CASE.make())
        predictions = accelerator.prepare(knapformer.balance(CASE.make()))(samples)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert isinstance(predictions, Predictions)
    assert predictions.dtype == predictions.zero.dtype == torch.float32
    for prediction, sample in zip(predictions, samples, strict=True):
        output = plain(**sample).sample
        assert prediction.dtype == output.dtype == torch.float32
        assert relative_error(prediction, output) <= 2e-2
