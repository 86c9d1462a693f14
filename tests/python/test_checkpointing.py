"""Checkpointing that keeps exchanges, on real ranks: as many collectives as without any, and the same gradients."""

from __future__ import annotations

import torch
from distributed.ranks import run_ranks
from exactness_ranks import CLUSTER, Step, batch_of
from torch import Tensor

from knapformer import SequenceBalancer

# Of a flat topology, and of a nested one whose first step has sequences that are shared and some that are not.
CASES = {"transformer-tiny": "g2n1", "flux-tiny": "g2/1n1"}
MODES = ("none", "blocks", "exchanges")
# (text tokens, image tokens) of each sample of each rank.
STEPS: list[Step] = [
    [[(0, 9), (3, 70)], [(5, 30), (0, 4)]],
    [[], [(2, 40), (0, 3)]],  # a rank without samples
    [[(0, 1)], []],  # and one without tokens anywhere
]


def train(name: str, mode: str, rank: int) -> tuple[list[Tensor], int, float]:
    """Gradients of all steps, added up; the all-to-alls of all steps; bytes that the first forward pass left."""
    from knapformer.models import NAMED_CONFIGS, build_model, init_weights, set_checkpointing

    model = build_model(NAMED_CONFIGS[name], torch.float64)
    init_weights(model)
    set_checkpointing(model, mode != "none", keep_exchanges=mode == "exchanges")
    balancer = SequenceBalancer(CASES[name], cluster=CLUSTER)

    def loss_of(index: int) -> Tensor:
        batch, target = batch_of(name, STEPS[index], index, [rank])
        return (model(batch, balancer) - target).square().sum()

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
        loss = loss_of(0)
    with torch.profiler.profile(activities=activities) as rest:
        loss.backward()
        for index in range(1, len(STEPS)):
            loss_of(index).backward()
    held = sum(event.self_cpu_memory_usage for event in forward.key_averages())
    events = [*forward.key_averages(), *rest.key_averages()]
    count = sum(event.count for event in events if event.key == "c10d::alltoall_base_")
    return [parameter.grad for parameter in model.parameters()], count, held


def train_in_all_modes(rank: int, world_size: int) -> dict[str, dict[str, tuple[int, float]]]:
    figures: dict[str, dict[str, tuple[int, float]]] = {}
    for name in CASES:
        gradients = {}
        for mode in MODES:
            gradients[mode], *figures.setdefault(name, {})[mode] = train(name, mode, rank)
        for mode in MODES:
            for got, expected in zip(gradients[mode], gradients["none"], strict=True):
                assert torch.equal(got, expected), (name, mode)
    return figures


def test_recomputation_repeats_no_exchange() -> None:
    from knapformer.models import NAMED_CONFIGS

    of_ranks = run_ranks(train_in_all_modes, 2, timeout_s=300)
    for figures in of_ranks:
        for name in CASES:
            count = {mode: figures[name][mode][0] for mode in MODES}
            held = {mode: figures[name][mode][1] for mode in MODES}
            assert count["exchanges"] == count["none"] < count["blocks"]
            assert held["blocks"] < held["exchanges"] < held["none"]
        config = NAMED_CONFIGS["transformer-tiny"]
        count, held = ({mode: figures["transformer-tiny"][mode][i] for mode in MODES} for i in range(2))
        attentions = 2 * config.num_blocks * len(STEPS)  # there and back
        assert count["none"] == 2 * (attentions + 2 * len(STEPS))
        assert count["blocks"] == count["none"] + attentions
        # Queries, keys, values and outputs of half of the heads of all tokens.
        tokens = sum(sum(sample) for samples in STEPS[0] for sample in samples)
        heads = 2 * config.num_heads + 2 * config.num_kv_heads
        kept = config.num_blocks * tokens * heads * config.head_dim / 2 * 8
        assert 0.99 * kept < held["exchanges"] - held["blocks"] < 1.1 * kept
