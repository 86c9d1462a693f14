"""What ranks do on the simulated accelerator and on the CPU, for test_simulated_device and test_accelerator; and what
other such modules here share.

Kept apart from the tests so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

import os
from typing import Any

import simulated_device as sim
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from knapformer._torch import MaskTables
from knapformer.attention.kernels import Pairing
from torch import Tensor

from knapformer import BalancedLoader, BalancedStepLoader, SequenceBalancer


def lens_of(rank: int) -> list[int]:
    """A rank without sequences, one with many short ones, one with a long one."""
    return [[], [5, 3, 1, 4], [61], [7, 12]][rank % 4] if rank else [40, 2]


def lens_to_share(rank: int) -> list[int]:
    """Lengths of which nested bags share the longest, where models are 3072 wide."""
    return lens_of(rank) if rank else [300, 20]


def attend(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
    outs, begin = [], 0
    for n in seq_lens.tolist():
        q1, k1, v1 = (t[begin : begin + n].transpose(0, 1) for t in (q, k, v))
        outs.append(F.scaled_dot_product_attention(q1, k1, v1, enable_gqa=True).transpose(0, 1))
        begin += n
    return torch.cat(outs) if outs else q * 0 + (k.sum() + v.sum()) * 0


class _ReadsAll(torch.autograd.Function):
    """Stands in for attention's kernel: launches nothing, forward or backward; gives gradients for q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        k, v = ctx.saved_tensors
        return gradient, torch.empty_like(k), torch.empty_like(v)


