"""`knapformer doctor`: what it simulates, what it advises, and what it says of it."""

import itertools
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from knapformer.adapters.named import build_model, load_config, random_batch
from knapformer.calibration import FixedCost
from knapformer.tools.baselines import static_sharing
from knapformer.tools.cli import _parser, main
from knapformer.tools.doctor.alternatives import alternatives, gain, ranked, sharing, simulate
from knapformer.tools.doctor.memory import MemoryModel
from knapformer.tools.draws import Source
from knapformer.tools.model_presets import PRESETS
from knapformer.tools.rank_lengths import micro_batches_of_step
from knapformer.tools.settings import settings_dict
from knapformer.tools.ways import DrawnSteps, OptimizerStep, PlanCost
from saved_bytes import saved_bytes

import knapformer as kf
from knapformer import Cluster, TrainedModel

D, GAMMA = 64, 0.5
CLUSTER = Cluster("h100", fixed_s=0, flops_per_s=1e9, node_latency_s=0, network_latency_s=0)
MODEL = TrainedModel(num_blocks=3, num_parameters=0, routed=False)


def block_s(length):
    """Of one block's forward pass; the formula typed anew."""
    return (24 * length * D**2 + GAMMA * 4 * length**2 * D) / 1e9


STEP = 3 * 4  # blocks; forward, recompute and a backward pass of two


PLANNING = PlanCost(d_model=D, gamma=GAMMA, cluster=CLUSTER, model=MODEL, effort="low")


def results_of(steps, micro_batches=1, limit=0):
    batches = [micro_batches_of_step(step, micro_batches) for step in steps]
    case = DrawnSteps(
        PLANNING, batches, [n for step in steps for lens in step for n in lens], max_tokens_per_rank=limit
    )
    return {a.key: simulate(a, case) for a in alternatives(case, sharing(ranked(case)))}


def compute_s(step: OptimizerStep):
    return step.figures["token_s"] + step.figures["attention_s"]


