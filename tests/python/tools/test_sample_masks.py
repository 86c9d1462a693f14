"""Masks of samples in files of lengths: what is read, and that predictions and advice go by their pairs, which dense
masks count (tests/python/masks.py)."""

import json
import re

import pytest
from knapformer.tools.cli import main
from knapformer.tools.doctor.alternatives import alternatives, ranked, sharing, simulate
from knapformer.tools.lengths_files import lengths_of, read_samples
from knapformer.tools.rank_lengths import MaskedLength
from knapformer.tools.ways import DrawnSteps, PlanCost
from masks import dense_mask

import knapformer as kf
from knapformer import ArgumentError, Cluster, TrainedModel

D, GAMMA, STEP = 64, 0.5, 3 * 4  # blocks; forward, recompute and a backward pass of two


def pairs_of(mask, length):
    return int(dense_mask(mask, length).sum())


def step_s(mask, length):
    return STEP * (24 * length * D**2 + GAMMA * 4 * pairs_of(mask, length) * D) / 1e9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "num_tokens,mask\n40,causal\n40,\n8,c3 f5\n"),
        ("a.jsonl", '{"len": 40, "mask": "causal"}\n{"len": 40}\n{"mask": "c3 f5", "len": 8}\n'),
        ("a.json", '[[[{"length": 40, "mask": "causal"}, 40], [{"length": 8, "mask": "c3 f5"}]]]'),
    ],
)
def test_masks_are_read_beside_lengths(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    samples = read_samples(str(path), None)
    assert [(int(n), getattr(n, "mask", None)) for n in samples.lengths] == [(40, "causal"), (40, None), (8, "c3 f5")]
    assert samples.bad_rows == 0 and len(set(samples.lengths)) == 3 and 40 in samples.lengths
    with pytest.raises(ArgumentError, match="got masks of samples, expected lengths alone: the model that is run"):
        lengths_of(str(path))


def test_masks_that_do_not_fit_are_rows_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"tokens": 40, "about": about} for about in ("causal", "c3 f5", "a/b.png", 7)]
    path.write_text("\n".join(map(json.dumps, rows)))
    samples = read_samples(str(path), None, {"length": "tokens", "mask": "about"})
    assert (len(samples.lengths), samples.bad_rows) == (1, 3)
    assert samples.first_bad == "row 2: mask: got 'c3 f5' for a sequence of 40 tokens, expected one of 8 tokens"
    assert "mask from 'about'" in samples.read_as
    assert read_samples(str(path), None).bad_rows == 0  # no column of that name


def test_alternatives_take_the_time_of_the_pairs():
    cluster = Cluster("h100", fixed_s=0, flops_per_s=1e9, node_latency_s=0, network_latency_s=0)
    model = TrainedModel(num_blocks=3, num_parameters=0, routed=False)
    planning = PlanCost(d_model=D, gamma=GAMMA, cluster=cluster, model=model, effort="low", mask="causal")
    drawn = [[("full", 1200)], [("c400 f800@", 1200)], [(None, 1200)], [("window:9:0", 1200)]]  # None: the cost's
    lens = [[n if mask is None else MaskedLength(n, mask) for mask, n in of_rank] for of_rank in drawn]
    case = DrawnSteps(planning, [[lens]] * 20, [n for of_rank in lens for n in of_rank])
    found = {of.key: simulate(of, case) for of in alternatives(case, sharing(ranked(case)))}
    seconds = [step_s(mask or "causal", n) for [(mask, n)] in drawn]
    ideal = sum(seconds) / 4
    for key in ("as_drawn", "longest_first", "sampler"):
        assert found[key].mean("total_s") == pytest.approx(max(seconds))
        assert found[key].work_s == pytest.approx(ideal)
    assert found["static_4"].mean("ideal_s") == pytest.approx(ideal)
    # Of one length, so nothing is padded; budgets are filled by the pairs.
    assert found["buckets"].work_s == pytest.approx(found["buckets"].mean("ideal_s"))
    assert max(step.figures["total_s"] for step in found["time_budget"].steps) <= max(seconds) * (1 + 1e-9)
    assert found["time_budget"].mean("samples") > 4


def test_buckets_pad_written_masks_to_their_share_of_pairs():
    planning = PlanCost(d_model=D, gamma=GAMMA, cluster=Cluster("h100"), model=TrainedModel())
    pool = [MaskedLength(n, f"c{n // 2} f{n - n // 2}") for n in range(100, 200)]
    case = DrawnSteps(planning, [[[[pool[0]], [pool[-1]]]]] * 4, pool)
    buckets = next(of for of in alternatives(case, []) if of.key == "buckets")
    assert 0 < simulate(buckets, case).waiting < 0.1


def test_doctor_advises_by_a_column_of_masks(capsys, tmp_path):
    path = tmp_path / "a.csv"
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"model": {"num_parameters": 0}}')
    masks = ["full", "window:64:0", "window:64:0", "window:64:0", ""]
    path.write_text("num_tokens,mask\n" + "".join(f"1200,{mask}\n" for mask in masks))
    options = ["--ranks", "4", "--batch-size", "2", "--micro-batches", "4", "--d-model", "64", "--mask", "causal",
               "--gamma", "400", "--cluster", str(cluster), "--memory-gib", "76"]  # fmt: skip
    assert main(["doctor", str(path), *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "mask from 'mask'" in text and "of width 64, mask causal, where samples have none." in text
    assert re.search(r"BalancedBatchSampler\(lengths, [^)]*, gamma=400, [^)]*, masks=masks\) for samples in", text)
    assert main(["doctor", str(path), *options, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["take"], found["mask"]) == ("sampler", "causal")
    path.write_text("num_tokens\n" + "1200\n" * 5)  # equally long: without masks there is nothing to balance
    assert main(["doctor", str(path), *options, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["take"] is None
    path.write_text("num_tokens\n600\n1200\n")
    assert main(["doctor", str(path), *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"BalancedBatchSampler\(lengths, [^)]*, mask='causal', [^)]*\d\) for samples in", text), text


def test_plan_and_replay_take_masks_of_a_step(capsys, tmp_path):
    path = tmp_path / "steps.json"
    path.write_text('[[[{"length": 90, "mask": "c30 f60"}, 40], [{"length": 40, "mask": "full"}]]]')
    options = ["--topology", "g2n1", "--d-model", "64", "--mask", "causal", "--json", "-"]
    assert main(["plan", "--lengths", str(path), *options]) == 0
    plan = kf.Plan.from_json(capsys.readouterr().out)
    assert plan.masks == ["c30 f60", "causal", "full"]
    work = [24.0 * n * D**2 + plan.workload.gamma * 4 * pairs_of(of, n) * D
            for of, n in zip(plan.masks, (90, 40, 40), strict=True)]  # fmt: skip
    assert plan.sequence_works == pytest.approx(work)
    out = tmp_path / "out.json"
    replay = ["replay", "--model", "flux-tiny", "--topology", "g2n1", "--repeats", "1"]
    assert main([*replay, "--lengths", str(path), "--json", str(out)]) == 0
    none, shared = json.loads(out.read_text())["variants"]
    work = [[24.0 * n * 64**2 + 0.41 * 4 * pairs_of(of, n) * 64 for n, of in zip(*lens, strict=True)]
            for lens in (((90, 40), ("c30 f60", "full")), ((40,), ("full",)))]  # fmt: skip
    assert none["work_per_rank"] == [pytest.approx(list(map(sum, work)))]
    assert sum(shared["work_per_rank"][0]) == pytest.approx(sum(map(sum, work)))
