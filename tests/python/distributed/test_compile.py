"""Compiled blocks with a balancer's attention in them, on real ranks. Oracle: the same block, eager, without one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from knapformer.models import PackedAttention
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor

from knapformer import SequenceBalancer

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
WIDTH = HEADS * HEAD_DIM

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        return x + nn.functional.gelu(self.to_out(attention(*qkv).flatten(1)))


class Compiled:
    """A compiled block, and how many graphs were compiled of it."""

    def __init__(self, topology: str, backend: str) -> None:
        torch.manual_seed(0)
        self.block = Block().double()
        self.compiled = torch.compile(self.block, dynamic=True, backend=backend)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.balancer = SequenceBalancer(topology)

    @property
    def num_compiled(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def check_step(self, rank: int, lens: list[list[int]]) -> None:
        """Two layers of the block, forward and backward."""
        own, kernel = lens[rank], PackedAttention()
        x = torch.randn(sum(own), WIDTH, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(2):
            y = self.block(y, lambda q, k, v: kernel(q, k, v, own))
        y.square().sum().backward()
        expected = [x.grad, *(parameter.grad for parameter in self.block.parameters())]
        for gradient in expected[1:]:
            dist.all_reduce(gradient)
        x.grad = None
        self.block.zero_grad(set_to_none=True)

        self.balancer.plan_routing(own, WIDTH)
        _, z, _ = self.balancer.route(x)
        for _ in range(2):
            z = self.compiled(z, self.balancer.attention)
        _, z = self.balancer.reverse_route(z)
        z.square().sum().backward()
        gradients = [x.grad, *(parameter.grad for parameter in self.block.parameters())]
        for gradient in gradients[1:]:
            dist.all_reduce(gradient)
        torch.testing.assert_close(z, y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)
        self.block.zero_grad(set_to_none=True)


def changing_lens(rng: random.Random) -> list[list[int]]:
    return [[rng.randint(1, 20) for _ in range(rng.randint(1, 6))] + [rng.randint(2, 30)] for _ in range(2)]


def run_compiled(rank: int, world_size: int, backend: str, num_steps: int) -> None:
    inductor.compile_threads = 1
    inductor.cpp.vec_isa_ok = False  # else it tries, for seconds each, which vector instructions can be compiled
    rng = random.Random(3)
    compiled = Compiled("g2n1", backend)
    counts = []
    for _ in range(num_steps):
        compiled.check_step(rank, changing_lens(rng))
        counts.append(compiled.num_compiled)
    # Lengths, their number, tokens and splits have changed in every step. One graph before attention, one after it.
    assert counts == [2] * num_steps, counts

    # A rank without tokens: were an exchange without rows left out of its graph, its peer would wait.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled.check_step(rank, [[1], []])
    collectives = Counter({e.key: e.count for e in profile.key_averages() if e.key.startswith("c10d::")})
    assert collectives["c10d::alltoall_base_"] == 2 * (2 + 2 * 2), collectives  # routes and two layers, and backward


def test_a_compiled_block_serves_all_lengths(tmp_path: Path) -> None:
    run_ranks(run_compiled, 2, "inductor", 20, timeout_s=500, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
