"""Trains a small FLUX by GRPO (as Flow-GRPO and DanceGRPO do) on pictures of mixed sizes, whose reward is a formula.

    torchrun --nproc-per-node 2 examples/train_grpo.py

In each round the model draws a group of pictures for each prompt, in steps that add noise and so have a probability.
The advantage of a picture is its reward beside its group's. Then all steps of all pictures are replayed, and those of
better pictures are made more probable. Both parts are balanced over ranks: drawing by one plan for all of its steps;
replaying, an optimizer step of several micro-batches, by a plan of the whole step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from knapformer.losses import global_mean, token_mean
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import knapformer
from knapformer import Cluster, SequenceBalancer

SIZES = ((2, 3), (4, 4), (12, 16), (6, 5), (3, 8), (8, 8))  # rows and columns of tokens, of each prompt's pictures
CHANNELS, TEXT_WIDTH = 4, 8
TIMES = torch.linspace(1, 0, 6)  # of the steps of drawing, from noise to picture
NOISE_LEVEL = 0.7  # of these steps
UPDATES = 2  # of the model, in a round
CLIP_RANGE = 0.2  # how far an update may change the probability of a step


@dataclass
class Picture:
    prompt: int
    seed: int
    states: list[Tensor] = field(default_factory=list)  # (tokens, channels): the noise, and what each step made of it
    log_probs: list[Tensor] = field(default_factory=list)  # of each step, by the model that drew it
    advantage: float = 0.0

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.seed)
        self.states.append(torch.randn(math.prod(SIZES[self.prompt]), CHANNELS, generator=self.draw))
        (rows, columns), text = SIZES[self.prompt], torch.Generator().manual_seed(self.prompt)
        self.conditions = {
            "encoder_hidden_states": torch.randn(1, 3 + self.prompt, TEXT_WIDTH, generator=text),
            "pooled_projections": torch.randn(1, TEXT_WIDTH, generator=text),
            "txt_ids": torch.zeros(3 + self.prompt, 3),
            "img_ids": torch.cartesian_prod(*map(torch.arange, (1, rows, columns))).float(),
        }
        self.wanted = torch.randn(CHANNELS, generator=text)  # the mean colour that the prompt asks for

    @property
    def num_tokens(self) -> int:
        return 3 + self.prompt + len(self.states[0])

    def sample(self, step: int) -> dict[str, Any]:
        return {"hidden_states": self.states[step].unsqueeze(0), "timestep": TIMES[step : step + 1], **self.conditions}

    def reward(self) -> float:
        return -(self.states[-1].mean(0) - self.wanted).square().mean().item()


def step_of(x: Tensor, velocity: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of where a step of the SDE leads to, as Flow-GRPO has it."""
    time, dt = TIMES[step], TIMES[step + 1] - TIMES[step]
    sigma = NOISE_LEVEL * (time / (1 - time.clamp(max=TIMES[1]))).sqrt()  # at time 1 it would be infinite
    drift = velocity + sigma**2 / (2 * time) * (x + (1 - time) * velocity)
    return x + drift * dt, sigma * (-dt).sqrt()


def log_prob(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Of all numbers of a picture together, divided by how many they are: so large pictures do not weigh more."""
    return torch.distributions.Normal(mean, deviation).log_prob(x).mean()


@torch.no_grad()
def draw_pictures(model: Any, balancer: SequenceBalancer, pictures: list[Picture]) -> None:
    balancer.plan_routing([picture.num_tokens for picture in pictures])
    for step in range(len(TIMES) - 1):
        velocities = model([picture.sample(step) for picture in pictures], planned=True)
        for picture, velocity in zip(pictures, velocities, strict=True):
            mean, deviation = step_of(picture.states[step], velocity[0], step)
            picture.states.append(mean + deviation * torch.randn(mean.shape, generator=picture.draw))
            picture.log_probs.append(log_prob(picture.states[-1], mean, deviation))


def set_advantages(pictures: list[Picture]) -> float:
    """By the rewards of the whole group, whose pictures lie on all ranks. Returns the mean reward of all pictures."""
    own = [(picture.prompt, picture.reward()) for picture in pictures]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    rewards = [pair for of_rank in of_ranks for pair in of_rank]
    for picture, (prompt, reward) in zip(pictures, own, strict=True):
        group = torch.tensor([other for of, other in rewards if of == prompt], dtype=torch.float64)
        picture.advantage = ((reward - group.mean()) / (group.std() + 1e-4)).item()
    return sum(reward for _, reward in rewards) / len(rewards)


def replay(model: Any, balancer: SequenceBalancer, pictures: list[Picture], micro_batches: int) -> float:
    """Backward passes of the micro-batches of an optimizer step. Returns the loss of all ranks."""
    replayed = [(picture, step) for picture in pictures for step in range(len(TIMES) - 1)]
    plan = balancer.plan_routing([picture.num_tokens for picture, _ in replayed], micro_batches=micro_batches)
    loss = 0.0
    for number in range(micro_batches):
        balancer.follow(plan, number)
        batch = [replayed[i] for i in plan.home_sequences(dist.get_rank(), number)]
        with model.no_sync() if number < micro_batches - 1 else contextlib.nullcontext():
            velocities = model([picture.sample(step) for picture, step in batch], planned=True)
            losses = [velocities.zero]
            for (picture, step), velocity in zip(batch, velocities, strict=True):
                now = log_prob(picture.states[step + 1], *step_of(picture.states[step], velocity[0], step))
                ratio = (now - picture.log_probs[step]).exp()
                clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                losses.append(-torch.min(picture.advantage * ratio, picture.advantage * clipped))
            # The mean over all steps of all pictures; the first is none, and leads to the weights where no other does.
            part = token_mean(torch.stack(losses)[1:], total=plan.num_sequences)
            part.backward()
        loss += global_mean(part).item()
    return loss


def new_model() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns for each round the mean reward and the losses of its updates."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = new_model()
    cpu = Cluster(flops_per_s=1e10, node_latency_s=0, fixed_s=0)  # ranks are processes on one CPU here
    balancer = SequenceBalancer(d_model=32, cluster=cpu)
    trained = DistributedDataParallel(knapformer.balance(model, balancer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    num_pictures, log = len(SIZES) * arguments.group_size, []
    for number in range(arguments.rounds):
        pictures = [
            Picture(i // arguments.group_size, number * num_pictures + i) for i in range(rank, num_pictures, num_ranks)
        ]
        draw_pictures(model, balancer, pictures)
        entry: dict[str, Any] = {"reward": set_advantages(pictures), "losses": []}
        for _ in range(UPDATES):
            entry["losses"].append(replay(trained, balancer, pictures, arguments.micro_batches))
            optimizer.step()
            optimizer.zero_grad()
        log.append(entry)
        if rank == 0:
            print(number, entry)
    return log


def parse_arguments(options: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--group-size", type=int, default=8, help="pictures of a prompt (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, metavar="K", help="of an update (default: %(default)s)")
    return parser.parse_args(options)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse_arguments())
    dist.destroy_process_group()
