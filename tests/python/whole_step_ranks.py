"""What the ranks of test_whole_step do: one optimizer step of K micro-batches, in each of the three ways to balance it.

The oracle, `alone`, computes one sample at a time in one process, with means as sums over explicit divisors. Kept apart
from the test so that a started rank imports nothing of pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from knapformer.losses import token_mean
from knapformer.models import PackedAttention, varlen_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from knapformer import BalancedBatchSampler, BalancedStepLoader, Cluster, Plan, SequenceBalancer, TrainedModel

LENGTHS = (13, 1, 40, 5, 5, 2, 3, 7, 21, 9, 90, 4, 4, 8, 1, 30, 2, 6, 11, 17, 25, 3, 19)
CHANNELS, WIDTH, HEADS = 3, 16, 4
# Exchanges cost next to nothing: with few micro-batches the planner shares long samples.
CLUSTER = Cluster(flops_per_s=1e9, node_bytes_per_s=1e12, network_bytes_per_s=1e12)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Piece = tuple[int, int, int]  # of a sample: its number, and its tokens [begin, end)


@dataclass(frozen=True)
class Case:
    way: str  # "sampler", "loader" or "model"
    topology: str
    micro_batches: int
    wrapper: str  # "ddp" or "fsdp"
    mean: str  # over "token" or "sample"
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    gradients: dict[str, Tensor]
    pieces: list[Piece]  # that this rank computed
    num_shared: int  # samples of the step that several ranks compute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(CHANNELS + 1, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, position: Tensor, attention: Attention, balancer: SequenceBalancer | None) -> Tensor:
        """With a balancer, tokens are routed to the ranks of their chunks, and back."""
        x = self.embed(torch.cat([x, (0.1 * position).sin().unsqueeze(1)], 1))
        if balancer is not None:
            _, x, _ = balancer.route(x)
        for block in self.blocks:
            x = block(x, attention)
        if balancer is not None:
            _, x = balancer.reverse_route(x)
        return self.head(x)


def new_model() -> Model:
    torch.manual_seed(3)
    return Model().double()


def draw(number: int, length: int) -> tuple[Tensor, Tensor]:
    """Input and target of a sample."""
    generator = torch.Generator().manual_seed(number)
    x, target = torch.randn(2, length, CHANNELS, generator=generator, dtype=torch.float64)
    return x, target


def alone(mean: str, lengths: Sequence[int]) -> dict[str, Tensor]:
    model = new_model()
    for number, length in enumerate(lengths):
        x, target = draw(number, length)
        out = model(
            x, torch.arange(length), lambda q, k, v, n=length: varlen_attention(q, k, v, torch.tensor([n])), None
        )
        divisor = sum(lengths) if mean == "token" else len(lengths) * length
        ((out - target).square().mean(1).sum() / divisor).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def model_of(case: Case) -> TrainedModel | None:
    """In every other case the ranks that share a sample cut its queries: planned for one head, all of them do."""
    return TrainedModel(num_heads=1, cuts_queries=True) if case.mean == "sample" else None


def gradient_error(outcome: Outcome, wanted: dict[str, Tensor]) -> float:
    """The relative error of the parameter's gradient that is furthest off."""
    return max(float((outcome.gradients[name] - g).norm() / g.norm()) for name, g in wanted.items())


