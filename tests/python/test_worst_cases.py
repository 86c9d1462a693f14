"""The worst cases that docs/solver.md proves, against the best assignment of small cases, found by trying all."""

from __future__ import annotations

import itertools
import random

import pytest

from knapformer import Cluster, Plan, TrainedModel, WorkloadModel, plan

D_MODEL, GAMMA = 3072, 0.41
FLOPS_PER_S, BYTES_PER_S = 298e12, 120e9
# One block forward and nothing else, so that a plan's predicted time is that of its block.
CLUSTER = Cluster(flops_per_s=FLOPS_PER_S, node_bytes_per_s=BYTES_PER_S, node_latency_s=0, fixed_s=0)
MODEL = TrainedModel(mode="inference", num_parameters=0, num_blocks=1, routed=False)


def planned(lengths: list[int], topology: str, solver: str, work: list[float] | None = None) -> Plan:
    """All sequences are rank 0's. work: instead of the formula's."""
    num_ranks = sum(int(t.split("n")[0].split("/")[0]) * int(t.split("n")[1]) for t in topology[1:].split("+g"))
    others: list[list[int]] = [[] for _ in range(num_ranks - 1)]
    given = {} if work is None else {"work": [work, *others]}
    return plan(
        [lengths, *others], topology, d_model=D_MODEL, gamma=GAMMA, solver=solver, cluster=CLUSTER, model=MODEL, **given
    )


def least_highest(work: list[float], num_bags: int) -> float:
    """The least that the highest bag's work can be."""
    best = float("inf")
    for bags in itertools.product(range(num_bags), repeat=len(work)):
        sums = [0.0] * num_bags
        for w, bag in zip(work, bags, strict=True):
            sums[bag] += w
        best = min(best, max(sums))
    return best


@pytest.mark.parametrize("num_bags", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_cases_keep_the_proven_ratios(num_bags: int, size: int) -> None:
    rng = random.Random(f"{num_bags} {size}")
    formula = WorkloadModel(GAMMA)
    token = 24 * D_MODEL**2
    ratio = 4 / 3 - 1 / (3 * num_bags)
    exchanged = 4 * D_MODEL * 2 * (size - 1) / size / BYTES_PER_S * FLOPS_PER_S / token  # over the per-token layers
    nested = "/".join(str(size >> i) for i in range(size.bit_length()))
    worst = 0.0
    for _ in range(30):
        lengths = [round(2000 * 3 ** rng.random()) for _ in range(rng.randint(2 * num_bags, 8))]
        best = least_highest([formula.work(n, D_MODEL) for n in lengths], num_bags) / size
        greedy = planned(lengths, f"g{size}n{num_bags}", "greedy")
        assert max(greedy.workload_after) <= ratio * best + token
        worst = max(worst, max(greedy.workload_after) / best)
        balanced = planned(lengths, f"g{nested}n{num_bags}", "balanced")
        assert balanced.predicted_time <= (1 + exchanged) * (ratio * best + token) / FLOPS_PER_S
    assert worst > 1.08  # there are cases in which greedy is not the best


@pytest.mark.parametrize("num_bags", [2, 3, 5])
def test_the_ratio_of_greedy_is_attained_and_balanced_finds_the_best(num_bags: int) -> None:
    works = [float(w) for w in range(num_bags + 1, 2 * num_bags)] * 2 + [float(num_bags)] * 3
    lengths = [1000] * len(works)
    assert sum(works) == 3 * num_bags**2  # so the best is 3 * num_bags, which the planner finds
    scale = 1e13
    greedy, balanced = (
        max(planned(lengths, f"g1n{num_bags}", solver, [w * scale for w in works]).workload_after) / scale
        for solver in ("greedy", "balanced")
    )
    assert greedy == pytest.approx(4 * num_bags - 1) and balanced == pytest.approx(3 * num_bags)


def test_bags_of_several_sizes_have_no_constant_ratio() -> None:
    """Each of 9 equal sequences exceeds the capacity of a bag of one rank, so all go to the bag of two."""
    lengths = [4096] * 9
    one = WorkloadModel(GAMMA).work(4096, D_MODEL)
    for solver in ("greedy", "greedy_remaining"):
        assert max(planned(lengths, "g1n8+g2n1", solver).workload_after) == pytest.approx(4.5 * one)
    assert max(planned(lengths, "g1n8+g2n1", "balanced").workload_after) == pytest.approx(one)
