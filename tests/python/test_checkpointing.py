"""Checkpointing that keeps exchanges, on real ranks: as many collectives as without any, and the same gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from exactness_ranks import CLUSTER, Step, batch_of
from knapformer.adapters.named import build_model, load_config
from knapformer.models import init_weights, set_checkpointing
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from knapformer import SequenceBalancer, StateError, checkpointing

# Of a flat topology, and of a nested one whose first step has sequences that are shared and some that are not.
CASES = {"transformer-tiny": "g2n1", "flux-tiny": "g2/1n1"}
MODES = ("none", "blocks", "exchanges")
# (text tokens, image tokens) of each sample of each rank.
STEPS: list[Step] = [
    [[(0, 9), (3, 70)], [(5, 30), (0, 4)]],
    [[], [(2, 40), (0, 3)]],  # a rank without samples
    [[(0, 1)], []],  # and one without tokens anywhere
]


@contextlib.contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Of the tensors that checkpointing has in store at the end, of the forward passes inside."""
    kept: list[int] = []
    stores: list[Any] = []
    make = checkpointing.create_selective_checkpoint_contexts

    def spy(*args: Any) -> Any:
        contexts = make(*args)
        stores.append(contexts[0].storage)
        return contexts

    checkpointing.create_selective_checkpoint_contexts = spy
    try:
        yield kept
    finally:
        checkpointing.create_selective_checkpoint_contexts = make
    values = (getattr(leaf, "val", None) for leaf in tree_leaves(stores))
    kept.extend(value.nbytes for value in values if isinstance(value, Tensor))


