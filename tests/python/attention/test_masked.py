"""Attention by the masks of sequences, against dense masks written out from their definitions."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from knapformer._torch import MaskTables
from knapformer.attention.kernels import PackedAttention
from knapformer.attention.masked import MaskedAttention, block_mask
from masks import dense_attention, dense_mask, packed_mask, random_mask
from saved_bytes import saved_bytes
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from knapformer import ArgumentError, WorkloadModel, attention_pairs

CPU = torch.device("cpu")


def tensors(num_tokens: int, kv_heads: int = 4, value_dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    return [torch.randn(num_tokens, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return [o, *torch.autograd.grad((o * torch.randn(o.shape, dtype=torch.float64).to(o.dtype)).sum(), inputs)]


ALL = [
    "full", "causal", "prefix:3", "block_causal:3:7", "window:4:2", "window:0:9", "c5 f8 c3 f9", "f9@ f9@0 f7@0",
    "f4@1-2 c7@0,2 f14@", "c3 clean:2x5 noisy:2x6", "ranges:3=0+-1+,6-7;1=;21=1+-4+",
]  # fmt: skip


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (1, 5), (4, 11)])
@pytest.mark.parametrize("mask", ALL)
def test_a_mask_is_the_dense_one(mask: str, kv_heads: int, value_dim: int) -> None:
    torch.manual_seed(0)
    inputs = tensors(25, kv_heads, value_dim)
    out, expected = MaskedAttention([25], [mask])(*inputs), dense_attention(*inputs, dense_mask(mask, 25))
    torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-12)
    assert attention_pairs(mask, 25) == int(dense_mask(mask, 25).sum())


@pytest.mark.parametrize("seed", range(20))
def test_mixtures_of_masks_are_the_dense_ones(seed: int) -> None:
    """Sequences of up to 700 tokens: ranges that move are halved down to 128 queries."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lens = [draw.choice([1, 3, 40, 300, 700]) for _ in range(draw.randint(1, 3))]
    masks = [random_mask(draw, n) for n in lens]
    inputs = tensors(sum(lens), draw.choice([4, 2]))
    out, expected = MaskedAttention(lens, masks)(*inputs), dense_attention(*inputs, packed_mask(lens, masks))
    torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(8))
