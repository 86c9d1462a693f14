"""Time that BalancedBatchSampler takes in the loader's process: at its start, and for each optimizer step.

    python bench/bench_sampler.py [--samples 10000000] [--json build/bench/sampler.json]

Lengths are those of a published mix, in a memory map of int32. Start: from the constructor to the first list, including
the shuffle of all samples. Step: all lists of a step, including its planning; shown are the mean and the slowest step.
Both are processor time of this process, which has one thread, so that other processes on the machine do not count. A
list has 4 samples; the model is 3072 wide.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from driver import parser_of, write_results

import knapformer

MIX, D_MODEL, BATCH_SIZE, MICRO_BATCHES = "mixed", 3072, 4, 4
SETTINGS = [  # ranks, topology
    (32, None),
    (32, "g8/4/2/1n4"),
    (1024, None),
]


def lengths_of(mix: str, num_samples: int) -> np.ndarray:
    """Drawn once for 1,024 ranks, and repeated."""
    drawn = knapformer.DataMix.parse(mix).draw_lengths(0, 0, 1024)
    return np.resize(np.array([length for lens in drawn for length in lens], dtype=np.int32), num_samples)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lengths.npy")
        np.save(path, lengths_of(MIX, args.samples))
        print(f"{'ranks':>6} {'topology':>12} {'start, s':>9} {'step, ms':>9} {'slowest':>8}")
        for num_ranks, topology in SETTINGS:
            row = measured(np.load(path, mmap_mode="r"), num_ranks, topology, args.steps)
            rows.append(row)
            print(
                f"{num_ranks:6} {topology or 'whole':>12} {row['start_s']:9.2f} "
                f"{row['step_ms']:9.2f} {row['slowest_step_ms']:8.2f}"
            )
    if args.json:
        configuration = {"mix": MIX, "num_samples": args.samples, "steps": args.steps, "d_model": D_MODEL}
        write_results(args.json, "sampler", configuration, rows=rows)


def measured(lengths: np.ndarray, num_ranks: int, topology: str | None, num_steps: int) -> dict[str, object]:
    begin = time.process_time()
    sampler = knapformer.BalancedBatchSampler(
        lengths, batch_size=BATCH_SIZE, d_model=D_MODEL, micro_batches=MICRO_BATCHES, topology=topology,
        num_replicas=num_ranks, rank=0, drop_last=True,
    )  # fmt: skip
    lists = iter(sampler)
    next(lists)
    start_s = time.process_time() - begin
    list(islice(lists, MICRO_BATCHES - 1))
    steps_ms = []
    for _ in range(num_steps):
        begin = time.process_time()
        list(islice(lists, MICRO_BATCHES))
        steps_ms.append(1e3 * (time.process_time() - begin))
    return {
        "num_ranks": num_ranks,
        "topology": topology,
        "start_s": start_s,
        "step_ms": statistics.mean(steps_ms),
        "slowest_step_ms": max(steps_ms),
    }


if __name__ == "__main__":
    main()
