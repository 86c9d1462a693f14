"""Replaying plans on one device: what each rank's share is, what is run of it, and what is made of the seconds."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from flop_clock import flops_of
from knapformer.adapters.named import build_model, config_from_dict, load_config
from knapformer.tools.cli import main
from knapformer.tools.replay import shares as replay_shares
from knapformer.tools.replay.shares import RankSeconds, RankShare, Replayer, correlation, figures, shares_of, spread
from knapformer.tools.ways import OptimizerStep
from masks import dense_mask
from printed import check_tables

import knapformer as kf
from knapformer import Cluster, TrainedModel, plan_home

WIDTH = 64
LENGTHS = [[700, 30], [15, 64], [300], [], [90, 3], [1], [210], [40, 41]]


def text_of(plan: kf.Plan) -> list[int]:
    return [length // 3 for lens in plan.seq_lens for length in lens]


def planned_work(share: RankShare, workload: kf.WorkloadModel, num_heads: int) -> float:
    """FLOPs of one block forward, as the plan counts them: 24 n d^2, and each head and query its part of attention."""
    attention = sum(
        workload.gamma * 4 * queries * keys * WIDTH * of.num_heads / num_heads
        for of in share.attention
        for _, _, _, queries, _, keys in of.rows
    )
    return 24 * WIDTH**2 * sum(share.chunk_lens) + attention


@pytest.mark.parametrize(
    ("topology", "solver"),
    [("g8n1", "greedy"), ("g1n2+g2n1+g4n1", "greedy"), ("g8/4/2/1n1", "balanced"), ("g2n4", "greedy")],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (6, 6), (12, 4)])
@pytest.mark.parametrize("cuts_queries", [False, True])
def test_shares_cover_the_plan(topology: str, solver: str, heads: int, kv_heads: int, cuts_queries: bool) -> None:
    model = TrainedModel(num_heads=heads, num_kv_heads=kv_heads, cuts_queries=True) if cuts_queries else None
    plan = kf.plan(LENGTHS, topology, d_model=WIDTH, gamma=0.41, solver=solver, model=model)
    for of in (plan, plan_home(plan)):
        shares = shares_of(of, heads, kv_heads, text_of(of))
        assert [list(share.chunk_lens) for share in shares] == of.chunk_lens
        # Every head of every sequence on exactly one rank; key/value heads at least once.
        computed: Counter[int] = Counter()
        for share in shares:
            for attention in share.attention:
                assert 0 < attention.num_heads <= heads and 0 < attention.num_kv_heads <= kv_heads
                for _, _, _, queries, _, keys in attention.rows:  # of full attention, which sees all keys
                    computed[keys] += attention.num_heads * queries
        assert computed == Counter({length: heads * length for lens in LENGTHS for length in lens})  # all distinct
        assert sum(sum(share.text_lens) for share in shares) == sum(text_of(of))
        assert all(t <= n for share in shares for t, n in zip(share.text_lens, share.chunk_lens, strict=True))
        work = [planned_work(share, of.workload, heads) for share in shares]
        assert sum(work) == pytest.approx(sum(of.workload_after), rel=1e-12)
        if heads == 8 or of is not plan:  # else the plan counts parts of heads, or even parts of queries
            assert work == pytest.approx(of.workload_after, rel=1e-12)


def test_text_is_at_a_sequences_front() -> None:
    plan = kf.plan([[10], [], [], []], "g4n1", d_model=WIDTH)
    shares = shares_of(plan, 4, 4, [5])
    assert [share.chunk_lens for share in shares] == [(n,) for n in plan.chunk_lens[0] + plan.chunk_lens[1]] + [
        (n,) for n in plan.chunk_lens[2] + plan.chunk_lens[3]
    ]
    ends = [sum(plan.chunk_lens[r][0] for r in range(rank + 1)) for rank in range(4)]
    flags = [position < 5 for position in range(10)]
    expected = [sum(flags[end - plan.chunk_lens[rank][0] : end]) for rank, end in enumerate(ends)]
    assert [share.text_lens[0] for share in shares] == expected == [3, 2, 0, 0]


def test_text_beside_a_sequence_goes_whole_to_each_of_its_chunks() -> None:
    plan = kf.plan([[10], [], [], [2]], "g4n1", d_model=WIDTH)
    shares = shares_of(plan, 4, 4, [5, 3], text_beside=True)
    assert [share.text_lens for share in shares] == [
        tuple((5, 3)[sequence] for sequence in sequences) for sequences in plan.sequences_on
    ]
    assert sum(len(share.text_lens) for share in shares) > 4


def cluster(**changes: float) -> Cluster:
    return Cluster(**{"fixed_s": 0, "node_latency_s": 0, "network_latency_s": 0, **changes})


def test_figures_by_hand() -> None:
    plans = [kf.plan(lens, "g2n1", d_model=WIDTH, solver="greedy") for lens in ([[100, 20], [40]], [[60], [60, 60]])]
    model = TrainedModel(num_blocks=5, num_parameters=0, shard_ranks=1)
    measured = [[RankSeconds(3.0, 0.0, 1.0), RankSeconds(2.0, 0.0, 4.0)], [RankSeconds(2, 0, 2), RankSeconds(2, 0, 2)]]
    free = cluster(node_bytes_per_s=1e30)
    by_step = [OptimizerStep([plan]) for plan in plans], [[ranks] for ranks in measured]
    got = figures("g2n1", *by_step, free, model, peak_tflops=10.0)
    # Ranks that share wait for the longer per-token phase and then for the longer attention phase.
    assert got["fbl_per_step_s"] == pytest.approx([7.0, 4.0]) and got["fbl_s"] == pytest.approx(5.5)
    assert got["slowest_rank_s"] == pytest.approx((6.0 + 4.0) / 2)
    assert got["measured_wir"] == pytest.approx((6 / 4 + 1) / 2) and got["wir"] == pytest.approx(1.0)
    assert got["tokens_per_s"] == pytest.approx((160 + 180) / 2 / 5.5)
    flops = [sum(24 * n * WIDTH**2 + 4 * n**2 * WIDTH for n in lens) for lens in ([100, 20, 40], [60, 60, 60])]
    assert got["hfu"] == pytest.approx(4 * statistics.fmean(flops) * 5 / (5.5 * 2 * 10e12))
    assert got["correlation"] is None  # the plans are even
    slow = figures("g2n1", *by_step, cluster(node_bytes_per_s=1e6), model, None)
    assert slow["hfu"] is None and slow["token_s"] == got["token_s"]
    # What the model adds is what it adds to its own compute.
    added = [kf.predict_micro_batch(plan, cluster(node_bytes_per_s=1e6), model) for plan in plans]
    assert slow["exchange_s"] == pytest.approx(statistics.fmean(step.exchange_s for step in added))
    assert slow["route_s"] == pytest.approx(statistics.fmean(step.route_s for step in added)) and slow["route_s"] > 0
    home = [plan_home(plan) for plan in plans]
    seconds = [[RankSeconds(3, 1), RankSeconds(1, 1)], [RankSeconds(1, 0), RankSeconds()]]
    alone = [OptimizerStep([plan]) for plan in home], [[ranks] for ranks in seconds]
    got = figures(None, *alone, free, model.replace(recomputes=False), None)
    assert got["fbl_per_step_s"] == pytest.approx([4.0, 1.0]) and got["measured_wir"] is None
    json.dumps(got, allow_nan=False)


def test_correlation_and_spread() -> None:
    np = pytest.importorskip("numpy")
    work, seconds = [[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]], [[1.1, 2.3, 4.2], [2.7, 0.0, 5.5]]
    both = np.array([work, seconds])
    relative = both / both.mean(axis=2, keepdims=True)  # what differs between steps is not between ranks
    assert correlation(work, seconds) == pytest.approx(np.corrcoef(relative.reshape(2, 6))[0, 1])
    flat = both.reshape(2, 6)
    ratios = (flat[1] / np.where(flat[0] > 0, flat[0], 1))[flat[0] > 0]
    assert spread(work, seconds) == pytest.approx(ratios.std() / ratios.mean())
    assert correlation([[1.0, 1.001]], [[3.0, 5.0]]) is None and correlation([[1.0, 2.0]], [[3.0, 3.0]]) is None


CONFIG = config_from_dict({"kind": "transformer", "num_blocks": 3, "d_model": WIDTH, "num_heads": 8, "num_kv_heads": 8})
CPU = torch.device("cpu")


def counted_flops(replayer: Replayer, share: RankShare) -> tuple[float, float]:
    """Of one block's passes in the per-token layers and in attention, as torch counts matrix products."""
    found = {"token_s": 0, "attention": 0}
    for piece in replayer.pieces_of([share]):
        found["token_s" if piece.field == "token_s" else "attention"] += flops_of(piece.prepare())
    return found["token_s"], found["attention"]


