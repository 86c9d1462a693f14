"""How well `balancer.observe` corrects a wrong gamma, and in how many steps.

    python bench/bench_observe.py [--seed 1] --json build/bench/observe.json

8 local ranks (Gloo) plan the published mixes, each with the data of 4 of a mix's 32 ranks. After every plan each rank
tells its balancer the seconds that its share takes at a true gamma, with noise. The seconds are computed and not
measured, so that the truth is known. Communication, fit and planning are the balancer's own. `over` is the work of the
slowest rank at the true gamma, over its work in a plan made at the true gamma. All ranks are equally fast.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import warnings
from typing import Any

from driver import on_ranks, parser_of, write_results

import knapformer

D_MODEL, NUM_RANKS, TRUE_GAMMA = 3072, 8, 0.41
TOPOLOGIES = ("g1n8", "g8n1", "g8/4/2/1n1")
CASES = [(given, noise) for noise in (0.02, 0.1) for given in (0.2, TRUE_GAMMA, 1.0)]
SHOWN = (5, 20, 60)  # steps
CLOSE = 0.1


def run_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # the balancer warns of a wrong gamma, which is intended here
    rank = dist.get_rank()
    cases = [
        {"mix": mix, "topology": topology, "given": given, "noise": noise}
        for mix, topology, (given, noise) in itertools.product(("mixed", "joint"), TOPOLOGIES, CASES)
    ]
    return [case | learned(rank, args.seed, **case) for case in cases]


def learned(rank: int, seed: int, mix: str, topology: str, given: float, noise: float) -> dict[str, Any]:
    """gammas: the one that each step was planned with. over: see above, for each step; on rank 0 alone."""
    data = knapformer.DataMix.parse(mix)
    rng = random.Random(f"{rank} {mix} {topology} {given} {noise}" + (f" {seed}" if seed else ""))
    balancer = knapformer.SequenceBalancer(topology, gamma=given)
    gammas, over = [], []
    for step in range(SHOWN[-1]):
        drawn = data.draw_lengths(0, step, 32)
        lengths = [[n for lens in drawn[4 * r : 4 * r + 4] for n in lens] for r in range(NUM_RANKS)]
        balancer.plan_routing(lengths[rank], D_MODEL)
        plan = balancer.plan
        per_token, at_one = (plan.on(gamma=gamma).workload_after[rank] for gamma in (0.0, 1.0))
        work = per_token + TRUE_GAMMA * (at_one - per_token)
        balancer.observe(1e-14 * work * max(0.1, rng.gauss(1, noise)))
        gammas.append(plan.workload.gamma)
        if rank == 0:
            right = knapformer.plan(lengths, topology, d_model=D_MODEL, gamma=TRUE_GAMMA)
            over.append(max(plan.on(gamma=TRUE_GAMMA).workload_after) / max(right.workload_after))
    return {"gammas": gammas, "over": over}


def steps_until_close(gammas: list[float]) -> int | None:
    """The first step from which on every gamma is close to the true one; None where there is no such step."""
    far = [step for step, gamma in enumerate(gammas) if abs(gamma / TRUE_GAMMA - 1) > CLOSE]
    first = far[-1] + 1 if far else 0
    return first if first < len(gammas) else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    args = parser.parse_args()
    rows = on_ranks(run_rank, args, NUM_RANKS)
    names = " | ".join(f"gamma of step {step}" for step in SHOWN)
    print(f"| mix | topology | noise | given | {names} | close from step | over, first 10 | last 10 |")
    for row in rows:
        row["close_from"] = steps_until_close(row["gammas"])
        gammas = " | ".join(f"{row['gammas'][step - 1]:.2f}" for step in SHOWN)
        over = " | ".join(f"{statistics.fmean(part):.3f}" for part in (row["over"][:10], row["over"][-10:]))
        close = "never" if row["close_from"] is None else row["close_from"] + 1
        print(
            f"| {row['mix']} | {row['topology']} | {row['noise']:.0%} | {row['given']} | {gammas} | {close} | {over} |"
        )
    if args.json:
        configuration = {"num_ranks": NUM_RANKS, "d_model": D_MODEL, "true_gamma": TRUE_GAMMA, "steps": SHOWN[-1]}
        write_results(args.json, "observe", configuration, rows=rows)


if __name__ == "__main__":
    main()
