"""A planner by mixed-integer programming, in the formulation of FlexSP (Wang et al., ASPLOS 2025), solved by HiGHS.

There are virtual groups of 1, 2, 4 and 8 ranks, as many of each size as the ranks allow; m_p says whether group p is
formed, and n_pk how many sequences of bucket k it takes:

    minimise    T
    such that   sum_p size_p m_p <= ranks            sum_p n_pk = sequences of bucket k
                sum_k cost(k, size_p) n_pk <= T      and 0 where the group is not formed

Lengths are put into buckets by dynamic programming, so that the work inside a bucket differs as little as can be.
Three changes help it beyond the original, so that it shows what the formulation can do: a bucket costs the mean and not
the longest of its sequences; the search starts from the best plan with groups of one size, whose time is U; and two
kinds of rows exclude plans that are no better than that, or equal to another plan: sum_k cost n_pk <= U m_p, and
m_p >= m_(p+1) for groups of one size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np

SIZES = (8, 4, 2, 1)


def buckets_of(work: np.ndarray, num_buckets: int) -> list[list[int]]:
    """Sequences by bucket, ascending in work: minimises the sum, over sequences, of (bucket's most work - own work)."""
    values, inverse, counts = np.unique(work, return_inverse=True, return_counts=True)
    num = len(values)
    num_buckets = min(num_buckets, num)
    count_sum = np.concatenate([[0], np.cumsum(counts)])
    work_sum = np.concatenate([[0], np.cumsum(counts * values)])
    best = np.full((num_buckets + 1, num + 1), np.inf)
    cut = np.zeros((num_buckets + 1, num + 1), dtype=int)
    best[0, 0] = 0
    for k in range(1, num_buckets + 1):
        for end in range(1, num + 1):
            waste = (count_sum[end] - count_sum[:end]) * values[end - 1] - (work_sum[end] - work_sum[:end])
            total = best[k - 1, :end] + waste
            cut[k, end] = int(np.argmin(total))
            best[k, end] = total[cut[k, end]]
    ends = [num]
    for k in range(num_buckets, 0, -1):
        ends.append(int(cut[k, ends[-1]]))
    bucket_of_value = np.searchsorted(np.array(ends[-2::-1]), np.arange(num), side="right")
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    for sequence in np.argsort(work, kind="stable"):
        buckets[bucket_of_value[inverse[sequence]]].append(int(sequence))
    return buckets


@dataclass
class Program:
    sizes: np.ndarray  # of the virtual groups
    counts: np.ndarray  # sequences of each bucket
    cost: dict[int, np.ndarray]  # by size of group: what a sequence of each bucket takes, in units of the ideal time

    def one_size_start(self) -> tuple[float, np.ndarray]:
        """The best plan with groups of one size: its time, and its sequences by group and bucket."""
        best: tuple[float, np.ndarray] | None = None
        for size in SIZES:
            heap = [(0.0, int(p)) for p in np.flatnonzero(self.sizes == size)]
            taken = np.zeros((len(self.sizes), len(self.counts)))
            for k in reversed(range(len(self.counts))):
                for _ in range(int(self.counts[k])):
                    load, p = heap[0]
                    taken[p, k] += 1
                    heapq.heapreplace(heap, (load + self.cost[size][k], p))
            time = max(load for load, _ in heap)
            if best is None or time < best[0]:
                best = time, taken
        assert best is not None
        return best

    def solve(self, seconds: float) -> np.ndarray:
        """The number of sequences by group and bucket."""
        num_groups, num_buckets = len(self.sizes), len(self.counts)
        num_ranks = int(self.sizes[0]) * int(np.count_nonzero(self.sizes == self.sizes[0]))
        start_time, start = self.one_size_start()
        columns = 1 + num_groups + np.arange(num_groups * num_buckets).reshape(num_groups, num_buckets)
        free = highspy.kHighsInf
        rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []
        rows.append((1 + np.arange(num_groups), self.sizes.astype(float), -free, float(num_ranks)))
        for k in range(num_buckets):
            rows.append((columns[:, k], np.ones(num_groups), float(self.counts[k]), float(self.counts[k])))
        for p in range(num_groups):
            cost = self.cost[int(self.sizes[p])]
            rows.append((np.append(columns[p], 0), np.append(cost, -1.0), -free, 0.0))
            rows.append((np.append(columns[p], 1 + p), np.append(cost, -start_time), -free, 0.0))
            if p + 1 < num_groups and self.sizes[p] == self.sizes[p + 1]:
                rows.append((np.array([1 + p, 2 + p]), np.array([1.0, -1.0]), 0.0, free))

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = 1 + num_groups + columns.size, len(rows)
        lp.col_cost_ = np.append(1.0, np.zeros(lp.num_col_ - 1))
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.concatenate([[free], np.ones(num_groups), np.tile(self.counts, num_groups)]).astype(float)
        lp.integrality_ = [highspy.HighsVarType.kContinuous] + [highspy.HighsVarType.kInteger] * (lp.num_col_ - 1)
        lp.row_lower_ = np.array([row[2] for row in rows])
        lp.row_upper_ = np.array([row[3] for row in rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(row[0]) for row in rows])
        lp.a_matrix_.index_ = np.concatenate([row[0] for row in rows])
        lp.a_matrix_.value_ = np.concatenate([row[1] for row in rows])
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("time_limit", seconds)
        highs.passModel(lp)
        solution = highspy.HighsSolution()
        formed = (start.sum(axis=1) > 0).astype(float)
        solution.col_value = list(np.concatenate([[start_time], formed, start.ravel()]))
        highs.setSolution(solution)
        highs.run()
        found = highs.getSolution()
        if not found.value_valid:
            return start
        return np.rint(np.array(found.col_value)[1 + num_groups :]).reshape(num_groups, num_buckets)


def plan(
    work: np.ndarray, cost: Callable[[int, int], float], num_ranks: int, seconds: float, num_buckets: int = 24
) -> list[tuple[int, int]]:
    """For each sequence the first rank and the size of its group.

    work: FLOPs of each sequence. cost(sequence, size): the time that the sequence takes each rank of a group of that
    size, in units of the ideal time. seconds: the time limit of the search.
    """
    buckets = buckets_of(work, num_buckets)
    program = Program(
        sizes=np.array([size for size in SIZES for _ in range(num_ranks // size)]),
        counts=np.array([len(bucket) for bucket in buckets]),
        cost={size: np.array([np.mean([cost(i, size) for i in bucket]) for bucket in buckets]) for size in SIZES},
    )
    left = program.solve(seconds)
    # Groups of descending size pack into nodes without a gap, since the sizes divide each other. Within a bucket the
    # longest sequence goes to the group with the least work so far that still has a place of the bucket.
    first_rank, rank = {}, 0
    for p in np.flatnonzero(left.sum(axis=1) > 0):
        first_rank[int(p)] = rank
        rank += int(program.sizes[p])
    load = np.zeros(len(program.sizes))
    places = [(0, 0)] * len(work)
    for k in reversed(range(len(buckets))):
        for i in reversed(buckets[k]):
            p = min((p for p in first_rank if left[p, k] > 0), key=lambda p: load[p])
            left[p, k] -= 1
            load[p] += work[i] / program.sizes[p]
            places[i] = first_rank[p], int(program.sizes[p])
    return places
