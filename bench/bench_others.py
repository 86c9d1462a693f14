"""Whole optimizer steps as other tools' own code plans them: the same samples, by the same clocks.

    python bench/bench_others.py --verl ~/verl --megatron ~/Megatron-LM --automodel ~/Automodel --json FILE

A step has micro-batches x batch size x ranks samples, drawn from a published mix. Each tool says which rank computes
which samples in which micro-batch. Two clocks time a block's forward pass, over the work of all tokens spread evenly;
both add up the slowest ranks of the micro-batches, which wait for each other:

    packed   bench_solvers.measure: no padding, with the exchanges of shared samples
    padded   each list is padded to its longest sample (of "stacked": each of its groups); "-" for shared samples

Also the most tokens that a rank holds in a micro-batch, padding left out. Code of others is run, from the installed
transformers and from checkouts where options name them:

    BatchRebalanceSampler    transformers, by its padded cost. Its cost of attention is that of a narrow model, so it is
                             also run with the true one
    verl                     Karmarkar-Karp over ranks (lists of equal counts), then over each rank's micro-batches
    SequentialBucketSampler  NeMo Automodel: one bucket in all lists, sizes of batches by tokens. Its steps have other
                             samples than those of the rest
    BalancedCPScheduler      Megatron-LM: a sample is shared by as many ranks as its length needs, each runs by itself;
                             the best of several limits of tokens. It makes as many micro-batches as it needs
    static                   every sample shared by the 8 ranks of its node: by heads (Ulysses; with 24 heads also USP),
                             or by queries, as ring attention and MagiAttention on full masks. Modelled
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_solvers import CLUSTER, D_MODEL, MODEL, Share, even, measure, of_plan, work
from driver import module_at, parser_of, write_results
from knapformer.tools.baselines import static_sharing
from knapformer.tools.ways import DrawnSteps, PlanCost

import knapformer

NUM_RANKS, GAMMA, BATCH_SIZE = 32, 0.41, 4
CASES = (("mixed", 1), ("joint", 1), ("low", 4), ("mixed", 4), ("joint", 4))  # mix, micro-batches
STATIC = {"static Ulysses 8": {}, "static ring 8": {"num_heads": 1, "num_kv_heads": 1, "cuts_queries": True}}
LIMITS = (4096, 8192, 16384, 32768)  # tokens of a rank, of Megatron's scheduler
COST: dict[str, Any] = {"d_model": D_MODEL, "gamma": GAMMA, "cluster": CLUSTER, "model": MODEL.replace(routed=False)}


@dataclass(frozen=True)
class Placed:
    """A sample in a micro-batch. group: of samples that are padded alike, on one rank."""

    length: int
    share: Share
    group: int


MicroBatch = list[Placed]
Lists = list[list[list[int]]]  # [micro-batch][rank]: lengths


@dataclass(frozen=True)
class Case:
    """lengths: of a step, in the order in which ranks draw them. pool: what they are drawn from."""

    pool: list[int]
    lengths: list[int]
    micro_batches: int
    seed: int

    def drawn(self) -> Lists:
        lists = [self.lengths[i : i + BATCH_SIZE] for i in range(0, len(self.lengths), BATCH_SIZE)]
        return [lists[k :: self.micro_batches] for k in range(self.micro_batches)]

    @property
    def mean_tokens(self) -> float:
        """Of a rank in a micro-batch."""
        return sum(self.lengths) / NUM_RANKS / self.micro_batches


Way = Callable[[Case], list[MicroBatch]]


def whole(lists: Lists) -> list[MicroBatch]:
    return [[Placed(n, Share(rank, (n,)), rank) for rank, lens in enumerate(batch) for n in lens] for batch in lists]


def rebalanced(case: Case, coefficient: float | None = None) -> list[MicroBatch]:
    """coefficient: of the quadratic term; None: the sampler's own."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    sampler = BatchRebalanceSampler(case.lengths, len(case.lengths), NUM_RANKS, case.micro_batches, shuffle=False)
    if coefficient is not None:
        sampler.QUADRATIC_COST_COEF = coefficient
    lists = sampler._assign(list(range(len(case.lengths))), case.lengths)  # what every rank computes
    return whole([[[case.lengths[i] for i in of_rank[k]] for of_rank in lists] for k in range(case.micro_batches)])


def verl(checkout: Path) -> Way:
    absent = ("verl", "verl.protocol", "verl.utils", "verl.utils.device")
    module = module_at(checkout / "verl/utils/seqlen_balancing.py", *absent)

    def way(case: Case) -> list[MicroBatch]:
        import torch

        loads = module.calculate_workload(torch.tensor(case.lengths)).tolist()
        lists: Lists = [[] for _ in range(case.micro_batches)]
        for indices in module.get_seqlen_balanced_partitions(loads, NUM_RANKS, equal_size=True):
            lens = torch.tensor([case.lengths[i] for i in indices])
            ends = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)])
            batch = {"input_ids": SimpleNamespace(is_nested=True, offsets=lambda: ends)}  # noqa: B023
            _, parts = module.rearrange_micro_batches(batch, 1 << 60, min_num_micro_batch=case.micro_batches)
            for of_micro_batch, part in zip(lists, parts, strict=True):
                of_micro_batch.append(lens[part].tolist())
        return whole(lists)

    return way


