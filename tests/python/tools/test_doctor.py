"""`knapformer doctor`: what it reads, what it simulates, and what it advises."""

import io
import itertools
import json

import numpy as np
import pytest
from knapformer.tools.cli import main
from knapformer.tools.doctor.alternatives import Case, alternatives, gain, ranked, sharing, simulate, static_sharing
from knapformer.tools.doctor.memory import GIB, MemoryModel
from knapformer.tools.presets import PRESETS
from knapformer.tools.sample_files import read_samples
from knapformer.tools.ways import Planning, Step, micro_batches_of_step

import knapformer as kf
from knapformer import Cluster, TrainedModel

D, GAMMA = 64, 0.5
CLUSTER = Cluster("h100", fixed_s=0, flops_per_s=1e9, node_latency_s=0, network_latency_s=0)
MODEL = TrainedModel(num_blocks=3, num_parameters=0, routed=False)


def block_s(length):
    """Of one block's forward pass; the formula typed anew."""
    return (24 * length * D**2 + GAMMA * 4 * length**2 * D) / 1e9


STEP = 3 * 4  # blocks; forward, recompute and a backward pass of two


PLANNING = Planning(D, GAMMA, CLUSTER, MODEL, effort="low")


def results_of(steps, micro_batches=1, max_tokens=0):
    batches = [micro_batches_of_step(step, micro_batches) for step in steps]
    case = Case(PLANNING, batches, [n for step in steps for lens in step for n in lens], max_tokens=max_tokens)
    return {a.key: simulate(a, case) for a in alternatives(case, sharing(ranked(case)))}


def compute_s(step: Step):
    return step.figures["token_s"] + step.figures["attention_s"]


def test_alternatives_cost_what_the_formula_says():
    steps = [[[100, 50], [300, 20]]]
    found = results_of(steps, micro_batches=2)

    (drawn,) = found["as_drawn"].steps
    drawn_s = drawn.figures["total_s"]
    assert drawn_s == pytest.approx(STEP * (block_s(300) + block_s(50)))
    assert drawn.figures["ideal_s"] == pytest.approx(STEP * sum(map(block_s, (100, 50, 300, 20))) / 2)
    assert [drawn.figures[name] for name in ("samples", "tokens", "max_tokens_per_rank")] == [4, 470, 300]
    assert found["one_by_one"].mean("total_s") == pytest.approx(drawn_s)

    # Longest first finds nothing better in either micro-batch; over both, the three short ones fit beside the long one.
    assert found["longest_first"].mean("total_s") == pytest.approx(drawn_s)
    assert sum(map(block_s, (100, 50, 20))) < block_s(300)
    assert found["sampler"].mean("total_s") == pytest.approx(STEP * block_s(300))
    (shared,) = found["static_2"].steps
    assert compute_s(shared) == pytest.approx(drawn.figures["ideal_s"])
    assert shared.figures["attention_bytes"] > shared.figures["attention_bytes_between_nodes"] == 0
    assert shared.figures["max_tokens_per_rank"] == 200


def test_static_sharing_does_not_balance_groups():
    (step,) = static_sharing(2)(Case(PLANNING, [[[[100], [100], [30], [10]]]]))
    assert compute_s(step) == pytest.approx(STEP * 2 * block_s(100) / 2)


def test_buckets_pad_nothing_where_lengths_are_few_and_something_where_they_are_many():
    few = results_of([[[100], [40], [40], [40]]] * 4)["buckets"]
    assert few.waiting == pytest.approx(0, abs=1e-9)
    assert {step.figures["max_tokens_per_rank"] for step in few.steps} == {40, 100}
    # Buckets come in proportion: a quarter is of the long ones.
    assert sum(step.figures["max_tokens_per_rank"] == 100 for step in few.steps) == len(few.steps) / 4
    many = results_of([[[length] for length in range(100 + 50 * i, 500 + 50 * i, 100)] for i in range(30)])
    assert 0 < many["buckets"].waiting < 0.2