def test_flex_attention_gets_the_same_mask(seed: int) -> None:
    """Without a compiler FlexAttention computes all scores and goes by mask_mod alone: blocks are looked at apart."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lens = [draw.choice([5, 128, 130, 300]) for _ in range(draw.randint(1, 3))]
    masks = [random_mask(draw, n) for n in lens]
    tables, allowed, inputs = MaskTables(masks, lens), packed_mask(lens, masks), tensors(sum(lens), draw.choice([4, 2]))
    layout = block_mask(tables, CPU)
    by_head = (tensor.detach().transpose(0, 1).unsqueeze(0) for tensor in inputs)  # no gradients on CPUs
    out = flex_attention(*by_head, block_mask=layout, enable_gqa=True).squeeze(0).transpose(0, 1)
    torch.testing.assert_close(out, dense_attention(*inputs, allowed).detach(), rtol=1e-12, atol=1e-12)
    num_blocks = -(-sum(lens) // 128)
    padded = torch.zeros(num_blocks * 128, num_blocks * 128, dtype=torch.bool)
    padded[: sum(lens), : sum(lens)] = allowed
    of_blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    assert torch.equal(layout.to_dense()[0, 0].bool(), of_blocks.any(-1).any(-1))
    assert layout.full_kv_num_blocks is not None
    for block in range(num_blocks):
        for key_block in layout.full_kv_indices[0, 0, block, : layout.full_kv_num_blocks[0, 0, block]]:
            assert of_blocks[block, key_block].all()


def test_the_mask_of_a_batch_is_that_of_its_own_lengths() -> None:
    """A block mask that is built once and used for batches of other lengths masks the wrong tokens, in silence."""
    torch.manual_seed(0)
    for lens in ([20, 30], [30, 20]):
        inputs = tensors(50)
        out = MaskedAttention(lens, ["causal", "full"])(*inputs)
        torch.testing.assert_close(out, dense_attention(*inputs, packed_mask(lens, ["causal", "full"])))
    with pytest.raises(ValueError, match="q, k: got 49 queries and 49 keys, expected 50"):
        MaskedAttention([20, 30], ["full", "full"])(*tensors(49))
    with pytest.raises(ArgumentError, match="mask: got 'c5 f8' for a sequence of 12 tokens, expected one of 13 tokens"):
        MaskedAttention([12], ["c5 f8"])
    with pytest.raises(ArgumentError, match=r"got 'density:0\.5', expected a mask that says"):
        MaskedAttention([12], ["density:0.5"])
    with pytest.raises(ArgumentError, match="masks: got 1 masks, expected one for each of the 2 sequences"):
        MaskedAttention([12, 13], ["full"])


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 4, 8), (5, 4, 4), (5, 4, 8)),  # keys of another width
        ((5, 4, 8), (5, 4, 16), (5, 4, 8)),
        ((5, 4, 8), (5, 3, 8), (5, 3, 8)),  # heads that are not grouped
        ((5, 2, 8), (5, 4, 8), (5, 4, 8)),
        ((5, 4, 8), (5, 4, 8), (5, 2, 8)),
        ((5, 4, 8), (5, 2, 8), (7, 2, 8)),  # more values than keys
    ],
)
def test_inputs_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"q, k, v: got .*, expected \(queries, heads, head_dim\)"):
        MaskedAttention([2, 3], ["causal", "full"])(*(torch.ones(shape) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lens, masks = [300, 90], ["c40 f200 c60", "block_causal:10:20"]
    inputs = tensors(390, 2, dtype=dtype)
    expected = dense_attention(*(t.double() for t in inputs), packed_mask(lens, masks))
    out = MaskedAttention(lens, masks)(*inputs)
    assert out.dtype == dtype
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        [t.double() for t in gradients(out, inputs)], gradients(expected, inputs), rtol=tolerance, atol=tolerance,
        check_dtype=False,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        assert MaskedAttention(lens, masks)(*inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("way", [lambda f: torch.compile(f, dynamic=True, backend="aot_eager"),
                                 lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False)],
                         ids=["compiled", "checkpointed"])  # fmt: skip
def test_other_ways_to_call_it(way: Callable[..., Callable[..., Tensor]]) -> None:
    torch.manual_seed(0)
    for lens in ([30, 11], [9, 50]):
        masks = ["causal", f"c3 f{lens[1] - 3}"]
        inputs, attend = tensors(sum(lens), 2), MaskedAttention(lens, masks)
        out = way(lambda q, k, v: attend(q + 1, k, v) * 2)(*inputs)  # noqa: B023
        expected = 2 * dense_attention(inputs[0] + 1, *inputs[1:], packed_mask(lens, masks))
        torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-12)


class Computed(TorchDispatchMode):
    """Counts the (query, key) pairs that torch's attention gets, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            backward = name.endswith("backward")
            q, k = args[backward : backward + 2]
            self.pairs[backward] += q.shape[2] * k.shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mask", "ends"), [("full", 0), ("causal", 1), ("prefix:300", 1), ("window:400:300", 2),
                                            ("c700 f90 c800 f410", 1), ("c8 clean:4x249 noisy:4x249", 1)])  # fmt: skip
def test_little_more_than_the_planned_pairs_is_computed(mask: str, ends: int) -> None:
    """Half a tile of 128 queries and keys at each end that moves with the query."""
    inputs, pairs = tensors(2000), attention_pairs(mask, 2000)
    with Computed() as computed:
        MaskedAttention([2000], [mask])(*inputs).sum().backward()
    for count in computed.pairs:
        assert pairs <= count <= pairs + 2000 * 64 * ends


