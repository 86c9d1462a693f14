"""How good plans of whole optimizer steps are: time over ideal, and tokens exchanged.

    python bench/bench_micro_batches.py --json build/bench/micro_batches.json

A step is K consecutive batches of a mix over 32 ranks, in bags g8/4/2/1; means over the seeds. Times are of one block's
forward pass on the cluster of bench_solvers.py, which also measures them, from the chunks alone:

    time      sum over micro-batches of the slowest group's time, over (work / ranks / rate)
    bound     the planner's lower bound, over the same ideal time
    given     `time` where each rank's list is cut into K parts in its order, and each part is planned by itself
    exchanged fraction of the tokens that leave their rank in each all-to-all of attention
    tokens    the most of any rank in any micro-batch, over the mean of a rank and micro-batch
    default   a step planned for the default cluster and an unrouted model, predicted, over its ideal time, with the
              default limit of tokens; the others have none. And `tokens` of it
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

from bench_solvers import CLUSTER, D_MODEL, MODEL, Lengths, measure, of_plan, work
from driver import parser_of, write_results
from knapformer.tools.rank_lengths import micro_batches_of_step

import knapformer

NUM_RANKS, TOPOLOGY = 32, "g8/4/2/1n4"
NAMES = ("time", "bound", "given", "exchanged", "tokens", "default", "tokens of it")


def step_of(mix: str, seed: int, num_micro_batches: int) -> Lengths:
    batches = [knapformer.DataMix.parse(mix).draw_lengths(seed, k, NUM_RANKS) for k in range(num_micro_batches)]
    return [[length for batch in batches for length in batch[rank]] for rank in range(NUM_RANKS)]


def total_work(lengths: Lengths, gamma: float) -> float:
    return sum(work(length, gamma) for lens in lengths for length in lens)


def over_ideal(plans: Iterable[knapformer.Plan], gamma: float) -> float:
    """The sum of the plans' times, over the time of all their work."""
    works, times = 0.0, 0.0
    for plan in plans:
        lengths = [list(lens) for lens in plan.seq_lens]
        if part := total_work(lengths, gamma):
            works += part
            times += part * measure(lengths, of_plan(plan), gamma)["eff"]
    return times / works


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[2, 3, 4, 8])
    parser.add_argument("--effort", default="default")
    args = parser.parse_args()
    rows = []
    print("| mix | gamma | K |", " | ".join(NAMES), "|")
    for mix in ("mixed", "joint"):
        for gamma in (0.41, 1.0):
            planned = partial(
                knapformer.plan, topology=TOPOLOGY, d_model=D_MODEL, gamma=gamma, cluster=CLUSTER, model=MODEL
            )
            for k in args.micro_batches:
                figures: list[tuple[float, ...]] = []
                for seed in range(args.seeds):
                    step = step_of(mix, seed, k)
                    plan = planned(step, effort=args.effort, micro_batches=k, max_tokens_per_rank=2**40)
                    default = knapformer.plan(
                        step, TOPOLOGY, d_model=D_MODEL, gamma=gamma, effort=args.effort, micro_batches=k,
                        model=knapformer.TrainedModel(routed=False),
                    )  # fmt: skip
                    ideal_s = total_work(step, gamma) / NUM_RANKS / CLUSTER.flops_per_s
                    given = [planned(part, effort="low") for part in micro_batches_of_step(step, k)]
                    figures.append((
                        over_ideal(plan.plans, gamma),
                        plan.lower_bound / MODEL.num_blocks / ideal_s,
                        over_ideal(given, gamma),
                        plan.exchanged_fraction,
                        plan.max_tokens * NUM_RANKS * k / plan.num_tokens,
                        default.predicted_time / default.ideal_time,
                        default.max_tokens * NUM_RANKS * k / default.num_tokens,
                    ))  # fmt: skip
                means = dict(zip(NAMES, map(statistics.fmean, zip(*figures, strict=True)), strict=True))
                rows.append({"mix": mix, "gamma": gamma, "micro_batches": k, **means})
                print(
                    f"| {mix} | {gamma} | {k} |", " | ".join(f"{mean:.4f}" for mean in means.values()), "|", flush=True
                )
    if args.json:
        configuration = {"topology": TOPOLOGY, "d_model": D_MODEL, "seeds": args.seeds, "effort": args.effort}
        write_results(args.json, "micro_batches", configuration, rows=rows)


if __name__ == "__main__":
    main()