def test_a_time_budget_holds_at_least_the_longest_sample_and_keeps_to_memory():
    steps = [[[100], [40], [40], [40]]] * 10
    free = results_of(steps)["time_budget"]
    assert free.mean("samples") > 4
    assert max(map(compute_s, free.steps)) == pytest.approx(STEP * block_s(100))
    limited = results_of(steps, max_tokens=100)["time_budget"]
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
    assert memory.gib(memory.max_tokens(20)) == pytest.approx(20, rel=1e-3)
    kept = MemoryModel.of(model.replace(recomputes=False), 1024, 4)
    assert kept.bytes_per_token == pytest.approx(10 * 32 * 1024)
    frozen = MemoryModel.of(model.replace(mode="lora"), 1024, 4)
    assert frozen.fixed_bytes == pytest.approx(1e9 * 2 / 4 + 3 * 1e8 * 2)
    measured = memory.measured(tokens=1000, gib=30)
    assert measured.gib(1000) == pytest.approx(30)
    assert measured.fixed_bytes < 30 * GIB


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [  # counted by hand: latents over patches, and captions where they are in the sequence
        ("flux", (1024, 1024, 1, 512), 64 * 64 + 512),
        ("flux", (1000, 520, 1, 0), 62 * 32),
        ("wan-14b", (1280, 720, 81, 512), 80 * 45 * 21),
        ("hunyuan-video", (1280, 720, 129, 256), 80 * 45 * 33 + 256),
        ("ltx-video", (768, 512, 121, 128), 24 * 16 * 16),
    ],
)
def test_sizes_become_tokens(model, size, tokens):
    assert PRESETS[model].num_tokens(*size) == tokens


