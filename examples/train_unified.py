"""Trains a small model of text and images in one sequence, as Transfusion does (Zhou et al. 2024, arXiv:2408.11039).

    torchrun --nproc-per-node 2 examples/train_unified.py                        # --balance mask | length | none

Text sees what lies before it, patches of an image see each other as well: "c13 f64 c6" is the mask of 13 tokens of
text, an image of 64 patches, and 6 tokens of text. Each sample has its own. Text is trained by the cross-entropy of the
next token, images by flow matching (in the paper by DDPM), both in one pass: the loss is their weighted sum.

With `--balance mask` ranks get equal work by the (query, key) pairs of the masks; with `length` as if every token saw
its whole sequence; with `none` each rank computes its own samples. Losses are the same. Prints for each step the losses
of text and images, how many sequences both ranks shared, and the seconds that it took.
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
import torch.nn.functional as F
from knapformer.losses import global_mean, token_mean
from knapformer.models import MaskedAttention
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knapformer import Cluster, SequenceBalancer, TrainedModel, WorkloadModel

WIDTH, HEADS, BLOCKS = 64, 4, 3
WORDS, CHANNELS = 64, 8  # of text, with those that begin and end an image; of a patch
BEGIN_IMAGE, END_IMAGE, NOTHING = 0, 1, -100  # NOTHING is to be predicted
IMAGE_WEIGHT = 5.0  # as in the paper
GAMMA = 0.73  # with the rate and the fixed time fitted to steps on a CPU core, by docs/masks.py
CPU = Cluster(flops_per_s=4.7e10, node_bytes_per_s=1e9, node_latency_s=2e-4, fixed_s=3e-3)
MODEL = TrainedModel(num_blocks=BLOCKS, num_parameters=0, element_size=4, recomputes=False, num_heads=HEADS)


@dataclass
class Sample:
    mask: str
    words: Tensor  # (tokens,); of patches: 0
    next_words: Tensor  # (tokens,)
    patches: Tensor  # (tokens, channels): noised; of text: 0
    velocity: Tensor  # (tokens, channels)
    is_patch: Tensor  # (tokens,)
    times: Tensor  # (tokens,): of the image's noise; of text: 0


def draw_sample(number: int, longest: int) -> Sample:
    """A text, a picture with its caption, or several pictures in a text."""
    draw, noise = random.Random(number), torch.Generator().manual_seed(number)
    length = int(longest / 8 ** draw.random())
    caption = length // 50 + 3
    num_images = draw.randint(3, 6)
    parts = draw.choice([[(length, 0)], [(caption, length - caption)],
                         [(length // num_images // 3 + 2, 2 * length // num_images // 3)] * num_images])  # fmt: skip
    colours = torch.randn(WORDS, CHANNELS, generator=torch.Generator().manual_seed(0))
    word, masks, rows = draw.randint(2, WORDS - 1), [], []
    for text, image in parts:
        words = [END_IMAGE] if rows else []
        while len(words) < text - (image > 0):  # a word mostly follows from the one before
            word = 2 + (5 * word + 3) % (WORDS - 2) if draw.random() < 0.9 else draw.randint(2, WORDS - 1)
            words.append(word)
        words += [BEGIN_IMAGE] * (image > 0)
        picture = colours[word] + 0.3 * torch.randn(image, CHANNELS, generator=noise)  # the text says its colour
        at_random, now = torch.randn(picture.shape, generator=noise), torch.rand((), generator=noise)
        of_text = torch.zeros(text, CHANNELS)
        rows.append([
            torch.tensor(words + [0] * image), torch.tensor(words[1:] + [NOTHING] * (image + 1)),
            torch.cat([of_text, torch.lerp(picture, at_random, now)]), torch.cat([of_text, at_random - picture]),
            torch.arange(text + image) >= text, torch.cat([of_text[:, 0], now.expand(image)]),
        ])  # fmt: skip
        masks += [f"c{text}"] + [f"f{image}"] * (image > 0)
    return Sample(" ".join(masks), *(torch.cat(column) for column in zip(*rows, strict=True)))


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


class Unified(nn.Module):
    def __init__(self, balancer: SequenceBalancer | None) -> None:
        super().__init__()
        self.balancer = balancer
        self.of_words, self.of_patches = nn.Embedding(WORDS, WIDTH), nn.Linear(CHANNELS, WIDTH)
        self.of_times = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.to_words, self.to_patches = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, CHANNELS),
        )  # fmt: skip

    def forward(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        """Logits of all tokens' next words, and velocities of all patches. The balancer has planned these samples."""
        words, patches, times, is_patch = (
            torch.cat([getattr(sample, name) for sample in samples])
            for name in ("words", "patches", "times", "is_patch")
        )
        positions = torch.cat([torch.arange(len(sample.words)) for sample in samples])
        of_patches = self.of_patches(patches) + self.of_times(waves(1000 * times))
        x = torch.where(is_patch.unsqueeze(1), of_patches, self.of_words(words)) + waves(positions)
        if self.balancer is None:
            attention = MaskedAttention([len(sample.words) for sample in samples], [sample.mask for sample in samples])
            for block in self.blocks:
                x = block(x, attention)
        else:
            _, x, _ = self.balancer.route(x)
            for block in self.blocks:
                x = block(x, self.balancer.attention)  # by the planned masks
            _, x = self.balancer.reverse_route(x)
        x = self.norm(x)
        return self.to_words(x), self.to_patches(x[is_patch])


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    balancer, work_of = None, WorkloadModel(GAMMA).work
    if arguments.balance != "none":
        balancer = SequenceBalancer(arguments.topology, d_model=WIDTH, gamma=GAMMA, cluster=CPU, model=MODEL)
    torch.manual_seed(0)
    model = DistributedDataParallel(Unified(balancer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log = []
    for step in range(arguments.steps):
        numbers = range(step * arguments.batch_size + rank, (step + 1) * arguments.batch_size, num_ranks)
        samples = [draw_sample(number, arguments.longest) for number in numbers]
        lens, masks = [len(sample.words) for sample in samples], [sample.mask for sample in samples]
        dist.barrier()
        start = time.perf_counter()
        if balancer is not None:
            as_if_full = [work_of(n, WIDTH) for n in lens] if arguments.balance == "length" else None
            balancer.plan_routing(lens, masks=masks, work=as_if_full)
        logits, velocity = model(samples)
        next_words = torch.cat([sample.next_words for sample in samples])
        per_word = F.cross_entropy(logits, next_words, reduction="none")[next_words != NOTHING]
        wanted = torch.cat([sample.velocity[sample.is_patch] for sample in samples])
        text, image = token_mean(per_word), token_mean((velocity - wanted).square().mean(1))
        (text + IMAGE_WEIGHT * image).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds = time.perf_counter() - start
        num_shared = 0 if balancer is None else sum(degree > 1 for degree in balancer.plan.degree_of_sequence)
        entry = {"text": global_mean(text).item(), "image": global_mean(image).item(), "shared": num_shared,
                 "seconds": seconds}  # fmt: skip
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
