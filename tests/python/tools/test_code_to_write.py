"""The code that `doctor` prints, executed on two ranks, for every case: each sample is computed, and once."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from adapters import cases
from distributed.ranks import run_ranks
from knapformer.adapters.balance import balance, balanced, unbalance
from knapformer.tools.cli import main
from knapformer.tools.doctor.alternatives import alternatives
from knapformer.tools.doctor.code_to_write import code_of
from knapformer.tools.model_presets import PRESETS
from knapformer.tools.rank_lengths import MaskedLength
from knapformer.tools.ways import DrawnSteps, PlanCost

import knapformer
from knapformer import Cluster

LENGTHS = [[40, 7, 12], [64, 9, 1]]  # of each rank
WIDTH = 12
MASKED = [[MaskedLength(length, "causal") for length in lens] for lens in LENGTHS]
WAYS = ("sampler", "bags g2/1n1")


@dataclass(frozen=True)
class Case:
    preset: str
    way: str
    micro_batches: int = 1
    lengths: Any = ()
    mask: str = "full"
    num_heads: int = 0  # 0: the preset's

    def code(self) -> str:
        preset = PRESETS[self.preset]
        model = preset.trained_model()
        model = model.replace(num_heads=self.num_heads) if self.num_heads else model
        planning = PlanCost(d_model=preset.d_model, gamma=0.5, mask=self.mask, cluster=Cluster(), model=model)
        lengths = self.lengths or LENGTHS
        pool = [length for lens in lengths for length in lens]
        draw = DrawnSteps(planning, [[lengths] * self.micro_batches], pool, max_tokens_per_rank=10**6)
        return code_of(next(of for of in alternatives(draw, ["g2/1n1"]) if of.key == self.way), draw, preset)


CASES = [Case(name, way, count) for name, way, count in itertools.product(PRESETS, WAYS, (1, 2))] + [
    Case("flux", way, count, **masked)
    for way, count in itertools.product(WAYS, (1, 2))
    for masked in ({"mask": "causal"}, {"lengths": MASKED}, {"mask": "causal", "num_heads": 3})
]


def on_ranks(rank: int, world: int, codes: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """Of each code: how many samples, or tokens, this rank computed, and how many it drew, or all ranks load."""
    return [computed_by(code, rank, PRESETS[name].transformer) for name, code in codes]


def computed_by(code: str, rank: int, transformer: str) -> tuple[int, int]:
    computed: list[int] = []
    names: dict[str, Any] = {"knapformer": knapformer, "torch": torch, "pack": lambda rows: torch.cat([none, *rows])}
    none = torch.empty(0, WIDTH)

    def attended(x: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        q = x.unflatten(1, (3, 4))
        return names["balancer"].attention(q, q, q).flatten(1)

    if "transformer" in code:
        small = cases.of(transformer)
        dataset = small.samples()
        samples = dataset[rank::2]
        model = balance(small.make())
        adapter = balanced(model).adapter
        lens = [adapter.embed(model, adapter.read(model, [sample])).seq_lens[0] for sample in dataset]
        names["transformer"] = unbalance(model)
        model.register_forward_hook(lambda module, given, predictions: computed.append(len(predictions)))
        names |= {"dataset": dataset, "lengths": lens, "samples": samples, "seq_lens": lens[rank::2]}
        drawn = len(samples)
    else:
        lens = [length for of_rank in LENGTHS for length in of_rank]
        samples = [torch.randn(length, WIDTH) for length in LENGTHS[rank]]
        names |= {"dataset": lens, "lengths": lens, "samples": samples, "seq_lens": LENGTHS[rank]}
        names |= {"x": torch.cat(samples), "model": attended, "masks": ["causal"] * len(LENGTHS[rank])}
        drawn = sum(LENGTHS[rank])
    if "BalancedBatchSampler" in code:
        drawn = len(names["dataset"]) if rank == 0 else 0
        names |= {"masks": ["causal"] * len(lens)}
        if "transformer" not in code:
            names["model"] = lambda samples: computed.append(len(samples))
    exec(code, names)
    return sum(computed), drawn


@pytest.fixture(scope="module")
def outcomes() -> list[list[tuple[int, int]]]:
    return run_ranks(on_ranks, 2, [(case.preset, case.code()) for case in CASES], timeout_s=300)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_the_code_computes_every_sample_once(outcomes: list[list[tuple[int, int]]], number: int) -> None:
    computed, drawn = (sum(of[number][which] for of in outcomes) for which in (0, 1))
    assert computed == drawn > 0


def test_the_code_names_what_the_case_needs() -> None:
    for case in CASES:
        code = case.code()
        own = case.mask != "full" or bool(case.lengths) or not PRESETS[case.preset].transformer
        assert ("balance(transformer" in code) is not own
        assert (f"micro_batches={case.micro_batches}" in code) is (case.way == "sampler" or case.micro_batches > 1)
        assert ("mask='causal'" in code) is (case.mask != "full")
        assert ("masks=masks" in code) is bool(case.lengths)
        assert ("num_heads=3" in code) is (case.num_heads == 3 and case.way != "sampler")


def test_doctor_prints_that_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", "joint", "--ranks", "32", "--micro-batches", "2", "--steps", "2"]) == 0
    head, _, rest = capsys.readouterr().out.partition("losses weighed with knapformer.losses.\n")
    code = textwrap.dedent(rest[: rest.index("\nWith 24 heads")])
    assert head.splitlines()[-1] == "What to change: calls in the model, and "
    cost = "d_model=3072, gamma=0.41, mask='full', max_tokens_per_rank=144045"
    assert code.startswith(f'balancer = knapformer.SequenceBalancer("g4/2/1n8", {cost})\n')
    assert "planned=True" in code
    compile(code, "what doctor printed", "exec")