def bucketed(checkout: Path) -> Way:
    folder = checkout / "nemo_automodel/components/datasets/diffusion"
    sampler_class = module_at(folder / "sampler.py", ".base_dataset").SequentialBucketSampler
    calculator = module_at(folder / "multi_tier_bucketing.py").MultiTierBucketCalculator()

    def way(case: Case) -> list[MicroBatch]:
        buckets: dict[int, Any] = {}
        for i, length in enumerate(case.pool):
            tokens = min((256, 1024, 4096, 6400, 16384, 25600), key=lambda n: abs(n + 196 - length))
            bucket = buckets.setdefault(tokens, {"indices": [], "resolution": (256, tokens)})  # as many pixels
            bucket["indices"].append(i)
        dataset = SimpleNamespace(sorted_bucket_keys=sorted(buckets), bucket_groups=buckets, calculator=calculator)
        base = max(1, round(case.mean_tokens / 1024))  # samples of 512 x 512, so that a list has about as many tokens
        settings = {"dynamic_batch_size": True, "seed": case.seed, "num_replicas": NUM_RANKS}
        ranks = [sampler_class(dataset, base, rank=rank, **settings) for rank in range(NUM_RANKS)]
        return whole([[[case.pool[i] for i in lens] for lens in batch] for batch in zip(*ranks, strict=True)])

    return way


def context_parallel(checkout: Path, limit: int) -> Way:
    absent = ("megatron", "megatron.core", "megatron.core.rerun_state_machine")
    module = module_at(checkout / "megatron/core/pipeline_parallel/hybrid_cp_schedule.py", *absent)

    def way(case: Case) -> list[MicroBatch]:
        scheduler = module.BalancedCPScheduler(limit, SimpleNamespace(size=lambda: NUM_RANKS))
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(case.lengths)), None)
        placed = []
        for of_rank in groups:
            ranks: dict[int, list[int]] = {}
            for rank, samples in enumerate(of_rank):
                for sample in samples:
                    ranks.setdefault(sample, []).append(rank)
            assert all(r == list(range(r[0], r[0] + len(r))) for r in ranks.values())
            placed.append([Placed(n := case.lengths[i], even(r[0], len(r), n), i) for i, r in ranks.items()])
        return placed

    return way


def planned(case: Case, topology: str, limit: float | None = None) -> list[MicroBatch]:
    """limit: of a rank's tokens, over their mean; and never below the longest sample."""
    drawn = case.drawn()
    lengths = [[n for batch in drawn for n in batch[rank]] for rank in range(NUM_RANKS)]
    tokens = 0 if limit is None else max(int(limit * case.mean_tokens), *case.lengths)
    step = knapformer.plan(lengths, topology, micro_batches=case.micro_batches, max_tokens_per_rank=tokens, **COST)
    flat = [[n for lens in plan.seq_lens for n in lens] for plan in step.plans]
    return [
        [Placed(n, share, share.first_rank) for n, share in zip(lens, of_plan(plan), strict=True)]
        for lens, plan in zip(flat, step.plans, strict=True)
    ]


def stacked(case: Case) -> list[MicroBatch]:
    """Samples are stacked where their numbers of tokens are within a tenth of each other, and planned as padded."""
    placed: list[MicroBatch] = [[] for _ in range(case.micro_batches)]
    shapes = [round(10 * math.log(n)) for n in case.lengths]
    longest = dict(sorted(zip(shapes, case.lengths, strict=True)))
    for rank in range(NUM_RANKS):
        sampler = knapformer.BalancedBatchSampler(
            [longest[shape] for shape in shapes], batch_size=BATCH_SIZE, micro_batches=case.micro_batches,
            shuffle=False, num_replicas=NUM_RANKS, rank=rank, **COST,
        )  # fmt: skip
        for k, indices in enumerate(sampler):
            placed[k] += [
                Placed(case.lengths[i], Share(rank, (case.lengths[i],)), 1000 * rank + shapes[i]) for i in indices
            ]
    return placed


def static(case: Case, **cut: Any) -> dict[str, float | None]:
    """Sequence parallelism of one degree; keys of a ring travel during attention."""
    planning = PlanCost(**COST | {"cluster": CLUSTER.replace(overlaps_attention=True)})
    (step,) = static_sharing(DrawnSteps(planning, [case.drawn()]), 8, **cut)
    packed = sum(plan.predicted_time for plan in step.plans) / sum(plan.ideal_time for plan in step.plans)
    return {"packed": packed, "padded": None, "fullest": step.figures["max_tokens"]}