@pytest.mark.parametrize(("checkpointing", "forwards"), [(True, 2), (False, 1)])
def test_what_is_run_is_the_planned_work(checkpointing: bool, forwards: int) -> None:
    plan = kf.plan(LENGTHS, "g8/4/2/1n1", d_model=WIDTH, gamma=1.0, solver="balanced")
    replayer = Replayer(CONFIG, CPU, torch.float32, checkpointing)
    for rank, share in enumerate(shares_of(plan, 8, 8, text_of(plan))):
        token_flops, attention_flops = counted_flops(replayer, share)
        planned = 24 * plan.tokens_after[rank] * WIDTH**2
        # What is computed again ends where the block's last product (8 n d^2) would begin: nothing needs its result.
        skipped = 8 * plan.tokens_after[rank] * WIDTH**2 if checkpointing else 0
        assert token_flops == (forwards + 2) * planned - skipped
        assert attention_flops == pytest.approx((forwards + 2) * (plan.workload_after[rank] - planned))


@pytest.mark.parametrize("cuts_queries", [False, True])
@pytest.mark.parametrize("masks", ["full", "causal", "window:50:0", ["c30 f670", "causal", "full", "window:50:0"]])
def test_attention_that_is_run_is_that_of_the_masks(
    masks: Any, cuts_queries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the queries of each rank, to the keys that they see, against dense masks."""
    lengths, heads = [[700, 30], [150], [64]], 3 if cuts_queries else 4
    model = TrainedModel(num_heads=heads, num_kv_heads=1, cuts_queries=cuts_queries)
    of_ranks = masks if isinstance(masks, str) else [masks[:2], masks[2:3], masks[3:], []]
    plan = kf.plan(
        [*lengths, []], "g4/2/1n1", d_model=12 * heads, gamma=1.0, masks=of_ranks, model=model,
        cluster=cluster(node_bytes_per_s=1e30),
    )  # fmt: skip
    assert max(plan.degree_of_sequence) > 1
    config = CONFIG.replace(d_model=12 * heads, num_heads=heads, num_kv_heads=1)
    replayer, seen = Replayer(config, CPU, torch.float32, False), []
    monkeypatch.setattr(replay_shares, "passes", lambda attend, inputs, _: seen.append((attend, inputs)))
    shares = [of for share in shares_of(plan, heads, 1, text_of(plan)) for of in share.attention]
    for share in shares:
        replayer._attention_work(share)
        attend, (q, k, v, *rest) = seen.pop()
        expected, starts = [], [0, 0]
        for of in share.rows:
            (q_at, k_at), (num, keys) = starts, (of.num_queries, of.num_keys)
            dense = dense_mask(of.mask, of.seq_len)[of.first_query : of.first_query + num]
            assert not dense[:, : of.first_key].any() and not dense[:, of.first_key + keys :].any()
            by_head = (t.transpose(0, 1) for t in (q[q_at : q_at + num], k[k_at : k_at + keys], v[k_at : k_at + keys]))
            some = dense[:, of.first_key : of.first_key + keys]
            o = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=some, enable_gqa=True)
            expected.append(o.transpose(0, 1))
            starts = [q_at + num, k_at + keys]
        torch.testing.assert_close(attend(q, k, v, *rest), torch.cat(expected))


def test_every_kind_of_block_is_run_as_often_as_the_model_has_it() -> None:
    config = load_config("flux-tiny").replace(num_layers=3, num_single_layers=5)
    replayer = Replayer(config, CPU, torch.float32, True)
    plan = kf.plan([[40, 8], [20]], "g2n1", d_model=config.d_model)
    (share, _) = shares_of(plan, 4, 4, [10, 0, 5])
    pieces = replayer.pieces_of([share])
    assert [(piece.field, piece.times) for piece in pieces] == [
        ("token_s", 3),
        ("token_s", 5),
        ("shared_attention_s", 8),
    ]
    blocks = build_model(config, device="meta").block_lists()
    assert replayer.num_parameters == sum(p.numel() for of in blocks for p in of.parameters())


@pytest.mark.parametrize("name", ["flux-tiny", "transformer-tiny", "wan-tiny", "sd3-demo"])
def test_no_gradient_is_lost_where_attention_is_left_out(name: str) -> None:
    config = load_config(name)
    replayer = Replayer(config, CPU, torch.float32, True)
    plan = kf.plan([[30, 20]], "g1n1", d_model=config.d_model)
    for piece in replayer.pieces_of(shares_of(plan, 4, config.num_kv_heads, [10, 5], config.text_beside)):
        piece.prepare()()
    for kind in replayer._kinds:
        for name, parameter in kind.block.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, (kind.name, name)


def test_adapters_on_a_frozen_base_are_replayed() -> None:
    """Of the per-token layers a forward pass and one backward, and the adapters' own; of attention as ever."""
    pytest.importorskip("peft")
    plan = kf.plan(LENGTHS, "g1n8", d_model=WIDTH, gamma=1.0)
    replayer = Replayer(CONFIG, CPU, torch.float32, False, "lora")
    for rank, share in enumerate(shares_of(plan, 8, 8, text_of(plan))):
        token_flops, attention_flops = counted_flops(replayer, share)
        of_tokens = 2 * 24 * WIDTH**2 + 96 * 16 * WIDTH
        assert token_flops == of_tokens * plan.tokens_after[rank]
        assert attention_flops == pytest.approx(
            3 * (plan.workload_after[rank] - 24 * WIDTH**2 * plan.tokens_after[rank])
        )


@pytest.mark.usefixtures("flop_clock")
def test_seconds_add_up_over_pieces_and_ranks_without_work_take_none() -> None:
    replayer = Replayer(CONFIG, CPU, torch.float32, True)
    plan = plan_home(kf.plan([[600, 600], [20], []], "g1n3", d_model=WIDTH))
    shares = shares_of(plan, 8, 8, [0, 0, 0])
    calls = []
    pieces = replayer.pieces_of(shares)
    seconds = replayer.run(pieces, 3, 2, 1, lambda: calls.append(1))
    assert len(calls) == 3 * len(pieces) == 3 * 4
    assert seconds[2] == RankSeconds()
    for rank in (0, 1):
        token_flops, attention_flops = counted_flops(replayer, shares[rank])
        expected = RankSeconds(3 * token_flops / 1e9, 3 * attention_flops / 1e9)  # of three blocks
        assert seconds[rank] == pytest.approx(expected)
    assert sum(seconds[0]) > sum(seconds[1]) > 0


DATA = "g1b2i256f1s0,g1b1i512f1s0,g2b1i128f1s0"
REPLAY = ["replay", "--data", DATA, "--model", "flux-tiny", "--max-text-tokens", "30"]


@pytest.mark.usefixtures("flop_clock")
def test_a_mix_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    more = ["--topology", "g4n1", "--topology", "g2n2", "--steps", "2", "--repeats", "1", "--peak-tflops", "0.1"]
    assert main([*REPLAY, *more, "--solver", "greedy", "--gamma", "0.5", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    check_tables(shown)
    result = json.loads(out.read_text())
    none, four, two = result["variants"]
    assert [v["topology"] for v in result["variants"]] == [None, "g4n1", "g2n2"]
    mix = kf.DataMix.parse(DATA, max_text_tokens=30)
    lengths = [mix.draw_lengths(0, step, 4) for step in (0, 1)]
    plans = [kf.plan(lens, "g4n1", d_model=64, gamma=0.5, solver="greedy") for lens in lengths]
    assert four["work_per_rank"] == [plan.workload_after for plan in plans]
    assert none["wir"] == pytest.approx(statistics.fmean(plan.wir_before for plan in plans))
    tokens = statistics.fmean(plan.num_tokens for plan in plans)
    assert four["tokens_per_s"] == pytest.approx(tokens / four["fbl_s"]) and 0 < four["hfu"] < 1
    # The longest rank has twenty times the work of the shortest.
    assert none["correlation"] > 0.99 and none["measured_wir"] > 2 > four["measured_wir"]
    assert none["exchange_s"] == none["route_s"] == 0 < min(four["exchange_s"], four["route_s"], two["route_s"])
    for variant in result["variants"]:
        for step_s, ranks in zip(variant["fbl_per_step_s"], variant["seconds_per_rank"], strict=True):
            assert step_s >= max(sum(rank) for rank in ranks) > 0
    assert result["cluster"]["model"]["num_blocks"] == 4 and result["cluster"]["cluster"]["fixed_s"] == 0
    assert "g4n1" in shown and "none" in shown and "HFU" in shown


@pytest.mark.usefixtures("flop_clock")
def test_a_step_of_several_micro_batches_is_replayed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ["--topology", "g1n4", "--micro-batches", "2", "--repeats", "1", "--max-tokens-per-rank", "4000"]
    assert main([*REPLAY, *more, "--gamma", "0.5", "--json", str(out)]) == 0
    none, alone, whole = json.loads(out.read_text())["variants"]
    assert [of["name"] for of in (none, alone, whole)] == [None, "g1n4", "step planned, g1n4"]
    mix = kf.DataMix.parse(DATA, max_text_tokens=30)
    samples = [[mix.draw(0, k, rank) for rank in range(4)] for k in range(2)]
    step = [[s.num_tokens for of in samples for s in of[rank]] for rank in range(4)]
    model = TrainedModel(num_blocks=4, routed=False, num_heads=4, num_kv_heads=4, element_size=4)
    hardware = Cluster(fixed_s=0.0, host_s_per_piece=0.0)
    planned = kf.plan(
        step, "g1n4", d_model=64, gamma=0.5, micro_batches=2, max_tokens_per_rank=4000, model=model, cluster=hardware
    )
    assert whole["work_per_rank"] == [plan.workload_after for plan in planned.plans]
    assert whole["exchanged_bytes"] == 0 < alone["exchanged_bytes"] and none["fsdp_bytes"] == whole["fsdp_bytes"] > 0
    # All of its tokens were computed, and no rank waits much.
    seconds = [sum(sum(rank) for ranks in of["seconds_per_rank"] for rank in ranks) for of in (none, whole)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01) and whole["fbl_s"] < 0.8 * none["fbl_s"]
    longest = sum(max(sum(rank) for rank in ranks) for ranks in whole["seconds_per_rank"])
    assert whole["fbl_s"] == pytest.approx(longest, rel=0.01)


def test_wan_is_replayed_and_its_videos_alone_are_planned(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ["--model", "wan-tiny", "--topology", "g2n2", "--repeats", "1", "--json", str(out)]
    assert main([*REPLAY, *more, "--solver", "greedy", "--gamma", "0.5"]) == 0
    mix = kf.DataMix.parse(DATA, max_text_tokens=30)
    patches = [[sample.visual_tokens for sample in mix.draw(0, 0, rank)] for rank in range(4)]
    plan = kf.plan(patches, "g2n2", d_model=load_config("wan-tiny").d_model, gamma=0.5, solver="greedy")
    none, two = json.loads(out.read_text())["variants"]
    assert two["work_per_rank"] == [plan.workload_after] and none["work_per_rank"] == [plan.workload_before]
    assert min(two["token_s"], two["attention_s"], two["exchange_s"]) > 0
