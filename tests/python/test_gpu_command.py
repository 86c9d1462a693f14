"""`make gpu` on the CPU: the lines that a GPU runs, at tiny sizes; what it keeps, and says of wrong arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from knapformer import DataMix

FOLDER = Path(__file__).parents[2] / "bench/gpu"
PARTS = ("correctness", "calibrate", "packing", "launches", "replay", "steps")


def run_gpu(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), "--installed", "--device", "cpu", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parents[1])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all parts on two ranks."""
    out = tmp_path_factory.mktemp("gpu")
    done = run_gpu(out, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def of(part: str, results: Path) -> dict:
    return json.loads((results / f"{part}.json").read_text())


def test_every_part_runs(results: Path) -> None:
    summary = json.loads((results / "gpu.json").read_text())
    assert tuple(summary["parts"]) == PARTS
    assert summary["error"] == ""
    assert (results / "gpu.png").read_bytes().startswith(b"\x89PNG")
    page = (results / "gpu.html").read_text()
    assert all(f"{part}: goals" in page for part in PARTS)
    assert summary["device"] in page


def test_correctness_is_of_everything(results: Path) -> None:
    checks = of("correctness", results)["checks"]
    runs = {check["name"].rpartition(":")[0] for check in checks}
    ways = [f"{topology}, {dtype}{kept}" for topology in ("plain", "g1n1", "g2n1", "g2/1n1")
            for dtype in ("fp32", "bf16") for kept in ("", ", checkpointed")]  # fmt: skip
    expected = {f"{model}, {way}" for model in ("flux-tiny", "wan-tiny") for way in ways}
    expected |= {f"compiled attention, {t}, {dtype}" for t in ("g1n1", "g2/1n1") for dtype in ("fp32", "bf16")}
    assert runs == expected | {"wan-tiny, plain, bf16, compiled"}
    # A rounding of bfloat16 is 2^-9, one of float32 2^-24: neither dtype computes in the other, or in float64.
    for check in checks:
        low, high = (2**-9, 2**-5) if "bf16" in check["name"] else (2**-24, 2**-14)
        assert low / 4 < check["value"] < high, check


def test_rows_stand_beside_the_published_table(results: Path) -> None:
    rows = {(row["mix"], row["way"]): row for row in of("steps", results)["rows"]}
    # The paper's Table 1: mixed without a balancer 4.64 s, with g1n32 4.62 s, with g2n16 2.92 s.
    published = {
        way: rows["mixed", way]["published_s"] for way in ("none", "g1n2", "g2n1", "g2/1n1", "step planned whole")
    }
    assert published == {"none": 4.64, "g1n2": 4.62, "g2n1": 2.92, "g2/1n1": None, "step planned whole": None}
    replayed = {(row["mix"], row["way"]): row["published_s"] for row in of("replay", results)["rows"]}
    assert (replayed["low", "g1n2"], replayed["mixed", "g2n1"], replayed["joint", "none"]) == (2.95, 2.92, 8.05)
    variant = of("steps", results)["results"]["mixed"]["variants"][0]
    assert rows["mixed", "none"]["fbl_s"] == variant["fbl_s"] / 2  # two micro-batches
    assert rows["mixed", "none"]["tokens_per_rank_s"] == variant["tokens_per_s"] / 2  # two ranks


def test_what_has_finished_is_kept_and_wrong_results_show(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    out.mkdir()
    for part in PARTS:
        (out / f"{part}.json").write_bytes((results / f"{part}.json").read_bytes())
    wrong = of("correctness", results)
    wrong["checks"][0] |= {"value": 0.5, "passed": False}
    (out / "correctness.json").write_text(json.dumps(wrong))
    done = run_gpu(out, "--ranks", "2", "--part", "packing")
    assert "packing: kept from" in done.stdout
    assert (out / "packing.json").read_bytes() == (results / "packing.json").read_bytes()
    assert done.returncode == 1
    assert "FAIL   correctness" in done.stdout
    assert "<b>1</b><span>wrong results" in (out / "gpu.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "3"), "RANKS: got 3, expected a power of two"),
        (("--part", "steps"), "RANKS: got 1, expected 2 or more for the steps"),
        (("--ranks", "8"), "RANKS: got 8, expected at most 4: so many samples are there to compare"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_gpu(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_part_ends_in_time_and_is_resumed(results: Path, tmp_path: Path) -> None:
    """Without time each part does one thing. Run anew it does the rest, and nothing twice."""
    out = tmp_path / "cut"
    cut = run_gpu(out, "--part", "packing", "--seconds", "0")
    first = of("packing", out)
    assert first["done"] == ["route"] and list(first["bytes_per_s"]) == ["route"]
    assert first["left_out"] == ["reverse_route", "pre_attn", "post_attn"]
    assert f"LEFT   packing     pre_attn: not done; make gpu PART=packing DEVICE=cpu OUT={out} does it" in cut.stdout
    assert "packing: left out" in (out / "gpu.html").read_text()
    run_gpu(out, "--part", "packing")
    whole = of("packing", out)
    assert whole["left_out"] == [] and whole["done"] == ["route", *first["left_out"]]
    assert whole["bytes_per_s"]["route"] == first["bytes_per_s"]["route"]
    assert [check["name"] for check in whole["checks"]] == [
        f"{name}: bandwidth over the copy's" for name in whole["done"]
    ]


def check_of(thing: str) -> dict[str, Any]:
    return {"name": thing, "value": 1.0, "at_least": 0.5, "passed": True}


class MadeUpPart:
    """Two phases of two things each; where a thing is named in `stops`, the part ends there with that error, once."""

    def __init__(self, settings: ModuleType) -> None:
        self.settings, self.begun = settings, list[str]()
        self.stops: dict[str, BaseException] = {}

    def __call__(self, args: argparse.Namespace) -> dict[str, Any]:
        return self.settings.merged_results(self.phase(args, "one", "two"), self.phase(args, "three", "four"))

    def phase(self, args: argparse.Namespace, *things: str) -> dict[str, Any]:
        agenda, checks = self.settings.Agenda(args), []
        for thing in things:
            if not agenda.begins(thing):
                continue
            self.begun.append(thing)
            if (stop := self.stops.pop(thing, None)) is not None:
                raise stop
            checks.append(check_of(thing))
            agenda.keep({"checks": checks})
        return {"checks": checks, **agenda.result()}


@pytest.fixture
def made_up(modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A made-up part, and what runs it: with the commit of a run."""
    run = importlib.import_module("run")
    module, part = ModuleType("made_up"), MadeUpPart(modules)
    module.part = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(run.PARTS, "packing", "made_up.part")

    def finish(commit: str | None = "") -> bool:
        args = argparse.Namespace(
            out=tmp_path, again=False, device="cpu", seconds=None, build_s=0, device_name="d", ranks=1,
            environment={"time": "", "commit": commit},
        )  # fmt: skip
        part.begun.clear()
        return bool(run.finish("packing", args))

    return part, finish


def test_a_part_that_is_stopped_keeps_what_it_had_done(made_up: Any, tmp_path: Path) -> None:
    part, finish = made_up
    (tmp_path / "page").mkdir()
    stops: list[tuple[str, BaseException]] = [
        ("two", TimeoutError("too slow")),
        ("two", RuntimeError("out of memory")),  # nothing done in this go
        ("four", subprocess.TimeoutExpired("simulate", 1)),  # in the second phase
        ("four", KeyboardInterrupt()),  # nobody is left to keep anything: the next go does
    ]
    done = [["one"], ["one"], ["one", "two", "three"], ["one", "two", "three"]]
    for (thing, stop), kept in zip(stops, done, strict=True):
        part.stops = {thing: stop}
        if isinstance(stop, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                finish()
        else:
            assert not finish()
        stopped = of("packing", tmp_path)
        assert (stopped["done"], stopped["checks"]) == (kept, [*map(check_of, kept)])
        assert stopped["left_out"] == [f"{thing}, in which the part was stopped, and what follows"]
    written, _ = importlib.import_module("page").write_all({"packing": stopped}, tmp_path / "page", "failed: packing")
    page = next(path for path in written if path.suffix == ".html").read_text()
    assert "packing: left out" in page and "; stopped; " in page
    assert finish() and part.begun == ["four"]
    whole = of("packing", tmp_path)
    assert (whole["done"], whole["left_out"]) == (["one", "two", "three", "four"], [])
    assert whole["checks"] == [*map(check_of, whole["done"])]
    assert finish() and part.begun == []
    assert [path.name for path in tmp_path.glob("*.json")] == ["packing.json"]


def test_nothing_begins_that_would_not_end_in_time(
    modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next thing is taken to last as long as the longest before it, or as its part says."""
    now = 0.0
    monkeypatch.setattr(modules.time, "monotonic", lambda: now)
    args = argparse.Namespace(kept={"done": []}, so_far=tmp_path / "x", stamp={}, begins_until=80.0, ends_at=100.0)
    agenda = modules.Agenda(args)
    assert agenda.begins("of 45 seconds")
    now = 45.0
    agenda.keep({})
    assert agenda.begins("another, done at once")
    agenda.keep({})
    assert not agenda.begins("one of 60", expected_s=60)
    assert agenda.begins("one of 45")
    now = 56.0
    agenda.keep({})
    assert not agenda.begins("one more")
    assert agenda.left_out == ["one of 60", "one more"]


def test_a_command_that_is_stopped_may_end_what_it_has_started(modules: ModuleType, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    program = f"""if True:
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(ended)!r}).touch(), sys.exit(1)))
        time.sleep(60)"""
    with pytest.raises(subprocess.TimeoutExpired):
        modules.run_command([sys.executable, "-c", program], limit_s=2.0)
    assert ended.exists()
    assert modules.run_command([sys.executable, "-c", "raise SystemExit(3)"], limit_s=30.0) == 3


def test_what_did_not_run_is_shown_with_its_reason(results: Path, tmp_path: Path, modules: ModuleType) -> None:
    correctness, page = importlib.import_module("correctness"), importlib.import_module("page")
    checks = correctness._checks("model", "bf16", [1e30, 1e30], RuntimeError("no compiler\nfor long reasons"))
    assert not any(check["passed"] for check in checks)
    assert [page.value_of(check) for check in checks] == ["did not run: no compiler"] * 2
    failed = of("correctness", results) | {"checks": checks}
    written, _ = page.write_all({"correctness": failed}, tmp_path, "")
    assert "did not run: no compiler" in next(path for path in written if path.suffix == ".html").read_text()
    assert page.value_of({"value": 0.25}) == "0.25"


def test_a_part_that_was_stopped_begins_anew_at_another_commit(made_up: Any, tmp_path: Path) -> None:
    part, finish = made_up
    part.stops = {"three": RuntimeError("no")}
    assert not finish("a")
    assert finish("b") and part.begun == ["one", "two", "three", "four"]
    assert of("packing", tmp_path)["done"] == part.begun
    assert finish("c") and part.begun == []  # whole, of whichever commit


def test_what_fails_keeps_nothing_else_from_running(made_up: Any, tmp_path: Path) -> None:
    """And is tried again, alone. Without git there is no commit to name."""
    part, finish = made_up
    begun: list[str] = []
    broken = {"two"}

    def run_part(args: argparse.Namespace) -> dict[str, Any]:
        agenda, checks = part.settings.Agenda(args), []
        for thing in ("one", "two", "three"):
            if not agenda.begins(thing):
                continue
            begun.append(thing)
            if thing in broken:
                agenda.fails(thing)
                continue
            checks.append(check_of(thing))
            agenda.keep({"checks": checks})
        if broken:
            raise RuntimeError("two")
        return {"checks": checks, **agenda.result()}

    sys.modules["made_up"].part = run_part  # type: ignore[attr-defined]
    assert not finish(None)
    failed = of("packing", tmp_path)
    assert (begun, failed["done"], failed["left_out"]) == (["one", "two", "three"], ["one", "three"], ["two"])
    (tmp_path / "page").mkdir()
    written, _ = importlib.import_module("page").write_all({"packing": failed}, tmp_path / "page", "failed: packing")
    assert "no commit" in next(path for path in written if path.suffix == ".html").read_text()
    begun.clear()
    broken.clear()
    assert finish(None) and begun == ["two"]
    assert [check["name"] for check in of("packing", tmp_path)["checks"]] == ["one", "three", "two"]


def test_replays_are_held_against_planned_work(results: Path) -> None:
    names = [check["name"] for check in of("replay", results)["checks"]]
    for mix in DataMix.names():
        assert f"{mix}: measured seconds with planned work of the ranks, spread" in names
    assert "mixed: measured seconds with planned work of the ranks, correlation" in names


def test_the_parts_of_one_gpu_have_nine_minutes_with_the_build(modules: ModuleType) -> None:
    assert set(modules.LIMITS_S) == set(PARTS)
    for build_s, all_parts_s in ((0, 540), (90, 450), (3000, 270)):
        total_s = 0.0
        for part in PARTS[:-1]:
            args = argparse.Namespace(device="cuda", seconds=None, build_s=build_s)
            modules.start_part(args, part)
            total_s += modules.seconds_left(args)
        assert total_s == pytest.approx(all_parts_s, abs=1)


def test_kernels_that_are_not_there_are_named_with_their_reason(results: Path) -> None:
    calibrated = of("calibrate", results)
    absent = {(row["model"], row["kernel"]): row["reason"] for row in calibrated["absent"]}
    assert absent["flux-tiny", "varlen"] == "torch has no variable-length attention on a CPU"
    assert "flash-attn" in absent["wan-tiny", "diffusers flash_varlen"]
    tried = {check["name"].rpartition(":")[0] for check in calibrated["checks"]}  # fitted or, on a busy machine, not
    assert {"flux-tiny, flash", "wan-tiny, flash"} <= tried
    assert not tried & {", ".join(of_absent) for of_absent in absent}
    assert "calibrate: kernels that are not there" in (results / "gpu.html").read_text()


def test_every_implementation_that_torch_knows_is_tried(modules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones: of the second the backward pass fails, the third gives numbers that are not finite."""
    import torch
    from knapformer.models import attention

    kernels = importlib.import_module("attention_kernels")
    active: list[str] = []

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("no backward pass here\nfor long reasons")

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        o = q + k + v
        if active == ["broken"]:
            o.register_hook(fail)
        return o / 0 if active == ["infinite"] else o

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_may_have_kernel", lambda device: True)
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: ["whole", "broken", "infinite"])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear)
    found = kernels.kernels_of_packages()
    names = ["varlen", "varlen whole", "varlen broken", "varlen infinite"]
    assert list(found)[:7] == [*names, "flash", "efficient", "cudnn"]
    reasons = [kernels.why_not(found[name], torch.device("cpu"), torch.bfloat16, 8) for name in names]
    assert reasons[:3] == [None, None, "no backward pass here"]
    assert "not finite" in reasons[3]
    assert active == []


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER.parent))  # of the driver
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("settings")


def test_mixes_keep_their_shares_on_other_ranks(modules: ModuleType) -> None:
    for mix in DataMix.names():
        assert modules.scaled_mix(mix, 32) == str(DataMix.parse(mix))
        for num_ranks in (1, 2, 4, 8, 16, 64):
            assert DataMix.parse(modules.scaled_mix(mix, num_ranks)).num_ranks == num_ranks
    assert modules.scaled_mix("mixed", 8) == "g4b4i256f1s0,g1b5i512f1s0,g1b5i1024f1s0,g2b1i2048f1s0"


def test_topologies(modules: ModuleType) -> None:
    assert modules.flat_topologies(8) == {"g1n32": "g1n8", "g2n16": "g2n4", "g4n8": "g4n2", "g8n4": "g8n1"}
    assert modules.flat_topologies(2) == {"g1n32": "g1n2", "g2n16": "g2n1"}
    assert [modules.nested_topology(n) for n in (1, 2, 4, 8, 32)] == [
        "g1n1",
        "g2/1n1",
        "g4/2/1n1",
        "g8/4/2/1n1",
        "g8/4/2/1n4",
    ]


def test_what_building_lacks_is_named(modules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    build = importlib.import_module("build")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.sys, "executable", "/nowhere/python3")
    lacking = "\n".join(build.problems(True))
    assert "a C++20 compiler: apt-get install g++" in lacking
    assert "ninja: pip install ninja" in lacking
    assert build.problems(False) == []


def test_what_is_installed(modules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch only where there is none: another version would not be the one that is asked about."""
    build = importlib.import_module("build")
    commands: list[list[str]] = []
    monkeypatch.setattr(build.subprocess, "run", lambda command, **_: commands.append(command))
    build.install()
    assert "torch" not in commands[-1]
    assert [word.rpartition(":")[2] for word in commands[-1] if "pyproject.toml" in word] == ["build", "run"]
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    build.install()
    assert "torch" in commands[-1]


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        *(
            (name, None)
            for name in ("NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090")
        ),
    ],
)
def test_the_peak_of_a_device_is_its_own(device: str, peak: float | None, modules: ModuleType) -> None:
    assert importlib.import_module("run").peak_tflops(device) == peak
