"""Training steps on two hosts of two ranks each, with 1 Gbit/s between them: measured and predicted times.

    python bench/bench_hosts.py --json build/bench/hosts.json

The hosts are network namespaces on this machine (namespaces.py), each rank with its own share of a core. There
`knapformer calibrate` measures blocks, the exchange inside a host and the one between hosts; then `knapformer simulate`
runs steps of K micro-batches without a balancer, with flat bags inside the hosts (g2n2) and over both (g4n1), with
nested bags (g4/2/1n1), and planned whole, which exchanges nothing. All variants of a run compute the same samples, in
turns. The planner and the prediction know the calibration, and nothing else about the machine.

Prints why, and ends with 0, where namespaces cannot be made: it needs root, Linux and iproute2.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from driver import parser_of, write_results
from namespaces import CannotMakeHosts, Host, run_on, two_hosts

NUM_LOCAL = 2
TOPOLOGIES = ("g2n2", "g4n1", "g4/2/1n1")
# A narrow model: a link of 1 Gbit/s slows its ranks about as much as a real network slows accelerators.
MODEL = {"kind": "transformer", "num_blocks": 4, "d_model": 128, "num_heads": 8, "num_kv_heads": 8}
# Three ranks draw images of 256 tokens, the fourth of 1,024; and up to 32 tokens of text each.
DATA = ("--data", "g3b4i512f1s0,g1b4i1024f1s0", "--scale", "2", "--max-text-tokens", "32")
LENGTHS = "64,128,256,512,1024"
# --clip: pictures of 256 tokens, and on the fourth rank a clip of 3,072; three heads, which no two ranks divide.
CLIP_MODEL = MODEL | {"d_model": 192, "num_heads": 3, "num_kv_heads": 3}
CLIP_DATA = ("--data", "g3b1i512f1s0,g1b1i512f12s0", *DATA[2:])
TIMEOUT_S = 900


def measure(hosts: tuple[Host, Host], args: Any, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """The calibration, the results of a run for each number of micro-batches, and whether ranks had shares of cores."""
    model, calibration = folder / "model.json", folder / "calibration.json"
    data = CLIP_DATA if args.clip else DATA
    model.write_text(json.dumps(CLIP_MODEL if args.clip else MODEL))
    common = ["--model", str(model), "--device", "cpu"]
    shared = run_on(
        hosts,
        ["-m", "knapformer", "calibrate", *common, "--lengths", LENGTHS + ",3072" * args.clip, "--repeats", "5",
         "--json", str(calibration)],
        NUM_LOCAL,
        TIMEOUT_S,
    )  # fmt: skip
    runs = []
    for k in args.micro_batches:
        out = folder / f"{k}.json"
        command = ["-m", "knapformer", "simulate", *common, *data, "--micro-batches", str(k), "--keep-exchanges"]
        command += ["--calibration", str(calibration), "--ranks-per-node", str(NUM_LOCAL), "--seed", str(args.seed)]
        command += ["--steps", str(args.steps), "--repeats", str(args.repeats), "--warmup", "1", "--json", str(out)]
        for topology in TOPOLOGIES:
            command += ["--topology", topology]
        run_on(hosts, command, NUM_LOCAL, TIMEOUT_S)
        runs.append({"micro_batches": k, **json.loads(out.read_text())})
    return json.loads(calibration.read_text()), runs, shared


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4], metavar="K")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run (default 3)")
    parser.add_argument("--repeats", type=int, default=2, help="of each step, the best counts (default 2)")
    parser.add_argument("--rate", type=float, default=1000, metavar="MBIT", help="of the link (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", action="store_true", help="one clip among short samples, three heads")
    args = parser.parse_args()
    load = os.getloadavg()
    try:
        with two_hosts(args.rate) as hosts, tempfile.TemporaryDirectory() as folder:
            calibration, runs, shared = measure(hosts, args, Path(folder))
    except CannotMakeHosts as reason:
        print(f"skipped: {reason}")
        return 0
    costs = {name: calibration[name] for name in ("node", "network")}
    for name, cost in costs.items():
        if cost is not None:
            print(f"{name}: {cost['bytes_per_s'] / 1e6:.0f} MB/s a rank, {cost['latency_s'] * 1e3:.2f} ms")
    print(f"gamma {calibration['gamma']:.2f}; a share of a core for each rank: {'yes' if shared else 'no'}")
    print("| K | balancer | measured s | predicted s | measured / predicted |")
    print("| --- | --- | --- | --- | --- |")
    for run in runs:
        for of in run["variants"]:
            measured_s, predicted_s = of["fbl_median_s"], of["predicted_s"]
            cells = (f"{value:.2f}" for value in (measured_s, predicted_s, measured_s / predicted_s))
            print(f"| {run['micro_batches']} | {of['name']} |", " | ".join(cells), "|")
    if args.json is not None:
        configuration = {name: getattr(args, name) for name in ("clip", "rate", "steps", "repeats", "seed")}
        configuration |= {"shares_of_cores": shared}
        write_results(args.json, "hosts", configuration, load_before=load, calibration=calibration, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
