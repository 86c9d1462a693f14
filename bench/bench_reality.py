"""Compares predicted steps with measured ones: ten traces of lengths, five ways to run them, on 2 local ranks.

    python bench/bench_reality.py --folder build/bench/reality
    python bench/bench_reality.py --folder build/bench/reality --traces uniform "two sizes"
    python bench/bench_reality.py --folder build/bench/real --sizes real/coco.json real/laion.json --traces coco laion

Calibrates the model and the exchange between 2 ranks once, then runs `knapformer simulate` for each trace in five ways,
in turns on the same draws: no balancer, lockstep buckets, a time budget, static sequence parallelism, and the whole
step planned. Every result is a file in the folder. A trace that has its file is not run again, so the benchmark may be
stopped at any time. --sizes adds traces of pictures and clips, as docs/real_lengths.py writes them, without captions;
their tokens are reduced so that the longest has 600. The figures cover all results in the folder:

    step      predicted over measured seconds of a step
    gain      predicted over measured gain on "no balancer", in work per time: a verdict rests on it. What slows
              all ways alike, such as a busy machine, cancels out.
    order     for two ways of a trace whose measured gains differ by more than 5 %: whether the predicted gains differ
              in the same direction
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import NUM_RANKS, parser_of, write_results
from knapformer.tools.model_presets import PRESETS

from knapformer import DataMix

MODEL = "flux-demo"
MICRO_BATCHES, BATCH_SIZE = 2, 4
WAYS = ("buckets", "time_budget", f"static_{NUM_RANKS}")
NUM_LENGTHS = 400
DIFFERENT = 0.05
# Tokens of calibrated lengths: from the shortest to beyond the longest of the traces.
CALIBRATED = "32,64,128,256,512,1024,2048"


def _of_mix(name: str, scale: float, max_tokens: int) -> Callable[[random.Random], list[int]]:
    """Draws from the lengths of a published mix, its images `scale` times smaller a side, its texts scale^2 times
    shorter."""

    def draw(rng: random.Random) -> list[int]:
        mix = DataMix.parse(name, resolution_scale=scale, max_text_tokens=int(392 / scale**2))
        lengths = [n for step in range(4) for lens in mix.draw_lengths(0, step, mix.num_ranks) for n in lens]
        return [min(n, max_tokens) for n in rng.choices(lengths, k=NUM_LENGTHS)]

    return draw


def _each(draw: Callable[[random.Random], float]) -> Callable[[random.Random], list[int]]:
    return lambda rng: [max(16, min(1800, round(draw(rng)))) for _ in range(NUM_LENGTHS)]


TRACES: dict[str, Callable[[random.Random], list[int]]] = {
    "low mix": _of_mix("low", 2, 1800),
    "mixed mix": _of_mix("mixed", 3.5, 1800),
    "joint mix": _of_mix("joint", 4, 1800),
    "uniform": _each(lambda rng: rng.uniform(40, 900)),
    "heavy-tailed": _each(lambda rng: 70 * rng.paretovariate(1.1)),
    "two sizes": _each(lambda rng: rng.choice((100, 900))),
    "nearly equal": _each(lambda rng: rng.uniform(285, 315)),
    "few videos": _each(lambda rng: 1600 if rng.random() < 0.05 else rng.uniform(100, 180)),
    "captions": _each(lambda rng: rng.lognormvariate(4.2, 0.6)),
    "log-uniform": _each(lambda rng: 30 * 50 ** rng.random()),
}


def _of_sizes(path: Path) -> Callable[[random.Random], list[int]]:
    tokens = [PRESETS["wan-14b"].num_tokens(**size, text_tokens=0) for size in json.loads(path.read_text())]
    return lambda rng: [max(16, n * 600 // max(tokens)) for n in rng.choices(tokens, k=NUM_LENGTHS)]


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "knapformer", *arguments], check=True, stdout=subprocess.DEVNULL)


def measure(folder: Path, trace: str, steps: int, repeats: int) -> None:
    calibration, result = folder / "calibration.json", folder / f"{trace}.json"
    if not calibration.exists():
        run("calibrate", "--model", MODEL, "--ranks", str(NUM_RANKS), "--lengths", CALIBRATED, "--repeats", "7",
            "--json", str(calibration))  # fmt: skip
    if result.exists():
        return
    lengths = folder / f"{trace}.lengths.json"
    lengths.write_text(json.dumps(TRACES[trace](random.Random(trace))))
    ways = [word for way in WAYS for word in ("--way", way)]
    run("simulate", "--lengths", str(lengths), "--batch-size", str(BATCH_SIZE), "--micro-batches", str(MICRO_BATCHES),
        "--ranks", str(NUM_RANKS), "--model", MODEL, *ways, "--cluster", "cpu", "--calibration", str(calibration),
        "--steps", str(steps), "--repeats", str(repeats), "--warmup", "1",
        "--json", str(result))  # fmt: skip


def rows_of(trace: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    base = results["variants"][0]
    rows = []
    for of in results["variants"]:
        predicted, measured = (of["work"] * base[key] / of[key] for key in ("predicted_s", "fbl_s"))
        rows.append(
            {
                "trace": trace,
                "way": of["name"],
                "predicted_s": of["predicted_s"],
                "measured_s": of["fbl_s"],
                "step_error": of["predicted_s"] / of["fbl_s"] - 1,
                "predicted_gain": predicted,
                "measured_gain": measured,
                "gain_error": predicted / measured - 1,
            }
        )
    return rows


def order_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of a trace's ways whose measured gains differ: whether the predicted ones differ likewise."""
    pairs = []
    for one, other in itertools.combinations(rows, 2):
        ratio = one["measured_gain"] / other["measured_gain"]
        if max(ratio, 1 / ratio) > 1 + DIFFERENT:
            right = (one["predicted_gain"] > other["predicted_gain"]) == (ratio > 1)
            pairs.append({"trace": one["trace"], "ways": [one["way"], other["way"]], "measured": ratio, "right": right})
    return pairs


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of results, which are not measured again")
    parser.add_argument("--sizes", type=Path, nargs="*", default=[], help="files of widths, heights and frames")
    parser.add_argument("--traces", nargs="+", help="which, and files by name without .json (default: all)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each trace (default 3)")
    parser.add_argument("--repeats", type=int, default=2, help="of each step, the best counts (default 2)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    TRACES.update((path.stem, _of_sizes(path)) for path in args.sizes)
    if unknown := set(args.traces or ()) - set(TRACES):
        parser.error(f"--traces: got {', '.join(sorted(unknown))}, expected some of {', '.join(TRACES)}")
    for trace in args.traces or TRACES:
        measure(args.folder, trace, args.steps, args.repeats)

    rows, pairs = [], []
    for trace in TRACES:
        path = args.folder / f"{trace}.json"
        if path.exists():
            of_trace = rows_of(trace, json.loads(path.read_text()))
            rows += of_trace
            pairs += order_of(of_trace)
    print("| trace | " + " | ".join(row["way"] for row in rows[: len(WAYS) + 2]) + " |")
    print("| --- |" + " --- |" * (len(WAYS) + 2))
    for trace, of_trace in itertools.groupby(rows, key=lambda row: str(row["trace"])):
        cells = [f"{row['predicted_gain']:.2f} / {row['measured_gain']:.2f}" for row in of_trace]
        print(f"| {trace} | " + " | ".join(cells) + " |")
    summary: dict[str, Any] = {}
    for name, of_rows in (("step", rows), ("gain", [row for row in rows if row["way"] != "no balancer"])):
        errors = [abs(row[f"{name}_error"]) for row in of_rows]
        summary[f"{name}_error"] = {"median": statistics.median(errors), "worst": max(errors)}
        print(f"{name}: off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at worst")
    wrong = [pair for pair in pairs if not pair["right"]]
    print(f"order: right in {len(pairs) - len(wrong)} of {len(pairs)} pairs that differ by more than {DIFFERENT:.0%}")
    for pair in wrong:
        print(f"    wrong: {pair['trace']}, {pair['ways'][0]} over {pair['ways'][1]}: {pair['measured']:.3f}")
    if args.json is not None:
        configuration = {"model": MODEL, "steps": args.steps, "repeats": args.repeats}
        write_results(args.json, "reality", configuration, summary=summary, rows=rows, order=pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