def write_all_formats(folder):
    import pyarrow
    from pyarrow import parquet

    lengths = [5, 70, 900, 12]
    texts = {
        "plain.txt": "5\n70\n\n900\n12\n",
        "list.json": "[5, 70, 900, 12]",
        "objects.json": json.dumps([{"id": "a", "num_tokens": n} for n in lengths]),
        "lines.jsonl": "".join(json.dumps({"num_tokens": n, "caption": "x"}) + "\n" for n in lengths),
        "table.csv": "caption,num_tokens\n" + "".join(f'"a, ""b""",{n}\n' for n in lengths),
        "table.tsv": "num_tokens\tcaption\n" + "".join(f"{n}\ta, b\n" for n in lengths),
        "bare.csv": "5\n70\n900\n12\n",
        "steps.json": "[[[5], [70]], [[900, 12], []]]",
        "steps.jsonl": "[[5], [70]]\n[[900, 12], []]\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    np.save(folder / "array.npy", np.array(lengths, dtype=np.int32))
    table = pyarrow.table({"caption": ["x"] * 4, "num_tokens": pyarrow.array(lengths, pyarrow.int32())})
    parquet.write_table(table, folder / "table.parquet")
    return lengths


def test_every_format_is_read(tmp_path):
    lengths = write_all_formats(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 11
    for path in files:
        samples = read_samples(str(path), None)
        assert list(samples.lengths) == lengths, path.name
        assert samples.steps == ([[[5], [70]], [[900, 12], []]] if path.stem == "steps" else []), path.name


@pytest.mark.parametrize(("name", "heading"), [("a.csv", "num_tokens\r\n"), ("a.txt", ""), ("a.csv", "")])
def test_a_file_of_a_spreadsheet_loses_no_row(tmp_path, name, heading):
    """It begins with a byte order mark."""
    (tmp_path / name).write_bytes(f"\ufeff{heading}5\r\n70\r\n".encode())
    samples = read_samples(str(tmp_path / name), None)
    assert (list(samples.lengths), samples.bad_rows) == ([5, 70], 0)


@pytest.mark.parametrize("heading", ["num_tokens\r\n", ""])
def test_so_does_standard_input(monkeypatch, heading):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\ufeff{heading}5\r\n70\r\n", newline=""))
    samples = read_samples("-", None)
    assert (list(samples.lengths), samples.bad_rows) == ([5, 70], 0)


def test_bad_rows_are_counted_and_the_first_is_named(tmp_path):
    path = tmp_path / "sizes.csv"
    path.write_text("w,h,n_frames\n512,512,1\n512,x,1\n0,512,1\n512\n1024,512,1\n8,8,1\n")
    samples = read_samples(str(path), PRESETS["flux"])
    assert list(samples.lengths) == [1024, 2048]
    assert samples.bad_rows == 4
    assert samples.first_bad == "row 2: height: got 'x', expected an integer"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('7\n{"a": 1}\n-3\n2.5\ntrue\nnonsense\n9\n')
    samples = read_samples(str(lines), None)
    assert (list(samples.lengths), samples.bad_rows) == ([7, 9], 5)
    lines.write_text("7\n" + "[" * 100_000 + "\n9\n")  # nested deeper than the parser goes
    samples = read_samples(str(lines), None)
    assert (list(samples.lengths), samples.bad_rows) == ([7, 9], 1)


def test_a_quote_left_open_is_named(tmp_path):
    """It makes one field of the lines behind it."""
    path = tmp_path / "captions.csv"
    path.write_text("caption,num_tokens\na,5\n" + '"b,70\n' + "c,900\n" * 30_000)
    with pytest.raises(kf.ArgumentError, match=r"captions.csv: line [0-9]+: field larger than .* every quote"):
        read_samples(str(path), None)


@pytest.mark.parametrize("empty", [True, False])
def test_an_array_file_that_is_none_is_refused(tmp_path, empty):
    path = tmp_path / "a.npy"
    path.touch()
    if not empty:
        with path.open("wb") as file:
            np.savez(file, lengths=[5, 70])  # several arrays
    with pytest.raises(kf.ArgumentError, match=r"LENGTHS: .*a.npy: "):
        read_samples(str(path), None)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("a.csv", "a,b\n1,2\n", [], "columns: got 'a', 'b', expected a column of lengths in tokens"),
        ("a.csv", "a,b\n1,2\n", ["--columns", "length=c"], "--columns: got length='c', expected one of 'a', 'b'"),
        (
            "a.csv",
            "tokens\nx\n",
            [],
            "got no sample, expected at least one. 1 of 1 rows (100.0%) cannot be read, the first of them row 1: ",
        ),
        ("a.csv", "", [], "got no sample"),
        ("a.json", "{", [], "not readable as JSON"),
        ("a.json", "{}", [], "got dict, expected a list"),
        ("a.xls", "", [], "expected '-' or a file that ends in .json"),
        ("a.parquet", "no table", [], "a.parquet"),
        ("a.npy", "no array", [], "a.npy: got what is no array of numbers, expected a file of numpy.save"),
        ("a.txt", "5\n", ["--model", "gpt"], "--model: got 'gpt', expected one of flux"),
        (
            "a.txt",
            "5\n",
            ["--memory-gib", "1"],
            "does not fit in memory: parameters, gradients and optimizer of flux (the ",
        ),
        ("a.txt", "5\n", ["--measured-memory", "5:1"], "--measured-memory: got 1 GiB, expected more than"),
        ("a.txt", "5\n", ["--now", "static_8"], "--now: got static_8, expected an alternative that 4 ranks allow"),
        ("steps.json", "[[[5], [70]]]", [], "--ranks: got 4, expected 2"),
    ],
)
def test_wrong_input_ends_in_one_line(tmp_path, capsys, name, content, arguments, message):
    path = tmp_path / name
    path.write_text(content)
    assert main(["doctor", str(path), "--ranks", "4", "--shard-ranks", "4", "--mode", "lora", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def diagnosis(capsys, *arguments):
    assert main(["doctor", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_least_change_is_advised(capsys):
    """With several micro-batches the sampler does nearly what the balancer does; with one it can do nothing."""
    many = diagnosis(capsys, "--data", "mixed", "--micro-batches", 4, "--steps", 4)
    assert many["take"] == "sampler"
    assert "fewer GPU-hours" in many["verdict"]
    low, speedup, high = many["speedup"]
    assert low <= speedup <= high
    by_key = {row["key"]: row for row in many["alternatives"]}
    assert by_key["sampler"]["gb_in_node_per_rank"] == 0
    assert by_key["sampler"]["speedup"] == speedup
    # All alternatives on the same samples compute the same work.
    same = [row for row in many["alternatives"] if not row["effect"]]
    for row in same:
        assert row["step_s"] * row["efficiency"] == pytest.approx(same[0]["step_s"] * same[0]["efficiency"])

    one = diagnosis(capsys, "--data", "mixed", "--steps", 4)
    assert one["take"].startswith("bags ")


def test_what_is_faster_on_other_samples_is_said_and_not_advised(tmp_path, capsys):
    """One long sample among 64 holds up a step, however it is shared; in lockstep buckets it meets others like it."""
    path = tmp_path / "lengths.txt"
    path.write_text("60000\n" + "300\n" * 63)
    arguments = [path, "--ranks", 64, "--steps", 20]
    found = diagnosis(capsys, *arguments)
    speed = {row["key"]: row["speedup"] for row in found["alternatives"] if "speedup" in row}
    assert found["take"].startswith("bags ") and speed["buckets"] > 1.03 * speed[found["take"]]
    faster = found["faster_with_other_samples"]
    assert "buckets" in faster and faster == sorted(faster, key=lambda key: -speed[key])
    assert main(["doctor", *map(str, arguments)]) == 0
    shown = " ".join(capsys.readouterr().out.split()).partition("Faster, but a step then has other samples: ")[2]
    assert f"lockstep buckets {speed['buckets']:.2f} times" in shown[:80]
    assert diagnosis(capsys, "--data", "low", "--steps", 3)["faster_with_other_samples"] == []


def test_what_does_not_fit_is_not_advised(capsys):
    free = diagnosis(capsys, "--data", "joint", "--micro-batches", 4, "--steps", 3)
    by_key = {row["key"]: row for row in free["alternatives"]}
    needed = {key: row["max_gib"] for key, row in by_key.items()}
    limit = (needed["as_drawn"] + min(needed[key] for key in needed if key.startswith("bags "))) / 2
    tight = diagnosis(capsys, "--data", "joint", "--micro-batches", 4, "--steps", 3, "--memory-gib", limit)
    by_key = {row["key"]: row for row in tight["alternatives"]}
    assert "fit" in by_key["as_drawn"]["problem"]
    assert tight["take"].startswith("bags ")
    assert "no balancing does not fit in memory" in tight["verdict"]
    assert by_key[tight["take"]]["max_gib"] <= limit


def test_topologies_are_ranked_with_reasons(capsys, tmp_path):
    path = tmp_path / "diagnosis.json"
    arguments = ["doctor", "--data", "joint", "--ranks", "32", "--steps", "2", "--max-tokens-per-rank", "20000"]
    assert main([*arguments, "--topologies", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    ranking = json.loads(path.read_text())["topologies"]
    sample = [kf.DataMix.parse("joint").draw_lengths(0, step, 32) for step in range(2)]
    # FLUX's 24 heads; no fixed time of the published cluster.
    asked = kf.rank_topologies(
        sample, 3072, num_heads=24, max_tokens_per_rank=20000, cluster=Cluster("h100", fixed_s=0)
    )
    assert [option["topology"] for option in ranking] == [option.topology for option in asked]
    times = [option["predicted_time_s"] for option in ranking]
    assert times[-1] is None  # one rank cannot hold the longest sequence; 0.1 % is a tie
    assert all(better <= worse * 1.001 for better, worse in itertools.pairwise(times[:-1]))
    assert "20000" in ranking[-1]["reason"]
    assert ranking[-1]["topology"] == "g1n32"
    assert all(f"{option.topology}: {option.reason}." in out for option in asked)
    assert next(o for o in ranking if o["topology"] == "g16n2")["over_ideal"] > 0.3  # of 24 heads some ranks have two
    best = kf.plan(sample[0], ranking[0]["topology"], 3072).predicted_time
    flat = min(kf.plan(sample[0], t, 3072, solver="greedy").predicted_time for t in ("g1n32", "g2n16", "g4n8", "g8n4"))
    assert best < flat
    assert main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    assert main(arguments) == 0
    assert "Topologies of bags" not in capsys.readouterr().out


def test_masks_widths_and_speeds_are_those_of_the_plans(capsys):
    speeds = [2.0] + [1.0] * 31
    found = diagnosis(
        capsys, "--data", "mixed", "--steps", 2, "--mask", "causal", "--d-model", 1024, "--rank-speed",
        ",".join(map(str, speeds)), "--scale", 2, "--max-text-tokens", 10,
    )  # fmt: skip
    mix = kf.DataMix.parse("mixed", resolution_scale=2, max_text_tokens=10)
    seconds = []
    for step in range(2):
        plan = kf.plan(
            mix.draw_lengths(0, step, 32), "g1n32", 1024, masks="causal", rank_speed=speeds,
            cluster=Cluster("h100", fixed_s=0), model=TrainedModel(num_heads=24, routed=False),
        )  # fmt: skip
        seconds.append(kf.predict_step(kf.plan_home(plan)).total_s)
    drawn = next(row for row in found["alternatives"] if row["key"] == "as_drawn")
    assert drawn["step_s"] == pytest.approx(sum(seconds) / 2)
