"""Masks that users of other software reported to be computed wrongly. Each mask is written out as the report has it, a
function of query and key; outputs and gradients are those of dense attention with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from distributed.ranks import run_ranks
from knapformer.models import MaskedAttention
from torch import Tensor

from knapformer import SequenceBalancer, attention_pairs

Sees = Callable[[Tensor, Tensor], Tensor]  # (queries, 1) and (1, keys) -> (queries, keys)


def draw(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> Tensor:
    k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    tokens = torch.arange(len(q))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    seen = sees(tokens.unsqueeze(1), tokens.unsqueeze(0))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def with_gradients(o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.arange(o.numel(), dtype=o.dtype).view(o.shape).cos()
    return [o, *torch.autograd.grad((o * weight).sum(), inputs)]


def check(lens: list[int], masks: list[str], sees: Sees) -> list[Tensor]:
    """Returns the output and the gradients."""
    inputs = draw(sum(lens))
    got = with_gradients(MaskedAttention(lens, masks)(*inputs), inputs)
    torch.testing.assert_close(got, with_gradients(dense(*inputs, sees), inputs), rtol=1e-11, atol=1e-12)
    tokens = torch.arange(sum(lens))
    pairs = int(sees(tokens.unsqueeze(1), tokens.unsqueeze(0)).sum())
    assert sum(map(attention_pairs, masks, lens)) == pairs, "what is planned"
    return got


def test_the_mask_of_one_length_is_not_used_for_another() -> None:
    """meta-pytorch/attention-gym, issue 34: a block mask that was made for 8,192 tokens gives wrong results with 1,024.
    A window of earlier keys, and the first ones for all."""

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return ((query >= key) & (query - key <= 16)) | ((query >= 4) & (key <= 4))

    for n in (300, 90, 41):  # first the longest, as there
        check([n], [f"ranges:4=0-1+;18=0-5+;{n - 22}=0-5,6+-23+"], sees)
    with pytest.raises(ValueError, match=r"got '.*' for a sequence of 80 tokens, expected one of 90 tokens"):
        MaskedAttention([80], ["ranges:4=0-1+;18=0-5+;68=0-5,6+-23+"])


def test_packed_documents_do_not_see_each_other() -> None:
    """axolotl-ai-cloud/axolotl, pull request 3796, and huggingface/trl, issue 3067: under one causal mask each of the
    packed documents sees those before it."""
    lens = [7, 30, 1, 12]
    of_token = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
    check(lens, ["causal"] * 4, lambda q, k: (q >= k) & (of_token[q] == of_token[k]))
    inputs = draw(sum(lens))
    MaskedAttention(lens, ["causal"] * 4)(*inputs)[7:].sum().backward()
    assert all(tensor.grad is not None and tensor.grad[:7].abs().max() == 0 for tensor in inputs)


@pytest.mark.parametrize("block", [3, 24, 40])
def test_noisy_blocks_see_clean_ones_before_their_own(block: int) -> None:
    """kuleshov-group/bd3lms, issue 23: blocks of another size than the kernel's 128. Noisy blocks, then clean ones: a
    noisy one sees itself and earlier clean ones, a clean one those up to itself."""
    num = 5
    n = num * block

    def sees(query: Tensor, key: Tensor) -> Tensor:
        query_clean, key_clean = query >= n, key >= n
        query_block, key_block = query % n // block, key % n // block
        same_half = (query_block == key_block) & (query_clean == key_clean)
        return (
            same_half | (key_clean & (query_block > key_block)) | (query_clean & key_clean & (query_block == key_block))
        )

    earlier = ["", *[f"{num}-{num + i}" for i in range(num - 1)]]
    half = [f"f{block}@{parts}" for parts in earlier]
    check([2 * n], [" ".join(half + half)], sees)
    # The same with the clean ones first, by its short form.
    check(
        [2 * n], [f"clean:{num}x{block} noisy:{num}x{block}"], lambda q, k: sees((q + n) % (2 * n), (k + n) % (2 * n))
    )


def test_patches_of_an_image_see_each_other() -> None:
    """huggingface/transformers, issue 39389: the mask by which images in a text are bidirectional did not reach
    attention, which computed a causal one."""
    image = torch.tensor([0] * 6 + [1] * 16 + [0] * 5 + [2] * 9 + [0] * 4)
    got = check([40], ["c6 f16 c5 f9 c4"], lambda q, k: (q >= k) | ((image[q] == image[k]) & (image[q] > 0)))
    causal = MaskedAttention([40], ["causal"])(*draw(40))
    same = (got[0] - causal).abs().amax((1, 2)) < 1e-9
    last = torch.isin(torch.arange(40), torch.tensor([21, 35]))  # these see their whole image in both
    assert torch.equal(same, (image == 0) | last)


@pytest.mark.parametrize("padding", [0, 5, 60])
def test_padding_is_not_attended_to(padding: int) -> None:
    """huggingface/diffusers, issue 8673: outputs changed with the length to which a prompt is padded. Here a prompt is
    not padded; where it is in the data, a mask leaves the padding out."""
    mask = f"f7@2 f{padding}@ f20@0" if padding else "f7@1 f20@0"
    is_padding = (torch.arange(27 + padding) >= 7) & (torch.arange(27 + padding) < 7 + padding)
    check([27 + padding], [mask], lambda q, k: is_padding[q] == is_padding[k])
    inputs = draw(27 + padding)
    kept = [tensor[~is_padding] for tensor in inputs]
    torch.testing.assert_close(
        MaskedAttention([27 + padding], [mask])(*inputs)[~is_padding], MaskedAttention([27], ["full"])(*kept),
        rtol=1e-12, atol=1e-12,
    )  # fmt: skip


def teacher_forced(query: Tensor, key: Tensor) -> Tensor:
    """4 tokens of text, 3 clean chunks of 6 tokens, and their noisy copies."""
    query_chunk, key_chunk = (query - 4) // 6, (key - 4) // 6  # noisy ones from 3 on
    of_clean = torch.where(query_chunk < 3, key_chunk <= query_chunk, key_chunk < query_chunk - 3)
    of_chunks = (key < 4) | ((key_chunk < 3) & of_clean) | (key_chunk == query_chunk)
    return torch.where(query < 4, key <= query, of_chunks)


SHARED: dict[str, Sees] = {
    "causal": lambda query, key: query >= key,
    "window:9:0": lambda query, key: (query >= key) & (query - key <= 9),
    "c4 clean:3x6 noisy:3x6": teacher_forced,
}


def shared_by_two_ranks(rank: int, world_size: int) -> None:
    for mask, sees in SHARED.items():
        balancer = SequenceBalancer("g2n1", d_model=32)
        balancer.plan_routing([40] if rank == 0 else [], masks=[mask] if rank == 0 else [])
        inputs = draw(40 if rank == 0 else 0)
        chunk_lens, q, (k, v) = balancer.route(inputs[0], inputs[1:])
        assert 0 < int(chunk_lens.sum()) < 40, "each rank has a part"
        _, o = balancer.reverse_route(balancer.attention(q, k, v))
        got = with_gradients(o, inputs)
        if rank == 0:
            expected = with_gradients(dense(*inputs, sees), inputs)
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12, msg=lambda text: f"{mask}: {text}")  # noqa: B023


def test_ranks_that_share_a_sequence_keep_its_mask() -> None:
    """huggingface/accelerate, pull request 4177: context parallelism put a causal mask in place of any. And
    ByteDance-Seed/VeOmni, issue 1140: each rank's part of a sequence attended to itself alone."""
    run_ranks(shared_by_two_ranks, 2)
