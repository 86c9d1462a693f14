"""test_whole_step for every way, number of ranks and of micro-batches, topology, wrapper and mean (`make exactness`).

python tests/python/whole_step_product.py [--ranks 2 3 ...]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from distributed.ranks import run_ranks
from whole_step_ranks import LENGTHS, WAYS, Case, alone, gradient_error, run_cases, uncovered

LIMIT = 1e-10


def topologies(world: int) -> list[str]:
    """Bags of one rank, which share no sample; one flat bag of all ranks; and nested bags."""
    nested = "/".join(str(degree) for degree in (8, 4, 2, 1) if world % degree == 0 and degree <= world)
    return list(dict.fromkeys([f"g1n{world}", f"g{world}n1", f"g{nested}n{world // int(nested.split('/')[0])}"]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Gradients of whole steps on real ranks against one process.")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(range(2, 9)))
    args = parser.parse_args()
    wanted = {mean: alone(mean, LENGTHS) for mean in ("token", "sample")}
    num_cases = num_wrong = num_shared = 0
    worst = 0.0
    for world in args.ranks:
        begin = time.time()
        cases = [
            Case(way, topology, micro_batches, wrapper, mean, LENGTHS)
            for way, topology, micro_batches, wrapper, mean in itertools.product(
                WAYS, topologies(world), range(1, 9), ("ddp", "fsdp"), wanted
            )
        ]
        of_ranks = run_ranks(run_cases, world, cases, timeout_s=3600)
        for case, outcomes in zip(cases, zip(*of_ranks, strict=True), strict=True):
            error = max(gradient_error(outcome, wanted[case.mean]) for outcome in outcomes)
            worst = max(worst, error)
            num_shared += outcomes[0].num_shared > 0
            lost = uncovered(outcomes, LENGTHS)
            if error > LIMIT or lost:
                num_wrong += 1
                print(f"WRONG {case}: gradients off by {error:.1e}, not computed once: {lost}", flush=True)
        num_cases += len(cases)
        print(f"{world} ranks: {len(cases)} cases in {time.time() - begin:.0f} s", flush=True)
    print(f"{num_cases} cases ({num_shared} share samples), {num_wrong} wrong; gradients off by at most {worst:.1e}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
