"""What a packed call makes of the arguments of each sample: the same as diffusers, or an error that names them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from adapters.cases import Sample, cases
from knapformer.adapters.parity import SIZES, Size, relative_error

import knapformer

CASES = {
    name: case
    for name, case in cases().items()
    if not name.endswith(("-plain", "-double", "-flow", "-layered", "-one-time")) and name != "wan"
}
# What diffusers itself takes in one dtype, or rounds in every block.
OF_ONE_DTYPE = ("hunyuan-video15-timestep", "ltx2.3-timestep", "qwen-image21-encoder_hidden_states_mask")
OF_ANY_DTYPE = ("timestep", "guidance", "img_ids", "txt_ids", "encoder_hidden_states_mask")


def samples_of(name: str) -> list[Sample]:
    return [CASES[name].sample(SIZES[seed], seed) for seed in (0, 4)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in CASES
        for name, value in samples_of(case)[0].items()
        if torch.is_tensor(value) and name in OF_ANY_DTYPE and f"{case}-{name}" not in OF_ONE_DTYPE
    ],
)
@torch.no_grad()
def test_inputs_of_other_dtypes_are_those_of_diffusers(case: str, name: str, dtype: torch.dtype) -> None:
    samples = samples_of(case)
    for sample in samples:
        if name.endswith("ids"):
            sample[name] = sample[name] + 301  # which bfloat16 does not hold, nor 1.998
        if case == "flux2":
            sample["timestep"] = torch.tensor([1.998])
        sample[name] = sample[name].to(dtype)
    if name in ("img_ids", "txt_ids"):  # which diffusers concatenates, in the dtype that torch gives both
        for sample in samples:
            sample["txt_ids"], sample["img_ids"] = sample["txt_ids"].to(dtype), sample["img_ids"].to(dtype)
    model = CASES[case].make()
    expected = [CASES[case].adapter.expected(model, sample) for sample in samples]
    for prediction, output in zip(knapformer.balance(model)(samples), expected, strict=True):
        assert relative_error(prediction, output) <= 1e-5


@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        ("flux", "guidance", None, "got none, expected one"),
        ("flux", "timestep", torch.rand(2), "got 2 numbers, expected one"),
        ("flux", "hidden_states", torch.rand(2, 15, 6), "got shape (2, 15, 6), expected (1, tokens, 6)"),
        ("flux", "img_ids", torch.rand(14, 3), "got 14 rows, expected 15"),
        ("sd3", "pooled_projections", torch.rand(2, 9), "got 2 rows, expected one"),
        ("sd3", "hidden_states", [1.0], "got list, expected a tensor"),
        ("qwen-image", "encoder_hidden_states_mask", torch.ones(7, 1), "got shape (7, 1), expected (1, 7)"),
        ("qwen-image", "encoder_hidden_states_mask", [1.0] * 7, "got list, expected a tensor"),
        (
            "qwen-image",
            "encoder_hidden_states_mask",
            torch.tensor([[0, 0, 0, 0, 0, 0, -torch.inf]]),  # as one that is added to the scores
            "got -inf, expected 1 for a token that counts, or 0",
        ),
        ("krea2", "encoder_attention_mask", torch.ones(1, 7), "got torch.float32, expected torch.bool"),
        ("chroma", "attention_mask", torch.zeros(1, 22) > 0, "got 0 for a token of an image, expected 1"),
        ("hunyuan-video", "encoder_attention_mask", torch.eye(7)[1:2], "got 1 after 0, expected the padding behind"),
        ("hunyuan-video", "encoder_attention_mask", torch.zeros(1, 7), "got a text without a token that counts, ex"),
        ("hunyuan-video15", "encoder_attention_mask", torch.zeros(1, 7), "got a text without a token that counts, ex"),
        ("z-image", "x", [torch.rand(3, 1, 7, 4)], "got shape (3, 1, 7, 4), expected (3, frames, height, width) in m"),
        ("minimax-h3", "video_indices", torch.arange(12, 27), "got 26, expected numbers from 0 to 25"),
        ("qwen-image21", "encoder_hidden_states_mask", torch.zeros(1, 1) > 0, "got 1 flags, expected 9"),
        ("minimax-h3", "token_tags", torch.zeros(3).long(), "got shape (3,), expected (26,)"),
        ("qwen-image", "img_shapes", [[(1, 3, 5)], [(1, 3, 5)]], "got those of 2 samples, expected one's"),
        ("qwen-image", "img_shapes", [[(1, 3, 4)]], "got 12 tokens, expected 15"),
        ("wan-two-heads", "timestep", torch.rand(1, 14), "got 14 numbers, expected 1 or 15"),
        ("wan-image", "encoder_hidden_states_image", None, "got none, expected one"),
        (
            "wan-image",
            "encoder_hidden_states_image",
            torch.rand(2, 7, 11),
            "got shape (2, 7, 11), expected (1, tokens, 11)",
        ),
        ("wan-image", "encoder_hidden_states_image", torch.rand(7, 11), "got shape (7, 11), expected (1, tokens, 11)"),
        ("wan-image", "encoder_hidden_states_image", torch.rand(1, 300, 11), "got 300 tokens, expected at most 257"),
        (
            "wan-two-images",
            "encoder_hidden_states_image",
            torch.rand(1, 12, 11),
            "got shape (1, 12, 11), expected (2, 6, 11)",
        ),
        (
            "wan-vace",
            "control_hidden_states",
            torch.rand(1, 5, 1, 6, 8),
            "got (1, 3, 4) patches, expected (1, 3, 5), as hid",
        ),
        ("wan-two-heads", "encoder_hidden_states_image", torch.rand(1, 7, 11), "got one, expected none"),
    ],
)
def test_inputs_that_do_not_fit_are_named(case: str, name: str, value: Any, message: str) -> None:
    """Also of one sample alone, where rows of a batch of two would broadcast."""
    model, good = knapformer.balance(CASES[case].make()), samples_of(case)[0]
    for samples in ([], [good]):
        with pytest.raises(knapformer.ArgumentError, match=re.escape(f"samples[{len(samples)}]['{name}']: {message}")):
            model([*samples, good | {name: value}])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (samples_of("flux")[0], "samples: got dict, expected a list of dicts of forward's arguments"),
        (iter(()), "samples: got tuple_iterator, expected a list of dicts"),
        (None, "samples: got NoneType, expected a list of dicts"),
        ([torch.rand(3)], "samples[0]: got Tensor, expected a dict"),
        ([samples_of("flux")[0] | {"timestep": None}], "samples[0]: got no 'timestep', expected hidden_states, "),
        (
            [samples_of("flux")[0] | {"hidden_states": torch.ones(1, 15, 6).long()}],
            "samples[0]['hidden_states']: got torch.int64, expected floating-point numbers",
        ),
        (
            [samples_of("flux")[0], samples_of("flux")[0] | {"timestep": torch.ones(1).bfloat16()}],
            "samples[1]['timestep']: got torch.bfloat16, expected torch.float32, as before it",
        ),
        (
            [samples_of("flux")[0] | {"controlnet_blocks_repeat": True}],
            "samples[0]: got 'controlnet_blocks_repeat', expected some of hidden_states, ",
        ),
        (
            [samples_of("flux")[0] | {"controlnet_block_samples": [1]}],
            "samples[0]['controlnet_block_samples']: got 1, expected a list of 0 residuals, as controls= of knapformer",
        ),
        (
            [samples_of("flux")[0] | {"controlnet_single_block_samples": torch.ones(1, 15, 42)}],
            "samples[0]['controlnet_single_block_samples']: got Tensor, expected a list of 1 residuals",
        ),
        (
            [samples_of("flux")[0] | {"controlnet_single_block_samples": [torch.ones(1, 22, 42)]}],
            "samples[0]['controlnet_single_block_samples'][0]: got shape (1, 22, 42), expected (1, 15, 42)",
        ),
    ],
)
def test_samples_that_are_no_list_of_arguments_are_named(samples: Any, message: str) -> None:
    model = knapformer.balance(CASES["flux"].make(), controls={"controlnet_single_block_samples": 1})
    with pytest.raises(knapformer.ArgumentError, match=re.escape(message)):
        model(samples)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    model, sample = knapformer.balance(CASES["flux"].make()), samples_of("flux")[0]
    nothing = {"controlnet_blocks_repeat": False, "joint_attention_kwargs": {}, "return_dict": False}
    assert torch.equal(model([sample | nothing])[0], model([sample])[0])


@pytest.mark.parametrize(
    ("case", "num_text", "limit"),
    [
        ("wan-two-heads", 7, "6 (max_text_tokens)"),
        ("wan-image-as-text", 260, "6 (max_text_tokens) and 257 of the picture"),
    ],
)
def test_a_text_that_has_no_room_is_named(case: str, num_text: int, limit: str) -> None:
    model = knapformer.balance(CASES[case].make(), max_text_tokens=6)
    message = rf"samples\[1\]\['encoder_hidden_states'\]: got \d+ tokens, expected at most {re.escape(limit)}"
    with pytest.raises(knapformer.ArgumentError, match=message):
        model([CASES[case].sample(Size(SIZES[0].grid, num), 0) for num in (6, num_text)])
