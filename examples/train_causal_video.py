"""Trains a small chunk-causal model of video by teacher forcing, as ACDiT does (Hu et al. 2024, arXiv:2412.07720).

    torchrun --nproc-per-node 2 examples/train_causal_video.py                   # --balance mask | length | none

A sample has its prompt, the clean chunks of a video, and noisy copies of them: "c8 clean:4x60 noisy:4x60". Clean chunks
see the prompt and the clean ones up to their own; a noisy one sees the prompt, the clean ones before its own, and
itself (the paper's skip-causal mask). So all chunks are trained at once, each with noise of its own, and each as it is
generated later: after those before it. Videos have 2 to 12 chunks; some samples are pictures, one chunk after its
prompt, "c8 f900". The loss is flow matching of the noisy tokens.

With `--balance mask` ranks get equal work by the (query, key) pairs of the masks; with `length` as if every token saw
its whole sequence; with `none` each rank computes its own samples. Losses are the same. Prints for each step the loss,
how many sequences both ranks shared, and the seconds that it took.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from knapformer.losses import global_mean, token_mean
from knapformer.models import MaskedAttention
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knapformer import Cluster, SequenceBalancer, TrainedModel, WorkloadModel

WIDTH, HEADS, BLOCKS = 64, 4, 3
PROMPT, CHANNELS = 8, 8  # tokens of a prompt; of a token
GAMMA = 0.82  # with the rate and the fixed time fitted to steps on a CPU core, by docs/masks.py
CPU = Cluster(flops_per_s=5.2e10, node_bytes_per_s=1e9, node_latency_s=2e-4, fixed_s=3e-3)
MODEL = TrainedModel(num_blocks=BLOCKS, num_parameters=0, element_size=4, recomputes=False, num_heads=HEADS)


@dataclass
class Sample:
    mask: str
    tokens: Tensor  # (tokens, channels): prompt, clean chunks, noisy chunks
    velocity: Tensor  # (tokens, channels); of other tokens than noisy ones: 0
    is_noisy: Tensor  # (tokens,)
    times: Tensor  # (tokens,): of the noise; of other tokens: 0
    chunks: Tensor  # (tokens,): which one a token is of; a noisy copy is where its clean one is
    places: Tensor  # (tokens,): in the chunk


def draw_sample(number: int, longest: int) -> Sample:
    """A video whose scene begins as its prompt says and moves on with each chunk, or a picture."""
    draw, noise = random.Random(number), torch.Generator().manual_seed(number)
    is_picture = draw.random() < 0.4
    num_chunks = 1 if is_picture else draw.randint(2, 12)
    copies = 1 if is_picture else 2
    chunk = (int(longest / 4 ** draw.random()) - PROMPT) // (copies * num_chunks)
    moves = torch.randn(num_chunks + 1, 1, CHANNELS, generator=noise)
    moves[1:] *= 0.4
    scenes = moves.cumsum(0)  # that of the prompt, and of each chunk
    prompt = scenes[0].expand(PROMPT, CHANNELS)
    video = scenes[1:] + 0.3 * torch.randn(num_chunks, chunk, CHANNELS, generator=noise)
    at_random = torch.randn(video.shape, generator=noise)
    now = torch.rand(num_chunks, 1, 1, generator=noise).expand(video.shape)
    clean = torch.cat([prompt, video.flatten(0, 1)]) if copies == 2 else prompt
    of_clean = torch.zeros(clean.shape)
    numbers = torch.arange(1, num_chunks + 1).repeat_interleave(chunk)
    places = torch.arange(chunk).repeat(num_chunks)
    return Sample(
        f"c{PROMPT} f{chunk}" if is_picture else f"c{PROMPT} clean:{num_chunks}x{chunk} noisy:{num_chunks}x{chunk}",
        torch.cat([clean, torch.lerp(video, at_random, now).flatten(0, 1)]),
        torch.cat([of_clean, (at_random - video).flatten(0, 1)]),
        torch.cat([of_clean[:, 0], torch.ones(len(numbers))]).bool(),
        torch.cat([of_clean[:, 0], now[..., 0].flatten()]),
        torch.cat([torch.zeros(PROMPT), *[numbers] * copies]),
        torch.cat([torch.arange(PROMPT), *[places] * copies]),
    )


def waves(positions: Tensor) -> Tensor:
    """(tokens, WIDTH): sines and cosines."""
    angles = positions.unsqueeze(1) / 1000 ** torch.linspace(0, 1, WIDTH // 2)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.mlp(x)


class CausalVideo(nn.Module):
    def __init__(self, balancer: SequenceBalancer | None) -> None:
        super().__init__()
        self.balancer = balancer
        self.of_tokens, self.of_times = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.to_velocity = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS))

    def forward(self, samples: list[Sample]) -> Tensor:
        """Velocities of all noisy tokens. The balancer has planned these samples."""
        tokens, times, chunks, places, is_noisy = (
            torch.cat([getattr(sample, name) for sample in samples])
            for name in ("tokens", "times", "chunks", "places", "is_noisy")
        )
        x = self.of_tokens(tokens) + self.of_times(waves(1000 * times)) + waves(100 * chunks) + waves(places)
        if self.balancer is None:
            attention = MaskedAttention([len(sample.tokens) for sample in samples], [sample.mask for sample in samples])
            for block in self.blocks:
                x = block(x, attention)
        else:
            _, x, _ = self.balancer.route(x)
            for block in self.blocks:
                x = block(x, self.balancer.attention)  # by the planned masks
            _, x = self.balancer.reverse_route(x)
        velocity: Tensor = self.to_velocity(x[is_noisy])
        return velocity


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    balancer, work_of = None, WorkloadModel(GAMMA).work
    if arguments.balance != "none":
        balancer = SequenceBalancer(arguments.topology, d_model=WIDTH, gamma=GAMMA, cluster=CPU, model=MODEL)
    torch.manual_seed(0)
    model = DistributedDataParallel(CausalVideo(balancer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log = []
    for step in range(arguments.steps):
        numbers = range(step * arguments.batch_size + rank, (step + 1) * arguments.batch_size, num_ranks)
        samples = [draw_sample(number, arguments.longest) for number in numbers]
        lens, masks = [len(sample.tokens) for sample in samples], [sample.mask for sample in samples]
        dist.barrier()
        start = time.perf_counter()
        if balancer is not None:
            as_if_full = [work_of(n, WIDTH) for n in lens] if arguments.balance == "length" else None
            balancer.plan_routing(lens, masks=masks, work=as_if_full)
        wanted = torch.cat([sample.velocity[sample.is_noisy] for sample in samples])
        loss = token_mean((model(samples) - wanted).square().mean(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds = time.perf_counter() - start
        num_shared = 0 if balancer is None else sum(degree > 1 for degree in balancer.plan.degree_of_sequence)
        entry = {"loss": global_mean(loss).item(), "shared": num_shared, "seconds": seconds}
        log.append(entry)
        if rank == 0:
            print(step, entry, flush=True)
    return log


def parse_arguments(options: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balance", choices=("mask", "length", "none"), default="mask")
    parser.add_argument(
        "--topology", default=None, help="such as g1n2; the default: ranks of a node may share sequences"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a step, some on each rank")
    parser.add_argument(
        "--longest", type=int, default=2400, metavar="TOKENS", help="of a sample (default: %(default)s)"
    )
    arguments = parser.parse_args(options)
    if arguments.longest < 128:
        parser.error(f"--longest: got {arguments.longest}, expected at least 128 tokens")
    return arguments


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(parse_arguments())
    dist.destroy_process_group()
