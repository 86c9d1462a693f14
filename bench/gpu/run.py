"""`make gpu`: checks on a machine with accelerators whether this project is right there, and how fast it is.

    python bench/gpu/run.py [--part correctness] [--again] [--ranks 8] [--device cpu] [--out FOLDER]

Builds the modules with the torch that is installed, downloads nothing without --install, and runs these parts, one
after another:

    correctness   models, balancer and compiled attention against float64 on the CPU
    calibrate     FLUX and Wan with each attention kernel that is there
    packing       bandwidth of packing an exchange over that of a copy
    launches      kernel launches of the balancer's calls; and whether the host waits for the device in a step
    replay        the published mixes: every rank's share measured on one device, beside the published table
    steps         with several ranks: real steps of the mixes, scaled to the ranks there are

The first five and the build have 9 minutes together (LIMITS_S in settings.py). A part begins nothing new in the last
fifth of its time, and says what it left out; --seconds sets for how long each part may begin new things. The results of
a part on this device are kept as JSON in the output folder: without --again, another run only does what was left out.
All kept results go to gpu.html, gpu.png and gpu.json there; --part page makes these files alone, on any machine.
--device cpu runs the same code at tiny sizes. Exits with 1 where results are wrong or a part fails, with 2 where
something is missing; missed goals are only shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import build

BENCH = Path(__file__).parents[1]
# Each part is a function (args) -> a dictionary ready for JSON, with `checks`.
PARTS = {
    "correctness": "correctness.run",
    "calibrate": "attention_kernels.run",
    "packing": "packing.run",
    "launches": "launches.run",
    "replay": "mixes.replay",
    "steps": "mixes.steps",
}
OF_SEVERAL_RANKS = ("steps",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", choices=("all", *PARTS, "page"))
    parser.add_argument("--again", action="store_true", help="parts that have finished too")
    parser.add_argument("--seconds", type=float, help="in which a part begins something new (default: by part)")
    parser.add_argument("--ranks", type=int, default=1, help="an accelerator for each (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-results"), help="folder of the results")
    parser.add_argument("--install", action="store_true", help="first installs what building and running take")
    parser.add_argument("--installed", action="store_true", help="takes the package that is installed: builds nothing")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.install:
        build.install()
    builds = not args.installed and not build.is_built()
    if lacking := build.problems(builds):
        hint = "" if args.install else "\nINSTALL=1 (--install) has pip install what it can"
        print("make gpu: lacks\n" + "\n".join(f"  {line}" for line in lacking) + hint, file=sys.stderr)
        return 2
    if builds:
        build.build()
    args.build_s = time.monotonic() - begin
    paths = (
        [str(BENCH), str(BENCH / "gpu")]
        if args.installed
        else [str(BENCH.parent / "python"), str(BENCH), str(BENCH / "gpu")]
    )
    sys.path[:0] = paths
    # For the ranks, which are other processes.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Modules beside the sources do not lie beside torch, where they would look for its NVRTC.
    nvrtc = Path(str(importlib.util.find_spec("torch").origin)).parent / "lib/libcaffe2_nvrtc.so"
    if nvrtc.exists():
        os.environ.setdefault("KNAPFORMER_NVRTC", str(nvrtc))
    # Each rank has processes of its own that compile.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    return run_parts(args)


def run_parts(args: argparse.Namespace) -> int:
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    if args.part != "page":
        if error := look_at_device(args):
            print(f"make gpu: {error}", file=sys.stderr)
            return 2
        possible = [part for part in PARTS if args.ranks > 1 or part not in OF_SEVERAL_RANKS]
        wanted = possible if args.part == "all" else [args.part]
        failed = [part for part in wanted if not finish(part, args)]

    from page import goal_of, value_of, verdict, write_all

    results = {part: kept for part in PARTS if (kept := kept_result(args.out, part)) is not None}
    error = f"failed: {', '.join(failed)}" if failed else ""
    for part, of in results.items():
        for thing in of["left_out"]:
            print(f"{'LEFT':7}{part:12}{thing}: not done; make gpu{_same_run(args)} does it")
        for check in of["checks"]:
            print(f"{verdict(check):7}{part:12}{check['name']}: {value_of(check)}, {goal_of(check)}")
    written, not_drawn = write_all(results, args.out, error)
    print("written:", *written)
    for lacking in not_drawn:
        print(f"not drawn: {lacking}; then --part page, there or where {args.out} is copied to")
    wrong = [c for of in results.values() for c in of["checks"] if c.get("correctness") and not c["passed"]]
    return 1 if wrong or failed else 0


def look_at_device(args: argparse.Namespace) -> str | None:
    """Sets args.environment, num_devices, device_name and peak_tflops. Returns what is wrong with the arguments, or
    None."""
    from driver import PRELOADED, on_ranks
    from settings import sizes_of

    if args.ranks < 1 or args.ranks & (args.ranks - 1):
        return f"RANKS: got {args.ranks}, expected a power of two"
    deals_samples = args.part in ("all", "correctness", "launches")
    if deals_samples and args.ranks > (maximum := len(sizes_of(args).samples)):
        return f"RANKS: got {args.ranks}, expected at most {maximum}: so many samples are there to compare"
    if args.part in OF_SEVERAL_RANKS and args.ranks == 1:
        return f"RANKS: got 1, expected 2 or more for the {args.part}"
    if args.device == "cpu":  # where models may be imported before ranks are forked
        PRELOADED.extend(["knapformer.adapters.named", "diffusers.models.transformers.transformer_flux"])
    args.environment, args.num_devices = on_ranks(describe_rank, args, 1, backend=None)
    if args.device == "cuda" and args.num_devices < args.ranks:
        seen = f"torch {args.environment['torch']} sees {args.num_devices}"
        return f"RANKS: got {args.ranks}, expected a GPU for each, and {seen}; DEVICE=cpu runs the same lines there"
    args.device_name = str(args.environment["accelerator"] or args.environment["processor"])
    args.peak_tflops = peak_tflops(args.device_name) if args.device == "cuda" else None
    return None


def peak_tflops(device_name: str) -> float | None:
    """As torch names the device: "NVIDIA H100 80GB HBM3". None for one whose peak is not known, such as "H100 NVL"."""
    from knapformer.tools.measure.figures import PEAK_TFLOPS

    words = set(re.findall("[a-z0-9]+", device_name.lower()))
    known = [name for name in PEAK_TFLOPS if words.issuperset(name.split("-"))]
    return PEAK_TFLOPS[max(known, key=len)] if known and "nvl" not in words else None


def describe_rank(args: argparse.Namespace) -> Any:
    import torch
    from knapformer.tools.measure.environment import environment

    num_devices = torch.cuda.device_count() if args.device == "cuda" else 0
    return environment(torch.device("cuda" if num_devices else "cpu", 0)), num_devices


def finish(part: str, args: argparse.Namespace) -> bool:
    """Runs a part, or what its kept result has left out. Returns False where the part was stopped, by an error or by
    its time; what it had done is kept."""
    from settings import merged_results, start_part

    path, args.so_far = args.out / f"{part}.json", args.out / f"{part}.so-far.json"
    args.stamp = {"device": args.device_name, "ranks": args.ranks, "environment": args.environment}
    keep_so_far(path, args.so_far)  # of a go that was killed
    args.kept, kept = {"done": []}, kept_result(args.out, part)
    if kept is not None and not args.again and is_of_one_setting(kept, args.stamp):
        print(f"{part}: kept from {kept['environment']['time']}, of commit {kept['environment']['commit']}", flush=True)
        if not kept["left_out"]:
            return True
        if kept["environment"]["commit"] == args.environment["commit"]:
            args.kept = kept
    if args.kept is not kept:
        path.unlink(missing_ok=True)
    print(f"{part} ...", flush=True)
    begin = time.monotonic()
    module, function = PARTS[part].split(".")
    start_part(args, part)
    try:
        result = getattr(importlib.import_module(module), function)(args)
    except Exception:  # the other parts still run
        traceback.print_exc()
        keep_so_far(path, args.so_far)
        return False
    result = merged_results(args.kept, result) | args.stamp | {"seconds": time.monotonic() - begin}
    path.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n")
    args.so_far.unlink(missing_ok=True)
    print(f"{part}: {result['seconds']:.0f} s", flush=True)
    return True


def keep_so_far(path: Path, so_far: Path) -> None:
    """Adds the results of a go that was stopped to those of the goes before it."""
    from settings import merged_results

    if not so_far.exists():
        return
    stopped, kept = json.loads(so_far.read_text()), kept_result(path.parent, path.stem)
    before = kept if kept is not None and is_of_one_setting(kept, stopped) else {}
    result = merged_results({"done": [], "checks": []}, before, stopped)
    result.pop("seconds", None)  # of a go that was not stopped
    path.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n")
    so_far.unlink()


def is_of_one_setting(result: dict[str, Any], stamp: dict[str, Any]) -> bool:
    return bool((result["device"], result["ranks"]) == (stamp["device"], stamp["ranks"]))


def _same_run(args: argparse.Namespace) -> str:
    """Options of the command that goes on with this one."""
    options = {"PART": args.part, "RANKS": args.ranks, "DEVICE": args.device, "OUT": args.out}
    usual = {"PART": "all", "RANKS": 1, "DEVICE": "cuda", "OUT": (BENCH.parent / "build/gpu-results").resolve()}
    return "".join(f" {name}={value}" for name, value in options.items() if value != usual[name])


def kept_result(folder: Path, part: str) -> dict[str, Any] | None:
    path = folder / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