def reads_all(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
    result: Tensor = _ReadsAll.apply(q, k, v)
    return result


def balanced_step(balancer: SequenceBalancer, rank: int, device: str) -> list[Tensor]:
    """Everything that a balancer moves, forward and backward: odd widths, several dtypes, duplicate rows and heads."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lens = lens_of(rank)
    num_tokens, num_heads, num_kv_heads, head_dim = sum(lens), 6, 2, 4
    leaves = [
        draw(num_tokens, num_heads * head_dim), draw(num_tokens, 3, dtype=torch.bfloat16),
        draw(len(lens), 5), draw(len(lens), 3, dtype=torch.bfloat16),
    ]  # fmt: skip
    x, half, per_sequence, half_per_sequence = inputs = [t.to(device).requires_grad_() for t in leaves]
    flags = (torch.arange(num_tokens) % 3 == 0).to(device)
    balancer.plan_routing(lens, 24)
    _, y, (half_y, flags_y), (of_chunk, half_of_chunk) = balancer.route(
        x, [half, flags], sequence_features=[per_sequence, half_per_sequence]
    )
    q = y.unflatten(1, (num_heads, head_dim))
    kv = q[:, :num_kv_heads] * 2
    o = balancer.attention(q, kv, kv.sin(), attend).flatten(1)
    # Whole numbers: their sums over ranks are the same in any order, and in bfloat16.
    o = o + of_chunk.sum() * 0 + half_y.sum(1, keepdim=True).to(o.dtype) * flags_y.unsqueeze(1)
    _, back = balancer.reverse_route(o)
    weights = torch.arange(back.numel(), dtype=torch.float64).view(back.shape).to(device) / max(1, back.numel())
    loss = (back * weights).sum() + of_chunk.square().sum() + (half_of_chunk * 2).sum()
    loss.backward()
    return [back.detach().cpu(), *(t.grad.cpu() for t in inputs)]


def balancers_agree(rank: int, world: int, topologies: list[str]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """By topology, the results of a step on the CPU, paired with those of each of two steps on the device."""
    group = sim.new_group()
    results = {}
    for topology in topologies:
        balancer = SequenceBalancer(topology, group=group, d_model=8)
        on_cpu = balanced_step(balancer, rank, "cpu")
        on_device = [balanced_step(balancer, rank, "sim") for _ in range(2)]
        results[topology] = [pair for step in on_device for pair in zip(on_cpu, step, strict=True)]
    return results


def attention_beside_others(rank: int, world: int, topologies: list[str]) -> list[list[tuple[Tensor, Tensor]]]:
    """By topology, results on the CPU and on the device, where a collective of another user of the group ends only
    after attention: FSDP's next all-gather may be as late."""

    def step(topology: str, backend: str) -> list[tuple[Tensor, Tensor]]:
        group = sim.new_group(backend=backend)
        balancer = SequenceBalancer(topology, group=group, d_model=8)
        lens = lens_of(rank)
        balancer.plan_routing(lens, 24)

        def attention(device: str) -> Tensor:
            rows = balancer.chunk_lens.sum().item()
            q = (torch.arange(rows * 24.0).view(-1, 6, 4) / 100 + rank).to(device)
            return balancer.attention(q, q, q.sin(), reads_all).cpu()

        on_cpu = attention("cpu")
        other = torch.ones(4, device="sim")
        begun = dist.all_reduce(other, group=group, async_op=True) if rank == 0 else None
        on_device = attention("sim")
        begun = begun or dist.all_reduce(other, group=group, async_op=True)
        assert begun is not None
        begun.wait()
        return [(on_cpu, on_device), (torch.full((4,), float(world)), other.cpu())]

    return [step(topology, backend) for topology in topologies for backend in ("cpu:gloo,sim:late", "sim:late")]


def frozen_in_turn_agrees(rank: int, world: int) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
    """What makes x is frozen in turn, where all ranks but the last have no rows. Gradients on the last rank, paired
    with those that a rank alone would have; and what made the host wait for the device."""
    balancer, pairs, syncs = SequenceBalancer(f"g{world}/1n1", group=sim.new_group(), d_model=8), [], []
    has_rows = rank == world - 1
    tokens = torch.arange(14.0 if has_rows else 0.0, dtype=torch.float64).view(-1, 2).to("sim")
    for trains in (True, False, True, True, False):
        weight, gain = (torch.ones(2, dtype=torch.float64, device="sim", requires_grad=True) for _ in range(2))
        balancer.plan_routing([3, 4] if has_rows else [], 2)
        with sim.counted() as counted:
            _, h, (again,) = balancer.route(tokens * weight if trains else tokens, [tokens])
            q = (h * gain).unflatten(1, (2, 1))
            _, y = balancer.reverse_route(balancer.attention(q, q, q, lambda q, k, v, _: q).flatten(1))
            (y * 3).sum().backward()
        syncs += counted.syncs
        assert h.requires_grad == trains and not again.requires_grad
        if has_rows and trains:
            pairs.append((3 * tokens.sum(0).cpu(), weight.grad.cpu()))
    return pairs, syncs


def devices_differ(rank: int, world: int) -> str:
    """What a step raises in which every other rank has its tensors on the device."""
    try:
        balanced_step(SequenceBalancer("g2n1", group=sim.new_group(), d_model=8), rank, "cpu" if rank % 2 else "sim")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tables_of_a_loader(
    rank: int, world: int, micro_batches: int | None, name: str
) -> list[tuple[list[Tensor], sim.Counted]]:
    """The results of a pass over a loader, and what was counted, on the CPU and on the device of this name. Only tables
    are copied: batches are made on it."""
    group = sim.new_group()
    lens = [[40 + 5 * rank + step, 3] for step in range(6 * (micro_batches or 1))]
    results = []
    for device in ("cpu", name):
        balancer = SequenceBalancer(f"g{world}n1", group=group, d_model=8)
        loader: Any
        if micro_batches is None:
            loader = BalancedLoader(lens, balancer, seq_lens=lambda own: own, empty=list)
        else:
            samples = [[{"x": torch.zeros(n)} for n in of_batch] for of_batch in lens]
            loader = BalancedStepLoader(samples, balancer, micro_batches, per_token=["x"])
        values = []
        with sim.counted() as counted:
            for _, plan in loader:
                own = sum(plan.seq_lens[rank]) if micro_batches is None else plan.tokens_after[rank]
                x = torch.arange(own * 4, dtype=torch.float32, device=device).view(own, 4, 1)
                if micro_batches is None:
                    _, x, _ = balancer.route(x)
                values.append(balancer.attention(x, x, x, lambda q, *_: q * 2))
        results.append(([x.cpu() for x in values], counted))
    return results


def samples_in_pinned_memory(rank: int, world: int) -> list[tuple[bool, bool]]:
    """For each chunk of a pass: whether another rank loaded it, and whether it lies in pinned memory. Rank 0 loads all
    samples of a step."""
    balancer = SequenceBalancer(f"g1n{world}", group=sim.new_group(), d_model=8)
    lens = [40, 30, 20, 10] if rank == 0 else []
    batches = [[{"x": torch.arange(n, dtype=torch.float32)} for n in lens] for _ in range(3)]
    balancer.plan_routing([1])
    q = torch.ones(1, 1, 1, device="sim")
    balancer.attention(q, q, q, lambda q, *_: q)  # by which the balancer knows the device
    loader: Any = BalancedStepLoader(batches, balancer, 1, per_token=["x"])
    chunks = []
    for samples, _ in loader:
        for sample, (_, begin, end) in zip(samples, loader.chunks, strict=True):
            with sim.counted() as counted:
                on_device = sample["x"].to("sim", non_blocking=True)
            assert torch.equal(on_device.cpu(), torch.arange(begin, end, dtype=torch.float32))
            chunks.append((rank > 0, sample["x"].is_pinned() and counted.pageable_copies == []))
    return chunks


def a_rank_that_cannot_pack(rank: int, world: int) -> tuple[str, int]:
    """Rank 1 runs out of memory in the group's first exchange. What this rank raises, and how many collectives it has
    launched."""
    balancer, message = SequenceBalancer("g1n2", group=sim.new_group(), d_model=8), ""
    balancer.plan_routing([8] if rank == 0 else [2], 4)
    x = torch.ones(8 if rank == 0 else 2, 4).to("sim")
    sim.register().fail_to_pack(rank == 1)
    with sim.counted() as counted:
        try:
            balancer.route(x)
        except Exception as error:
            message = str(error)
    return message, counted.collectives


def copies_for_two_streams(rank: int, world: int) -> list[int]:
    """How often index tables are copied to the device by two routes, and by two layers of attention that ask for what
    queries see and for where sequences lie: on the default stream, and on another."""
    balancer = SequenceBalancer(f"g{world}n1", group=sim.new_group(), d_model=8)
    balancer.plan_routing(lens_of(rank), 24)
    x = torch.arange(float(sum(lens_of(rank)))).to("sim")
    masks, pairing = MaskTables(["causal"], [300]), Pairing([3, 4], [3, 4])
    copies = []
    for stream in (torch.accelerator.current_stream(), torch.Stream(device="sim")):
        with sim.counted() as counted, stream:
            for _ in range(2):
                balancer.route(x)
                masks.blocks_on(x.device)
                pairing.offsets_on(x.device)
        copies.append(counted.copies_to_device)
    return copies


def a_missing_wait(rank: int, world: int) -> tuple[bool, bool]:
    """Whether numbers read before, and after, waiting for a collective are right."""
    group, module = sim.new_group(), sim.register()
    x = torch.full((4,), float(rank + 1), device="sim")
    received = torch.zeros(4, device="sim")
    module.hold_collectives(True)
    work = dist.all_to_all_single(received, x, group=group, async_op=True)
    early = received.cpu()
    module.hold_collectives(False)
    work.wait()
    expected = torch.tensor([r + 1.0 for r in range(world) for _ in range(4 // world)])
    return torch.equal(early, expected), torch.equal(received.cpu(), expected)


def an_input_overwritten_too_soon(rank: int, world: int) -> bool:
    group, module = sim.new_group(), sim.register()
    x, received = torch.ones(world, device="sim"), torch.zeros(world, device="sim")
    module.hold_collectives(True)
    work = dist.all_to_all_single(received, x, group=group, async_op=True)
    x.fill_(7)
    module.hold_collectives(False)
    work.wait()
    return torch.equal(received.cpu(), torch.ones(world))


def steps_without_a_cpu_backend(
    rank: int, world: int
) -> tuple[list[Tensor], list[Tensor], sim.Counted, list[int], int]:
    """The results of a step on the device with a group for CPU and device, and with one for the device alone. For the
    latter also: what planning counted, CPU numbers that route exchanged, and how many groups a second balancer made."""
    expected = balanced_step(SequenceBalancer("g2/1n1", group=sim.new_group(), d_model=8), rank, "sim")
    alone = sim.new_group(backend="sim:late")
    balancer = SequenceBalancer("g2/1n1", group=alone, d_model=8)
    with sim.counted() as counted:
        balancer.plan_routing(lens_of(rank), 24)
        balancer.finish_planning(balancer.start_planning(lens_of(rank), 24))
    _, numbers, _ = balancer.route(torch.full((sum(lens_of(rank)), 1), rank))
    before = len(c10d._world.pg_names)
    again = SequenceBalancer("g2/1n1", group=alone, d_model=8)
    got = balanced_step(again, rank, "sim")
    return expected, got, counted, numbers.flatten().tolist(), len(c10d._world.pg_names) - before


def a_balancer_without_an_interface(rank: int, world: int) -> str:
    """What a rank raises where Gloo, which the group for the CPU is of, has no network interface."""
    group = sim.new_group(backend="sim:late")
    os.environ["GLOO_SOCKET_IFNAME"] = "no such interface"
    try:
        SequenceBalancer("g1n1", group=group, d_model=8)
    except RuntimeError as error:
        return str(error)
    return ""
