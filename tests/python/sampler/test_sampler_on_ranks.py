"""BalancedBatchSampler in a process group: ranks whose samplers differ are an error on all of them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from sampler.sampler_ranks import COMMON, LENGTHS, one_is_late, passes

from knapformer import BalancedBatchSampler, Calibration, Cluster, Cost, TrainedModel

CALIBRATION = Calibration(0.5, 1e-15, 64, True, 0.01, 0.1, 0.01)

# Of each argument: another value than that of COMMON or the default, and what it takes beside it.
OTHER = {
    "lengths": (LENGTHS[::-1], {}),
    "batch_size": (3, {}),
    "d_model": (128, {}),
    "micro_batches": (2, {}),
    "topology": ("g3n1", {}),
    "work": ([1.5 * length for length in LENGTHS], {}),
    "masks": (["causal"] * 35 + ["full"], {"masks": ["causal"] * 36}),
    "repeats": ([2] * 36, {}),
    "weights": ([1.0, 2.0] * 18, {}),
    "shuffle": (False, {}),
    "seed": (1, {}),
    "drop_last": (True, {}),
    "allow_empty": (True, {}),
    "max_tokens_per_rank": (1000, {}),
    "gamma": (0.4100001, {}),
    "mask": ("causal", {}),
    "rank_speed": ([1.0, 1.0, 0.9999999], {}),
    "cluster": (Cluster(flops_per_s=298000000000001.0), {"cluster": Cluster()}),
    "model": (TrainedModel(num_parameters=12000000001.0), {"model": TrainedModel()}),
    "num_heads": (8, {}),
    "sync": ("step", {}),
    "effort": ("high", {}),
}


def digest(rank: int = 0, num_replicas: int = 3, **arguments) -> str:
    return BalancedBatchSampler(**(COMMON | {"num_replicas": num_replicas, "rank": rank} | arguments)).digest


def test_every_argument_but_the_rank_is_in_the_digest():
    parameters = inspect.signature(BalancedBatchSampler.__init__).parameters.keys() - {"cost", "settings"}
    fields = {field.name for field in dataclasses.fields(Cost)}
    assert parameters | fields == OTHER.keys() | {"self", "num_replicas", "rank"}
    assert digest() == digest(rank=2) != digest(num_replicas=1)
    for name, (other, beside) in OTHER.items():
        assert digest(**beside) == digest(**beside) != digest(**beside | {name: other}), name
    sampler = BalancedBatchSampler(**COMMON, num_replicas=3, rank=0)
    digests = {sampler.digest}
    sampler.set_epoch(1)
    digests.add(sampler.digest)
    sampler.load_state_dict(sampler.state_dict(num_steps=1))
    assert sampler.digest not in digests and len(digests) == 2


@pytest.mark.parametrize("name, dtypes", [("lengths", ("int64", "int32", "uint16")), ("work", ("float64", "float32"))])
def test_values_have_one_digest_in_any_type(name, dtypes):
    values = [[*LENGTHS], torch.tensor(LENGTHS)] if name == "lengths" else [[float(length) for length in LENGTHS]]
    values += [np.array(LENGTHS, dtype) for dtype in dtypes] + [np.repeat(np.array(LENGTHS, dtypes[0]), 2)[::2]]
    assert len({digest(**{name: value}) for value in values}) == 1


@pytest.mark.parametrize(
    "alike",
    [
        [{"gamma": gamma} for gamma in (0.5, np.float32(0.5), Fraction(1, 2), CALIBRATION)],
        [{"cluster": cluster} for cluster in (None, Cluster())],
        [{"rank_speed": speed} for speed in ([1, 1, 0.5], (1.0, 1.0, 0.5), np.array([1, 1, 0.5]))],
        [{"num_heads": 8}, {"num_heads": np.int64(8)}, {"model": TrainedModel(num_heads=8)}],
        [{"batch_size": size, "seed": size, "max_tokens_per_rank": 999 + size} for size in (1, np.int64(1))],
        [{"topology": topology} for topology in (None, "g1n3")],
        [{"effort": effort} for effort in (None, "low")],
        [{"shuffle": shuffle, "drop_last": shuffle} for shuffle in (True, np.bool_(True))],
    ],
)
def test_what_plans_alike_has_one_digest_in_any_form(alike):
    assert len({digest(**arguments) for arguments in alike}) == 1


def test_ranks_whose_samplers_differ_are_an_error_on_all_of_them():
    names = {"cluster": "cluster.flops_per_s", "model": "model.num_parameters", "num_heads": "model.num_heads"}
    cases = {
        f"{names.get(name, name)}: rank 0 has .+, rank 2 has .+": {
            rank: beside | ({name: other} if rank == 2 else {}) for rank in range(3)
        }
        for name, (other, beside) in OTHER.items()
    } | {
        "lengths: rank 0 has 36 integers of sum 1952, hash .*, rank 1 has 36 integers of sum 1952, hash .*": {
            1: {"lengths": torch.tensor(LENGTHS).roll(1)}
        },
        "seed: rank 0 has 0, rank 1 has 4; epoch: rank 0 has 0, rank 1 has 3": {1: {"seed": 4, "epoch": 3}},
        "next_sample: rank 0 has 6, rank [12] has 0": {0: {"first": 6}},
    }
    outcomes = run_ranks(passes, 3, [*cases.values(), {}])
    *messages, lists = zip(*outcomes, strict=True)
    for expected, of_ranks in zip(cases, messages, strict=True):
        assert len(set(of_ranks)) == 1 and re.fullmatch(f"StateError: {expected}", of_ranks[0]), (expected, of_ranks)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(lists))) == list(range(36))


def test_a_rank_that_begins_no_pass_is_an_error_on_all_ranks():
    """It begins after the others have given up."""
    for message, waited_s in run_ranks(one_is_late, 3, group_timeout_s=4):
        assert message.startswith(
            "StateError: passes of samplers: waited 4 s for ranks [1] to begin number 1, expected"
        )
        assert waited_s < 20
