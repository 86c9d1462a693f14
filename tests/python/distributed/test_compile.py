"""Compiled blocks with their exchange, on real ranks. Oracle: the same block, eager, without a balancer."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from knapformer.checkpointing import EXCHANGES
from knapformer.compile import AttentionTables
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor

from knapformer import SequenceBalancer

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
WIDTH = HEADS * HEAD_DIM


def test_a_cuda_graph_holds_no_exchange() -> None:
    """Inductor's mode "reduce-overhead" would repeat the exchange of the step in which the graph was recorded."""
    for op in EXCHANGES:
        assert torch.Tag.cudagraph_unsafe in op.tags, op


def segments(seq_lens: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(seq_lens.numel()), seq_lens.long())


def masked_attention(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
    """Of all tokens with all, masked to each one's sequence: of one shape, whatever the lengths are."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(segment[:, None] != segment, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Tensor | AttentionTables) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        if isinstance(attention, AttentionTables):
            o = attention.attention(*qkv, masked_attention)
        else:
            o = masked_attention(*qkv, attention)
        return x + nn.functional.gelu(self.to_out(o.flatten(1)))


class Compiled:
    """A compiled block, and how often it was compiled."""

    def __init__(self, topology: str, backend: str) -> None:
        torch.manual_seed(0)
        self.block = Block().double()
        self.compiled = torch.compile(self.block, fullgraph=True, dynamic=True, backend=backend)
        torch._dynamo.utils.counters.clear()
        self.balancer = SequenceBalancer(topology)

    @property
    def num_compiled(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def check_step(self, rank: int, lens: list[list[int]]) -> None:
        """Two layers of the block, forward and backward."""
        own = torch.tensor(lens[rank], dtype=torch.int64)
        x = torch.randn(int(own.sum()), WIDTH, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(2):
            y = self.block(y, segments(own))
        y.square().sum().backward()
        expected = [x.grad, *(parameter.grad for parameter in self.block.parameters())]
        for gradient in expected[1:]:
            dist.all_reduce(gradient)
        x.grad = None
        self.block.zero_grad(set_to_none=True)

        self.balancer.plan_routing(lens[rank], WIDTH)
        _, z, _ = self.balancer.route(x)
        tables = AttentionTables.of(self.balancer, z.device, layout=segments)
        for _ in range(2):
            z = self.compiled(z, tables)
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
    # Lengths, their number, tokens and splits have changed in every step.
    assert counts == [1] * num_steps

    # A rank without tokens: were an exchange without rows left out of its graph, its peer would wait.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled.check_step(rank, [[1], []])
    collectives = Counter({e.key: e.count for e in profile.key_averages() if e.key.startswith("c10d::")})
    assert collectives["c10d::alltoall_base_"] == 2 * (2 + 2 * 2), collectives  # routes and two layers, and backward


def run_few_tokens(rank: int, world_size: int) -> None:
    """None and one are compiled on their own: six ways at most in which chunks and attention can have 0, 1 or more
    tokens, and one where the first ones happened to be of one size."""
    rng = random.Random(4)
    compiled = Compiled("g2n1", "aot_eager")
    for _ in range(25):
        lens = [[rng.choice([1, 1, 2, 9]) for _ in range(rng.choice([0, 0, 1, 3]))] for _ in range(2)]
        compiled.check_step(rank, lens)
    assert 1 < compiled.num_compiled <= 7
    Compiled("g1n2", "aot_eager").check_step(rank, [[3, 2], [4]])
    nested = Compiled("g2/1n1", "aot_eager")  # two levels; the second step shares nothing
    for lens in ([[40, 2], [3, 2]], [[9], [9]], [[2, 2], [50, 3]]):
        nested.check_step(rank, lens)
    assert nested.num_compiled <= 4
    check_modes(rank)


def check_modes(rank: int) -> None:
    """Without gradients, and beside a rank that is not compiled."""
    compiled = Compiled("g2n1", "aot_eager")
    compiled.balancer.plan_routing([[5, 3], [9]][rank], WIDTH)
    tables = AttentionTables.of(compiled.balancer, torch.device("cpu"), layout=segments)
    x = torch.randn(tables.rows[0].shape[0], WIDTH, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expected = compiled.block(x, tables)
            output = (compiled.compiled if rank == 0 else compiled.block)(x, tables)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_a_compiled_block_serves_all_lengths(tmp_path: Path) -> None:
    run_ranks(run_compiled, 2, "inductor", 50, timeout_s=500, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


def test_few_tokens_compile_few_times() -> None:
    run_ranks(run_few_tokens, 2, timeout_s=300)