def uncovered(outcomes: Sequence[Outcome], lengths: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The pieces of each sample whose tokens the ranks did not compute exactly once each."""
    pieces: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(lengths))}
    for number, begin, end in sorted(piece for outcome in outcomes for piece in outcome.pieces):
        pieces[number].append((begin, end))
    return {
        number: of_sample
        for number, of_sample in pieces.items()
        if [token for piece in of_sample for token in range(*piece)] != list(range(lengths[number]))
    }


class Step:
    """A model under its wrapper, and the micro-batches that it has computed."""

    def __init__(self, case: Case, balancer: SequenceBalancer) -> None:
        self._case, self._balancer = case, balancer
        self._model = new_model()
        if case.wrapper == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self._model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        self._run = DistributedDataParallel(self._model) if case.wrapper == "ddp" else self._model
        self.pieces: list[Piece] = []

    def micro_batch(
        self, pieces: Sequence[Piece], x: Tensor, target: Tensor, *, local: bool = False, routed: bool = False
    ) -> None:
        """x, target: of the pieces, packed. local: no sample is shared, and no balancer is used. routed: the pieces are
        on their home ranks, and the balancer routes them."""
        position = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(b, e) for _, b, e in pieces)])
        lens = torch.tensor([end - begin for _, begin, end in pieces], dtype=torch.int32)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return varlen_attention(q, k, v, lens) if local else self._balancer.attention(q, k, v, PackedAttention())

        out = self._run(x, position, attention, self._balancer if routed else None)
        per_token = (out - target).square().mean(1)
        lengths = self._case.lengths
        if self._case.mean == "token":
            loss = token_mean(per_token, total=sum(lengths))
        else:
            chunks = zip(per_token.split(lens.tolist()), pieces, strict=True)
            sums = [part.sum() / lengths[number] for part, (number, _, _) in chunks]
            loss = token_mean(torch.stack([per_token[:0].sum(), *sums])[1:], total=len(lengths))
        loss.backward()
        self.pieces += pieces

    def gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None, name
            gradient = parameter.grad
            gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return gradients


def packed(pieces: Sequence[Piece], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    empty = torch.empty(0, CHANNELS, dtype=torch.float64)
    drawn = [[part[begin:end] for part in draw(number, lengths[number])] for number, begin, end in pieces]
    return torch.cat([empty, *(x for x, _ in drawn)]), torch.cat([empty, *(target for _, target in drawn)])


def num_shared(plans: Sequence[Plan]) -> int:
    return sum(num > 1 for plan in plans for num in Counter(sequence for sequence, *_ in plan.chunks).values())


def by_sampler(case: Case, step: Step, balancer: SequenceBalancer) -> int:
    sampler = BalancedBatchSampler(
        case.lengths,
        batch_size=-(-len(case.lengths) // (dist.get_world_size() * case.micro_batches)),
        d_model=WIDTH,
        micro_batches=case.micro_batches,
        topology=case.topology,
        allow_empty=True,
        cluster=CLUSTER,
        model=model_of(case),
    )
    for number, indices in enumerate(sampler):
        pieces = sampler.chunks(0, number)
        assert [index for index, _, _ in pieces] == indices
        local = sampler.plan(0, number).attention_tokens_moved == 0
        if not local:
            balancer.follow(sampler.plan(0, number))
            assert balancer.chunk_lens.tolist() == [end - begin for _, begin, end in pieces]
        step.micro_batch(pieces, *packed(pieces, case.lengths), local=local)
    return num_shared(sampler.step_plan(0).plans)


def own_numbers(num_samples: int) -> range:
    """The numbers of the samples that this rank's data has: uneven, and none on the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    each = num_samples // last
    return range(rank * each, num_samples if rank == last - 1 else (rank + 1) * each) if rank < last else range(0)


def by_loader(case: Case, step: Step, balancer: SequenceBalancer) -> int:
    samples = []
    for number in own_numbers(len(case.lengths)):
        x, target = draw(number, case.lengths[number])
        samples.append({"x": x, "number": torch.tensor(number), "target": target.float()})
    size = -(-len(samples) // case.micro_batches) or 1
    batches = [samples[first : first + size] for first in range(0, len(samples), size)]
    loader = BalancedStepLoader(batches, balancer, case.micro_batches, per_token=["x", "target"], per_sample=["number"])
    num_lists = 0
    for chunks, plan in loader:
        assert plan == balancer.plan == loader.step_plan.plans[num_lists]
        places = [(begin, end) for _, begin, end in loader.chunks]
        pieces = [(int(chunk["number"]), *place) for chunk, place in zip(chunks, places, strict=True)]
        x, target = packed(pieces, case.lengths)
        moved = [
            torch.cat([empty, *(chunk[name] for chunk in chunks)])
            for name, empty in (("x", x[:0]), ("target", x[:0].float()))
        ]
        assert torch.equal(moved[0], x) and torch.equal(moved[1], target.float())
        step.micro_batch(pieces, moved[0], target)
        num_lists += 1
    assert num_lists == case.micro_batches
    return num_shared(loader.step_plan.plans)


def in_model(case: Case, step: Step, balancer: SequenceBalancer) -> int:
    own = own_numbers(len(case.lengths))
    planned = balancer.plan_routing([case.lengths[i] for i in own], WIDTH, micro_batches=case.micro_batches)
    for micro_batch in range(case.micro_batches):
        assert balancer.follow(planned, micro_batch) == planned.plans[micro_batch] == balancer.plan
        numbers = [own[i] for i in planned.home_sequences(dist.get_rank(), micro_batch)]
        pieces = [(number, 0, case.lengths[number]) for number in numbers]
        step.micro_batch(pieces, *packed(pieces, case.lengths), routed=True)
    return num_shared(planned.plans)


WAYS = {"sampler": by_sampler, "loader": by_loader, "model": in_model}


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        balancer = SequenceBalancer(case.topology, cluster=CLUSTER, d_model=WIDTH, model=model_of(case))
        step = Step(case, balancer)
        shared = WAYS[case.way](case, step, balancer)
        outcomes.append(Outcome(step.gradients(), step.pieces, shared))
    return outcomes