def drawn_mask(draw: random.Random, kind: str) -> tuple[str, int]:
    """Of images, videos and texts as people train them: the mask, and its tokens."""
    kind = draw.choice(["full", "causal", "block_causal", "unified", "forcing"]) if kind == "mixed" else kind
    if kind in ("full", "causal", "block_causal", "window"):
        numbers = {"block_causal": f":77:{draw.choice([260, 520, 1560])}", "window": f":{draw.choice([256, 512])}:0"}
        return kind + numbers.get(kind, ""), int(math.exp(draw.uniform(math.log(300), math.log(8000))))
    if kind == "unified":
        pairs = [(draw.randint(20, 300), draw.choice([256, 576, 1024])) for _ in range(draw.randint(1, 4))]
        return " ".join(f"c{text} f{image}" for text, image in pairs), sum(map(sum, pairs))
    chunks, tokens = draw.randint(2, 8), draw.choice([160, 390, 520])
    return f"c77 clean:{chunks}x{tokens} noisy:{chunks}x{tokens}", 77 + 2 * chunks * tokens


@pytest.mark.parametrize("kind", ["full", "causal", "block_causal", "window", "unified", "forcing", "mixed"])
def test_planned_work_is_that_of_flex_attentions_blocks(kind: str) -> None:
    """With whole blocks of 128 x 128, ranks have their planned work times one factor, to within 0.3 %."""
    draw, d_model, ratios = random.Random(0), 3072, []
    workload = WorkloadModel()
    for _ in range(60):
        masks, lens = zip(*(drawn_mask(draw, kind) for _ in range(draw.randint(3, 11))), strict=True)
        blocks = block_mask(MaskTables(masks, lens), CPU)
        assert blocks.full_kv_num_blocks is not None
        num_blocks = int((blocks.kv_num_blocks + blocks.full_kv_num_blocks).sum())
        planned = sum(map(workload.work, lens, itertools.repeat(d_model), masks))
        of_tokens = sum(WorkloadModel(0.0).work(n, d_model) for n in lens)
        ratios.append((of_tokens + workload.gamma * 4 * d_model * num_blocks * 128**2) / planned)
    median = statistics.median(ratios)
    assert 1 < median < 1.01
    assert 0.997 * median < min(ratios) <= max(ratios) < 1.003 * median


def test_no_long_sequence_has_all_its_scores_kept() -> None:
    """What is kept until the backward pass grows with the tokens, and not with their square."""
    kept = {}
    for num_tokens in (1000, 2000):
        inputs, attend = tensors(num_tokens), MaskedAttention([num_tokens], ["causal"])
        _, kept[num_tokens] = saved_bytes(partial(attend, *inputs))
    assert kept[2000] < 2.2 * kept[1000]


def test_without_tokens_or_heads_every_input_stays_in_the_graph() -> None:
    for lens, heads in (([0], 4), ([6], 0)):
        q, k, v = (torch.randn(sum(lens), heads, 8, requires_grad=True) for _ in range(3))
        out = MaskedAttention(lens, ["causal"])(q, k, v)
        assert [g.shape for g in gradients(out, [q, k, v])] == [q.shape] * 4


def test_blocks_that_are_made_in_inference_serve_training_after_it() -> None:
    with torch.inference_mode():
        bounds, lists = MaskTables(["window:9:4"], [300]).blocks_on(CPU)
    assert not any(tensor.is_inference() for tensor in (*lists, *(end for ends in bounds for end in ends)))


@pytest.mark.parametrize("mask", ["block_causal:3:7", "c5 f20"])
def test_packed_attention_takes_any_mask(mask: str) -> None:
    torch.manual_seed(0)
    inputs = tensors(50)
    out = PackedAttention(mask)(*inputs, [25, 25])
    torch.testing.assert_close(out, dense_attention(*inputs, packed_mask([25, 25], [mask] * 2)))