def padded_work(batch: MicroBatch) -> float | None:
    """Of the slowest rank."""
    if any(len(placed.share.chunk_lens) > 1 for placed in batch):
        return None
    groups: dict[int, list[Placed]] = {}
    for placed in batch:
        groups.setdefault(placed.group, []).append(placed)
    ranks = [0.0] * NUM_RANKS
    for group in groups.values():
        ranks[group[0].share.first_rank] += len(group) * work(max(placed.length for placed in group), GAMMA)
    return max(ranks)


def figures(micro_batches: list[MicroBatch]) -> dict[str, float | None]:
    micro_batches = [batch for batch in micro_batches if batch]
    ideal, packed, fullest = 0.0, 0.0, 0
    for batch in micro_batches:
        lens, shares = [placed.length for placed in batch], [placed.share for placed in batch]
        of_batch = sum(work(n, GAMMA) for n in lens) / NUM_RANKS
        ideal += of_batch
        packed += of_batch * measure([lens, *[[]] * (NUM_RANKS - 1)], shares, GAMMA)["eff"]
        tokens = [0] * NUM_RANKS
        for share in shares:
            for rank, n in enumerate(share.chunk_lens, start=share.first_rank):
                tokens[rank] += n
        fullest = max(fullest, *tokens)
    padded = list(map(padded_work, micro_batches))
    return {"packed": packed / ideal, "padded": None if None in padded else sum(padded) / ideal, "fullest": fullest}


def ways(args: argparse.Namespace) -> dict[str, list[Way]]:
    """By name; of several the best in packed time counts."""
    true = GAMMA / 6 / D_MODEL  # 24 n d^2 + gamma 4 n^2 d, over 24 d^2
    whole_samples = f"g1n{NUM_RANKS}"
    found: dict[str, list[Way]] = {
        "as drawn": [lambda case: whole(case.drawn())],
        "BatchRebalanceSampler": [rebalanced],
        "the same, true cost": [partial(rebalanced, coefficient=true)],
    }
    if args.verl:
        found["verl"] = [verl(args.verl)]
    if args.automodel:
        found["SequentialBucketSampler"] = [bucketed(args.automodel)]
    if args.megatron:
        found["BalancedCPScheduler"] = [context_parallel(args.megatron, limit) for limit in LIMITS]
    return found | {
        "BalancedBatchSampler": [partial(planned, topology=whole_samples)],
        "the same, at most twice the mean": [partial(planned, topology=whole_samples, limit=2)],
        "the same, stacked": [stacked],
        "bags g8/4/2/1": [partial(planned, topology=f"g8/4/2/1n{NUM_RANKS // 8}", limit=2)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """packed/padded by way and case, and the fullest rank in the last case."""
    lines = [["", *(f"{mix}, {k}" for mix, k in CASES), "fullest"], ["---"] * (len(CASES) + 2)]
    for way in dict.fromkeys(row["way"] for row in rows):
        its = [row for row in rows if row["way"] == way]
        cells = ["/".join("-" if (n := row[of]) is None else f"{n:.2f}" for of in ("packed", "padded")) for row in its]
        lines.append([way, *cells, f"{its[-1]['fullest']:,.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    for name in ("verl", "megatron", "automodel"):
        parser.add_argument(f"--{name}", type=Path, help="a checkout")
    args = parser.parse_args()
    rows, of_others = [], ways(args)
    for mix, micro_batches in CASES:
        data = knapformer.DataMix.parse(mix)
        pool = [n for batch in range(16) for lens in data.draw_lengths(0, batch, NUM_RANKS) for n in lens]
        results: dict[str, list[dict[str, Any]]] = {}
        for seed in range(args.seeds):
            lengths = random.Random(f"{mix} {seed}").sample(pool, NUM_RANKS * BATCH_SIZE * micro_batches)
            case = Case(pool, lengths, micro_batches, seed)
            for name, tried in of_others.items():
                of_each = [figures(way(case)) for way in tried]
                results.setdefault(name, []).append(min(of_each, key=lambda found: found["packed"]))
            for name, cut in STATIC.items():
                results.setdefault(name, []).append(static(case, **cut))
        for way, values in results.items():
            row = {"mix": mix, "micro_batches": micro_batches, "way": way}
            for name in values[0]:
                each = [value[name] for value in values]
                row[name] = None if None in each else statistics.fmean(each)
            rows.append(row)
    print(table(rows))
    if args.json:
        configuration = {"ranks": NUM_RANKS, "gamma": GAMMA, "batch_size": BATCH_SIZE, "seeds": args.seeds}
        write_results(args.json, "others", configuration, rows=rows)


if __name__ == "__main__":
    main()
