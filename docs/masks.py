"""Prints what planning by exact pairs of masks gains, beside what the cost model promises, for docs/masks.md.

    torchrun --nproc-per-node 2 docs/masks.py     # gains and promises: about three minutes on two idle cores
    torchrun --nproc-per-node 1 docs/masks.py     # GAMMA and CPU of the two examples, fitted to steps of one sample

Ways of balancing take turns. The time of a step is the median of its runs, the first steps left out. A promise is the
cost model's: it predicts the step of each plan by the pairs that the masks leave, whatever was planned by.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import knapformer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

EXAMPLES = ("train_causal_video", "train_unified")
WAYS = ("none", "length", "mask")
TOPOLOGY, BATCH_SIZE, LONGEST = "g2/1n1", 8, 2400  # the examples' own batch size and longest sample
NUM_STEPS, NUM_WARMUP, NUM_ROUNDS = 25, 5, 3


def seconds_of(module: Any, *options: str) -> torch.Tensor:
    """Of each step."""
    with contextlib.redirect_stdout(io.StringIO()):
        log = module.train(module.parse_arguments(list(options)))
    seconds = torch.tensor([entry["seconds"] for entry in log])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds[NUM_WARMUP:]


def samples_of(module: Any, step: int, num_ranks: int, batch_size: int) -> tuple[list[list[int]], list[list[str]]]:
    """Lengths and masks of each rank."""
    numbers = range(step * batch_size, (step + 1) * batch_size)
    ranks = [[module.draw_sample(number, LONGEST) for number in numbers[rank::num_ranks]] for rank in range(num_ranks)]
    return [[len(s.times) for s in of] for of in ranks], [[s.mask for s in of] for of in ranks]


def fit(module: Any) -> None:
    """seconds = fixed + tokens x of_token + pairs x of_pair, by least squares of the relative errors."""
    num_steps, rows = 100, []
    seconds = seconds_of(module, "--balance", "none", "--batch-size", "1", "--steps", str(num_steps)).double()
    for step in range(NUM_WARMUP, num_steps):
        ((num_tokens,),), ((mask,),) = samples_of(module, step, 1, 1)
        rows.append([1, num_tokens, knapformer.attention_pairs(mask, num_tokens)])
    weighted = torch.tensor(rows, dtype=torch.float64) / seconds.unsqueeze(1)
    scale = weighted.norm(dim=0)
    fitted = torch.linalg.lstsq(weighted / scale, torch.ones_like(seconds)).solution / scale
    error = (weighted @ fitted - 1).square().mean().sqrt()
    fixed, of_token, of_pair = fitted.tolist()
    passes = 3 * module.BLOCKS  # a backward pass computes twice as much as a forward pass
    layers, attention = of_token / (passes * 24 * module.WIDTH**2), of_pair / (passes * 4 * module.WIDTH)  # of a FLOP
    constants = f"gamma {attention / layers:.2f}, {1e-9 / layers:.0f} GFLOP/s, fixed {1e3 * fixed:.1f} ms"
    print(f"{module.__name__}: {constants}; relative error {error:.3f}", flush=True)


def predicted_s(module: Any, plan: knapformer.Plan, lens: list[list[int]], masks: list[list[str]]) -> float:
    """By the pairs of the masks."""
    of_ranks = [[0.0, 0.0, 0.0] for _ in range(plan.num_ranks)]
    samples = [sample for rank in zip(lens, masks, strict=True) for sample in zip(*rank, strict=True)]
    places = zip(plan.first_rank_of_sequence, plan.degree_of_sequence, strict=True)
    for (num_tokens, mask), (first, degree) in zip(samples, places, strict=True):
        work = 24 * num_tokens * module.WIDTH**2
        of_pairs = module.GAMMA * 4 * module.WIDTH * knapformer.attention_pairs(mask, num_tokens)
        for of_rank in of_ranks[first : first + degree]:
            of_rank[0] += work / degree / module.CPU.flops_per_s
            of_rank[1 if degree == 1 else 2] += of_pairs / degree / module.CPU.flops_per_s
    return knapformer.predict_micro_batch(plan, measured=[(a, b, c) for a, b, c in of_ranks]).total_s


def promise(module: Any) -> dict[str, float]:
    """Seconds of all steps, by way."""
    total = dict.fromkeys(WAYS, 0.0)
    for step in range(NUM_WARMUP, NUM_STEPS):
        lens, masks = samples_of(module, step, 2, BATCH_SIZE)
        cost = knapformer.Cost(d_model=module.WIDTH, gamma=module.GAMMA, cluster=module.CPU, model=module.MODEL)
        as_if_full = [[knapformer.WorkloadModel(module.GAMMA).work(n, module.WIDTH) for n in of] for of in lens]
        by_length = knapformer.plan(lens, TOPOLOGY, masks=masks, work=as_if_full, cost=cost)
        by_mask = knapformer.plan(lens, TOPOLOGY, masks=masks, cost=cost)
        plans = {"none": knapformer.plan_home(by_mask), "length": by_length, "mask": by_mask}
        for way, plan in plans.items():
            total[way] += predicted_s(module, plan, lens, masks)
    return total


def compare(module: Any) -> None:
    options = ("--topology", TOPOLOGY, "--steps", str(NUM_STEPS), "--batch-size", str(BATCH_SIZE))
    rounds = [[seconds_of(module, "--balance", way, *options) for way in WAYS] for _ in range(NUM_ROUNDS)]
    if dist.get_rank() > 0:
        return
    steps = [torch.stack(of_way).median(0).values for of_way in zip(*rounds, strict=True)]
    measured, promised = {way: s.sum().item() for way, s in zip(WAYS, steps, strict=True)}, promise(module)
    print(module.__name__)
    for what, total in (("measured", measured), ("promised", promised)):
        of_way = ", ".join(f"{way} {1e3 * s / len(steps[0]):.0f} ms" for way, s in total.items())
        gains = ", ".join(f"over {way} {total[way] / total['mask']:.3f}" for way in ("none", "length"))
        print(f"  {what}: {of_way}; by mask {gains}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in EXAMPLES:
        (fit if dist.get_world_size() == 1 else compare)(importlib.import_module(name))
    gc.collect()  # frees balancers, which hold the group
    dist.destroy_process_group()