def train(name: str, mode: str, rank: int) -> tuple[list[Tensor], int, int]:
    """Gradients of all steps, added up; the all-to-alls of all steps; bytes that the first forward pass kept."""
    model = build_model(load_config(name), torch.float64)
    init_weights(model)
    set_checkpointing(model, mode != "none", keep_exchanges=mode == "exchanges")
    balancer = SequenceBalancer(CASES[name], cluster=CLUSTER)

    def loss_of(index: int) -> Tensor:
        batch, target = batch_of(name, STEPS[index], index, [rank])
        return (model(batch, balancer) - target).square().sum()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with kept_bytes() as kept:
            loss = loss_of(0)
        loss.backward()
        for index in range(1, len(STEPS)):
            loss_of(index).backward()
    count = sum(event.count for event in profiler.key_averages() if event.key == "c10d::alltoall_base_")
    return [parameter.grad for parameter in model.parameters()], count, sum(kept)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
    """Of tensors whose shapes tell nothing about the lengths, as packed kernels have: torch's own check of what is
    computed again passes."""
    segment = torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens.long())
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(segment[:, None] != segment, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def gradients_of_two_plans(topology: str, rank: int, mode: str, held: bool = False) -> list[Tensor]:
    """One backward pass over the steps of two plans, of as many tokens and sequences each."""
    balancer = SequenceBalancer(topology, group=dist.new_group([0, 1]))
    steps = [[[20, 10], [40, 30]], [[10, 20], [30, 40]]]
    leaves, total = [], torch.zeros((), dtype=torch.float64)
    for number, lens in enumerate(steps):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(sum(lens[rank]), 8, dtype=torch.float64, generator=generator, requires_grad=True)
        balancer.plan_routing(lens[rank], 8)
        _, h, _ = balancer.route(x)
        attends: Any = balancer.current if held else balancer

        def block(h: Tensor, attends: Any = attends) -> Tensor:
            q = h.unflatten(1, (2, 4))
            return attends.attention(q, q.sin(), q.cos(), masked_attention).flatten(1)

        h = block(h) if mode == "none" else checkpoint(block, h, use_reentrant=mode == "reentrant")
        _, y = balancer.reverse_route(h)
        leaves.append(x)
        total = total + y.square().sum()
    total.backward()
    return [x.grad for x in leaves]


def check_two_plans_in_one_backward_pass(rank: int) -> None:
    for topology in ("g2n1", "g1n2", "g2/1n1"):
        expected = gradients_of_two_plans(topology, rank, "none")
        for mode in ("blocks", "reentrant"):
            for got, right in zip(gradients_of_two_plans(topology, rank, mode, held=True), expected, strict=True):
                assert torch.equal(got, right), (topology, mode)
            with pytest.raises(StateError, match=r"computed again in the backward pass of an earlier plan"):
                gradients_of_two_plans(topology, rank, mode)


def train_in_all_modes(rank: int, world_size: int) -> dict[str, dict[str, tuple[int, int]]]:
    figures: dict[str, dict[str, tuple[int, int]]] = {}
    for name in CASES:
        gradients = {}
        for mode in MODES:
            gradients[mode], *figures.setdefault(name, {})[mode] = train(name, mode, rank)
        for mode in MODES:
            for got, expected in zip(gradients[mode], gradients["none"], strict=True):
                assert torch.equal(got, expected), (name, mode)
    check_two_plans_in_one_backward_pass(rank)
    return figures


def attention_alone(rank: int, world_size: int) -> None:
    """In a checkpoint of its own, on ranks of which some hold whole sequences only or no heads: there `attend` saves
    nothing, or something else than on its peers."""

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return q.sin() * k * v if q.numel() else q * 1

    for topology, d_model, lens in (
        ("g4/2/1n1", 1024, [[4000, 200], [1000], [1000, 1000], [1000, 1000]]),
        ("g4n1", 64, [[40], [], [], []]),
    ):
        balancer, gradients = SequenceBalancer(topology), []
        num_tokens = balancer.plan_routing(lens[rank], d_model).tokens_after[rank]

        def halves(q: Tensor, k: Tensor, v: Tensor, balancer: SequenceBalancer = balancer) -> Tensor:
            seq_lens, q, k, v = balancer.pre_attn(q, k, v)
            return balancer.post_attn(attend(q, k, v, seq_lens))[1]

        def whole(q: Tensor, k: Tensor, v: Tensor, balancer: SequenceBalancer = balancer) -> Tensor:
            return balancer.attention(q, k, v, attend)

        for call in (whole, halves) if topology == "g4n1" else (whole,):
            for checkpointed in (False, True):
                x = torch.randn(num_tokens, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
                x.requires_grad_()
                o = checkpoint(call, x, x, x, use_reentrant=False) if checkpointed else call(x, x, x)
                (o * 2).sum().backward()
                gradients.append(x.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients), topology


def test_attention_alone_is_recomputed_in_one_order_on_all_ranks() -> None:
    run_ranks(attention_alone, 4)


def test_recomputation_repeats_no_exchange() -> None:
    of_ranks = run_ranks(train_in_all_modes, 2, timeout_s=300)
    for figures in of_ranks:
        for name in CASES:
            count = {mode: figures[name][mode][0] for mode in MODES}
            assert count["exchanges"] == count["none"] < count["blocks"]
            assert figures[name]["exchanges"][1] > 0 == figures[name]["blocks"][1] == figures[name]["none"][1]
        config = load_config("transformer-tiny")
        count = {mode: figures["transformer-tiny"][mode][0] for mode in MODES}
        attentions = 2 * config.num_blocks * len(STEPS)  # there and back
        assert count["none"] == 2 * (attentions + 2 * len(STEPS))
        assert count["blocks"] == count["none"] + attentions
        # Queries, keys, values and outputs of half of the heads of all tokens.
        tokens = sum(sum(sample) for samples in STEPS[0] for sample in samples)
        heads = 2 * config.num_heads + 2 * config.num_kv_heads
        kept = config.num_blocks * tokens * heads * config.head_dim / 2 * 8
        # The output is kept where it is back with all heads of this rank's chunks, which may differ by a token.
        assert abs(figures["transformer-tiny"]["exchanges"][1] / kept - 1) < 0.02