def diagnosis(capsys, *arguments):
    assert main(["doctor", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys, *arguments):
    assert main(["doctor", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


def by_key(found):
    return {row["key"]: row for row in found["alternatives"]}


def file_of(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_alternatives_cost_what_the_formula_says():
    steps = [[[100, 50], [300, 20]]]
    found = results_of(steps, micro_batches=2)

    (drawn,) = found["as_drawn"].steps
    drawn_s = drawn.figures["total_s"]
    assert drawn_s == pytest.approx(STEP * (block_s(300) + block_s(50)))
    assert drawn.figures["ideal_s"] == pytest.approx(STEP * sum(map(block_s, (100, 50, 300, 20))) / 2)
    assert [drawn.figures[name] for name in ("samples", "tokens", "max_tokens")] == [4, 470, 300]
    assert found["one_by_one"].mean("total_s") == pytest.approx(drawn_s)

    # Longest first finds nothing better in either micro-batch; over both, the three short ones fit beside the long one.
    assert found["longest_first"].mean("total_s") == pytest.approx(drawn_s)
    assert sum(map(block_s, (100, 50, 20))) < block_s(300)
    assert found["sampler"].mean("total_s") == pytest.approx(STEP * block_s(300))
    (shared,) = found["static_2"].steps
    assert compute_s(shared) == pytest.approx(drawn.figures["ideal_s"])
    assert shared.figures["attention_bytes"] > shared.figures["attention_bytes_between_nodes"] == 0
    assert shared.figures["max_tokens"] == 200


def test_static_sharing_does_not_balance_groups():
    (step,) = static_sharing(DrawnSteps(PLANNING, [[[[100], [100], [30], [10]]]]), 2)
    assert compute_s(step) == pytest.approx(STEP * 2 * block_s(100) / 2)


def test_buckets_pad_nothing_where_lengths_are_few_and_something_where_they_are_many():
    few = results_of([[[100], [40], [40], [40]]] * 4)["buckets"]
    assert few.waiting == pytest.approx(0, abs=1e-9)
    assert {step.figures["max_tokens"] for step in few.steps} == {40, 100}
    # Buckets come in proportion: a quarter is of the long ones.
    assert sum(step.figures["max_tokens"] == 100 for step in few.steps) == len(few.steps) / 4
    many = results_of([[[length] for length in range(100 + 50 * i, 500 + 50 * i, 100)] for i in range(30)])
    assert 0 < many["buckets"].waiting < 0.2


def test_a_time_budget_holds_at_least_the_longest_sample_and_keeps_to_memory():
    steps = [[[100], [40], [40], [40]]] * 10
    free = results_of(steps)["time_budget"]
    assert free.mean("samples") > 4
    assert max(map(compute_s, free.steps)) == pytest.approx(STEP * block_s(100))
    limited = results_of(steps, limit=100)["time_budget"]
    assert limited.max_tokens == 100


def test_a_gain_is_known_better_from_more_steps():
    rng = np.random.default_rng(0)
    errors = []
    for count in (8, 128):
        steps = [[[int(length)] for length in rng.integers(10, 500, 4)] for _ in range(count)]
        found = results_of(steps)
        errors.append(gain(found["static_4"], found["as_drawn"])[1])
    assert errors[1] < errors[0] / 2
    assert gain(found["as_drawn"], found["as_drawn"]) == (1.0, 0.0)


def test_memory_is_that_of_the_formula():
    model = TrainedModel(num_blocks=10, num_parameters=1e9, element_size=2, recomputes=True, shard_ranks=8)
    memory = MemoryModel.of(model, 1024, num_ranks=4)  # fewer ranks than would shard
    assert memory.fixed_bytes == pytest.approx(1e9 * 16 / 4 + 3 * 1e8 * 2)
    flux = TrainedModel(num_blocks=57, num_parameters=12e9, element_size=2, recomputes=True)
    assert MemoryModel.of(flux, 3072, 1).bytes_per_token == pytest.approx(
        505.5 * 1024, rel=0.01
    )  # measured: docs/gpu.md
    assert memory.gib(memory.tokens_within(20)) == pytest.approx(20, rel=1e-3)
    frozen = MemoryModel.of(model.replace(mode="lora"), 1024, 4)
    assert frozen.fixed_bytes == pytest.approx(1e9 * 2 / 4 + 3 * 1e8 * 2)


@pytest.mark.parametrize(("name", "cross_attends"), [("flux-demo", False), ("wan-demo", True)])
def test_blocks_that_are_not_computed_again_keep_what_is_predicted(name, cross_attends):
    config = load_config(name)
    model = build_model(config, torch.bfloat16)

    def kept_bytes(num_tokens):
        sizes = [config.possible(config.sample_of(num_tokens, 16))]
        batch, _ = random_batch(config, sizes, 0, torch.device("cpu"), torch.bfloat16)
        output, kept = saved_bytes(lambda: model(batch), model.parameters())
        assert output.requires_grad
        return kept

    trained = TrainedModel(num_blocks=config.depth, num_parameters=0, element_size=2, recomputes=False)
    predicted = MemoryModel.of(trained, config.d_model, 1, cross_attends)
    assert predicted.bytes_per_token == pytest.approx((kept_bytes(512) - kept_bytes(256)) / 256, rel=0.05)


def test_the_least_change_is_advised(capsys):
    """With several micro-batches the sampler does nearly what the balancer does; with one it can do nothing."""
    many = diagnosis(capsys, "--data", "mixed", "--micro-batches", 4, "--steps", 4)
    assert many["take"] == "sampler"
    assert "fewer GPU-hours" in many["verdict"]
    low, speed_up, high = many["speed_up"]
    assert low <= speed_up <= high
    sampler = by_key(many)["sampler"]
    assert sampler["gb_in_node_per_rank"] == 0 and sampler["speed_up"] == speed_up
    # All alternatives on the same samples compute the same work.
    same = [row for row in many["alternatives"] if not row["effect"]]
    for row in same:
        assert row["step_s"] * row["efficiency"] == pytest.approx(same[0]["step_s"] * same[0]["efficiency"])

    one = diagnosis(capsys, "--data", "mixed", "--steps", 4)
    assert one["take"].startswith("bags ")


def test_what_is_faster_on_other_samples_is_not_advised(tmp_path, capsys):
    """One long sample among 64 holds up a step, however it is shared; with a time budget others take more samples."""
    path = file_of(tmp_path / "lengths.txt", "60000\n" + "300\n" * 63)
    found = diagnosis(capsys, path, "--ranks", 64, "--steps", 20)
    speed = {row["key"]: row["speed_up"] for row in found["alternatives"] if "speed_up" in row}
    assert found["take"].startswith("bags ") and speed["time_budget"] > 1.03 * speed[found["take"]]


def test_what_does_not_fit_is_not_advised(capsys):
    arguments = ["--data", "joint", "--micro-batches", 4, "--steps", 3]
    limit = 0.85 * by_key(diagnosis(capsys, *arguments))["as_drawn"]["max_gib"]
    tight = diagnosis(capsys, *arguments, "--memory-gib", limit)
    assert "tokens on a rank, expected at most" in by_key(tight)["as_drawn"]["problem"] and tight["take"].startswith(
        "bags "
    )
    assert "no balancing does not fit" in tight["verdict"]
    assert by_key(tight)[tight["take"]]["max_gib"] <= limit


def test_topologies_are_ranked_as_by_the_function():
    sample = [kf.DataMix.parse("joint").draw_lengths(0, step, 32) for step in range(2)]
    # FLUX's 24 heads; no fixed time of the published cluster.
    asked = {"max_tokens_per_rank": 20000, "cluster": Cluster("h100", fixed_s=0)}
    model = TrainedModel(num_heads=24, cuts_queries=True)
    ranking = kf.rank_topologies(sample, d_model=3072, model=model, **asked)
    planning = PlanCost(d_model=3072, gamma=0.41, cluster=asked["cluster"], model=model)
    of_doctor = ranked(DrawnSteps(planning, [[lengths] for lengths in sample], max_tokens_per_rank=20000))
    assert [str(option) for option in of_doctor] == [str(option) for option in ranking]
    times = [option.predicted_time for option in ranking]
    assert times[-1] == math.inf  # one rank cannot hold the longest sequence; 0.1 % is a tie
    assert all(better <= worse * 1.001 for better, worse in itertools.pairwise(times[:-1]))
    assert ranking[-1].topology == "g1n32"
    (g16,) = (option for option in ranking if option.topology == "g16n2")
    assert g16.over_ideal > 1.2  # of 24 heads some ranks have two
    best = kf.plan(sample[0], ranking[0].topology, d_model=3072).predicted_time
    flat = min(
        kf.plan(sample[0], t, d_model=3072, solver="greedy").predicted_time for t in ("g1n32", "g2n16", "g4n8", "g8n4")
    )
    assert best < flat


def test_the_json_is_the_same_in_a_file_and_printed(capsys, tmp_path):
    arguments, path = ["doctor", "--data", "joint", "--ranks", "32", "--steps", "2"], tmp_path / "diagnosis.json"
    assert main([*arguments, "--json", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def alternating(num_batches):
    """Ranks take turns with one long sample, and with many short ones of nearly the same work."""
    return [[[16384] if (rank + i) % 2 == 0 else [1024] * 21 for rank in range(4)] for i in range(num_batches)]


def test_batches_of_equal_work_are_not_worth_it_however_many_make_a_step(tmp_path, capsys):
    path = file_of(tmp_path / "alternating.json", alternating(24))
    one, two, three = (diagnosis(capsys, path, "--micro-batches", count) for count in (1, 2, 3))
    assert [found["take"] for found in (one, two, three)] == [None] * 3
    for key in ("as_drawn", "longest_first", "static_2", "static_4"):
        for count, found in ((2, two), (3, three)):
            assert by_key(found)[key]["step_s"] == pytest.approx(count * by_key(one)[key]["step_s"], rel=1e-6), key
    # What is planned whole is planned for all samples of the step.
    assert by_key(two)["sampler"]["step_s"] <= by_key(two)["as_drawn"]["step_s"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("content", "arguments", "size"),
    [
        ([[[100] * 3, [100] * 4], [[100] * 4, [100] * 5]], [], 4),  # recorded batches
        ([100] * 9, ["--ranks", 2, "--steps", 2], 1),
        ([100] * 9, ["--ranks", 2, "--steps", 2, "--batch-size", 3], 3),
        (None, ["--data", "g1b3i256f1s0,g1b4i256f1s0", "--steps", 2], 3.5),
    ],
)
def test_the_batch_size_is_that_of_the_data(tmp_path, capsys, content, arguments, size):
    source = [] if content is None else [file_of(tmp_path / "data.json", content)]
    found = diagnosis(capsys, *source, "--mode", "lora", *arguments)
    buckets, drawn = (by_key(found)[key] for key in ("buckets", "as_drawn"))
    assert found["batch_size"] == size
    assert buckets["samples_per_s"] * buckets["step_s"] == pytest.approx(2 * round(size))
    assert drawn["samples_per_s"] * drawn["step_s"] == pytest.approx(2 * size)


def calibration(path, **fields):
    measured = kf.Calibration(
        gamma=0.5, seconds_per_flop=1e-14, d_model=3072, recomputes=True, relative_rms_error=0,
        relative_rms_error_without_gamma=0, noise=0, **fields,
    )  # fmt: skip
    return file_of(path, measured.to_dict())


LOW = ["--data", "low", "--steps", 2]


def test_the_model_of_a_cluster_file_stands_over_the_named_model(tmp_path, capsys):
    """And options over both, also where the file's value is the default of a model without a name."""
    stated = {"num_blocks": TrainedModel().num_blocks, "num_parameters": 1.3e9, "mode": "lora"}
    path = file_of(tmp_path / "own.json", {"model": stated})
    found = diagnosis(capsys, *LOW, "--cluster", path, "--model", "wan-1.3b")["model"]
    assert found == found | stated
    assert found["num_heads"] == 12  # wan-1.3b's: the file says nothing of heads
    found = diagnosis(capsys, *LOW, "--cluster", path, "--mode", "training")["model"]
    assert found == found | stated | {"mode": "training"}
    cluster, model = Cluster("a100"), TrainedModel(num_blocks=9, num_parameters=2e9, num_heads=4, element_size=4)
    path = file_of(tmp_path / "all.json", settings_dict(replace(PLANNING, cluster=cluster, model=model)))
    found = diagnosis(capsys, *LOW, "--cluster", path)["model"]
    assert {**found, "routed": None} == {**model.to_dict(), "routed": None}


def test_a_fixed_time_counts_only_where_the_users_own_file_states_it(tmp_path, capsys):
    silent = file_of(tmp_path / "silent.json", {"cluster": {"flops_per_s": 2e14}})
    stating = file_of(tmp_path / "stating.json", {"cluster": {"flops_per_s": 2e14, "fixed_s": 0.25}})
    calibrated = calibration(tmp_path / "calibration.json", fixed=FixedCost(2, 0.125))
    alone = diagnosis(capsys, *LOW, "--cluster", silent)
    assert alone["cluster"]["fixed_s"] == 0
    with_fixed = diagnosis(capsys, *LOW, "--cluster", stating)
    assert with_fixed["cluster"]["fixed_s"] == 0.25
    steps = [by_key(found)["as_drawn"]["step_s"] for found in (alone, with_fixed)]
    assert steps[1] - steps[0] == pytest.approx(0.25)
    found = diagnosis(capsys, *LOW, "--cluster", silent, "--calibration", calibrated)
    assert found["cluster"]["fixed_s"] == 0.125


def test_steps_are_those_that_were_simulated(tmp_path, capsys):
    path = file_of(tmp_path / "drawn.json", alternating(5))
    assert diagnosis(capsys, path, "--micro-batches", 2)["steps"] == 2
    assert diagnosis(capsys, path)["steps"] == 5
    assert diagnosis(capsys, path, "--steps", 3)["steps"] == 3
    assert diagnosis(capsys, "--data", "low", "--steps", 2)["steps"] == 2


def test_one_step_gives_no_range_and_the_verdict_says_why(tmp_path, capsys):
    path = file_of(tmp_path / "one.json", [[[60000], [3000, 2000]]])
    found = diagnosis(capsys, path, "--mode", "lora")
    low, speed_up, high = found["speed_up"]
    assert (low, high) == (None, None) and speed_up > 1.03
    few = "One step is too few to say how sure that is."
    assert found["verdict"].startswith("Take ") and found["verdict"].endswith(few) and " to " not in found[
        "verdict"].removesuffix(few)  # fmt: skip
    equal = diagnosis(capsys, file_of(tmp_path / "equal.json", [[[3000], [3000]]]), "--mode", "lora")
    assert equal["verdict"].startswith("Not worth it") and equal["verdict"].endswith(few)
    two = diagnosis(capsys, file_of(tmp_path / "two.json", [[[60000], [3000, 2000]]] * 2), "--mode", "lora")
    assert few not in two["verdict"] and two["speed_up"][0] <= speed_up <= two["speed_up"][2]


def test_a_limit_of_tokens_is_kept(tmp_path, capsys):
    path = file_of(tmp_path / "l.csv", "length\n40\n7\n64\n")
    arguments = [path, "--ranks", 8, "--steps", 2, "--cluster", "cpu"]
    text = printed(capsys, *arguments, "--max-tokens-per-rank", 3)
    assert text.startswith("No alternative fits: max_tokens_per_rank: got 3, expected at ")
    assert "no balancing does not fit: 64 tokens on a rank, expected at most 3." in text
    assert "at most 3 tokens on a rank" in text
    text = printed(capsys, *arguments, "--max-tokens-per-rank", 40)
    assert text.startswith("Take ")
    assert "no balancing does not fit (64 tokens on a rank, expected at most 40)." in text.partition("┏")[0]


@pytest.mark.parametrize(("bad", "status"), [(1, 0), (2, 3)])
def test_rows_left_out_come_first_and_in_the_exit_status_if_they_are_many(tmp_path, capsys, bad, status):
    path = file_of(tmp_path / "l.csv", "length\n" + "4096\n" * (20 - bad) + "x\n" * bad + "4096\n")
    arguments = ["doctor", str(path), "--ranks", "8", "--steps", "2", "--mode", "lora"]
    assert main(arguments) == status
    said = (
        f"{bad} of 21 rows ({bad / 21:.1%}) cannot be read, the first of them row {21 - bad}: length: got 'x', expected"
    )
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and text.startswith(f"Caution: {said}" if status else "Not worth it for flux on 8 ranks")
    assert main([*arguments, "--json", "-"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("Caution: " if status else "Not worth it")
    assert (found["rows"], found["bad_rows"], found["model_name"]) == (21, bad, "flux")


def test_the_verdict_speaks_to_somebody_who_has_read_nothing_else(tmp_path, capsys):
    text = printed(capsys, "--data", "mixed", "--steps", 3)
    advice = "Take the balancer in the model, with long samples shared by up to 4 ranks: training flux on 32 ranks is"
    assert text.startswith(f"{advice} then 2.")
    assert "With 24 heads, 4 ranks share a sequence by 4 parts of its heads, 2 ranks" in text
    weighed = "losses weighed with knapformer.losses"
    cost = "d_model=3072, gamma=0.41, mask='full', max_tokens_per_rank=144045"
    code = f'balancer = knapformer.SequenceBalancer("g4/2/1n8", {cost})'
    assert f"What to change: calls in the model, and {weighed}. {code} knapformer.balance(transformer, " in text
    assert "bags" not in text and text.count("g4/") == 1
    assert "57 blocks, 1.2e+10 parameters, 24 heads; training;" in text
    assert "Model: flux, the default of --model, of width 3072, mask full." in text
    clips = file_of(tmp_path / "clips.csv", "width,height,frames\n" + "832,480,81\n512,512,17\n" * 9)
    text = printed(capsys, clips, "--ranks", 8, "--micro-batches", 8, "--model", "wan-1.3b", "--steps", 3)
    code = "sampler = knapformer.BalancedBatchSampler(lengths, batch_size=1, micro_batches=8, d_model=1536"
    assert f"model = knapformer.balance(transformer) # diffusers' WanTransformer3DModel {code}" in text
    assert f"What to change: the loader's batch sampler, and {weighed}." in text
    text = printed(capsys, clips, "--ranks", 8, "--model", "hunyuan-video", "--steps", 9, "--memory-gib", 200)
    assert "knapformer.balance(transformer, balancer) # diffusers' HunyuanVideoTransformer3DModel" in text
    text = printed(capsys, clips, "--ranks", 8, "--model", "ltx-video", "--steps", 9, "--memory-gib", 200)
    assert "x = model(x) # in each block o = balancer.attention(q, k, v)" in text
    assert main(["doctor", str(clips), "--ranks", "8"]) == 2
    assert (
        "a model of pictures, for a sample of 81 frames, expected a model of videos: hunyuan" in capsys.readouterr().err
    )


def test_all_that_trains_on_the_same_samples_may_be_advised(tmp_path, capsys):
    path = file_of(tmp_path / "drawn.json", [[[30000], *[[]] * 7]] * 3)  # 4 heads among 8 ranks: queries are cut, too
    cluster = file_of(tmp_path / "cluster.json", {"model": {"num_heads": 4, "num_kv_heads": 4}})
    found = diagnosis(capsys, path, "--mode", "lora", "--cluster", cluster)
    rows = by_key(found)
    same = [row["efficiency"] for row in found["alternatives"] if not row["effect"]]
    assert max(same) > 1.03 * max(rows[key]["efficiency"] for key in ("static_2", "static_4", "static_8", "sampler"))
    assert rows[found["take"]]["efficiency"] >= max(same) / 1.03 and found["take"].endswith("ring_8")


def test_what_the_steps_leave_open_is_not_called_worthless(tmp_path, capsys):
    path = file_of(tmp_path / "drawn.json", [[[60000], [60000]]] * 2 + [[[60000], [3000]]])
    found = diagnosis(capsys, path, "--mode", "lora")
    assert found["take"] is None and found["verdict"].startswith("Not known for flux on 2 ranks: ")
    assert "give or take" in found["verdict"] and "over 3 steps; more would tell (--steps, or" in found["verdict"]


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 20), (64, 8), (1024, 2)])
def test_the_work_is_bounded(tmp_path, batch_size, num_steps):
    path = file_of(tmp_path / "l.csv", "length\n40\n7\n64\n")
    given = ["doctor", str(path), "--batch-size", str(batch_size), "--micro-batches", "4", "--ranks", "128"]
    source = Source(_parser().parse_args(given), 128, PRESETS["flux"])
    assert len(source.batches(4)) == num_steps


def test_progress_is_shown_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert (
        main(["doctor", str(file_of(tmp_path / "l.csv", "length\n4096\n512\n")), "--ranks", "8", "--steps", "2"]) == 0
    )
    assert "simulating" in capsys.readouterr().err
