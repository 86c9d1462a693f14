"""Trains a small text-conditional flow-matching DiT on pictures of mixed resolutions and aspect ratios.

    torchrun --nproc-per-node 2 examples/train_images.py --out runs/pictures
    torchrun --nproc-per-node 2 examples/train_images.py --out runs/pictures --resume            # after it was killed
    torchrun --nproc-per-node 2 examples/train_images.py --out runs/mine --data ~/my_pictures    # captions: *.txt

Without --data it trains on the pictures inside scikit-image and scikit-learn. Into --out go `log.jsonl` (a line a
step), checkpoints, and at the end `samples.png`.

The lengths of all samples are known, so BalancedBatchSampler decides which rank computes a sample, and in which
micro-batch: nothing travels between ranks. With `--balancer g2/1n1` a balancer in the model, behind a BalancedLoader,
takes the sampler's place; `--balancer none` trains the same without balancing. `--compare` also trains without
balancing, a step of each in turn, on the same data and from the same weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from picture_training import checkpoints
from picture_training.pictures import PictureBatch, PictureData, PictureSamples, draw_sample, load_pictures, pack
from picture_training.samples import save_samples
from picture_training.training import TrainingOptions, TrainingRun
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from knapformer import BalancedBatchSampler, BalancedLoader, Cluster, SequenceBalancer, TrainedModel, WorkloadModel

# For ranks that are processes on one CPU. A latency would outweigh sequences as short as the smallest here.
CPU_CLUSTER = Cluster("cpu", flops_per_s=1e10, node_latency_s=0, fixed_s=0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the log, the checkpoints and the samples")
    parser.add_argument("--data", help="folder with pictures; the default is those inside scikit-image, scikit-learn")
    parser.add_argument(
        "--resolutions",
        type=_numbers,
        default=(32, 32, 64, 64, 160),
        metavar="PIXELS,...",
        help="sides of squares of as many pixels; one that is named twice is drawn twice as often",
    )
    parser.add_argument(
        "--balancer", default="sampler", metavar="sampler|TOPOLOGY|none", help="which way (default: %(default)s)"
    )
    parser.add_argument("--gamma", type=float, default=0.7, help="cost of attention's FLOPs over that of products")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=12, help="samples of a step, of all ranks and micro-batches")
    parser.add_argument("--micro-batches", type=int, default=2, metavar="K", help="of a step (default: %(default)s)")
    parser.add_argument("--time-shift", type=float, default=1.0, help="trains and samples more near the noise (> 1)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--validate-every", type=int, default=50, metavar="STEPS", help="on samples of another seed")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")
    parser.add_argument("--compare", action="store_true", help="train without and with the balancer, in turns")
    parser.add_argument("--no-samples", action="store_true")
    arguments = parser.parse_args()
    if arguments.compare and arguments.balancer == "none":
        parser.error("--compare: got --balancer none, expected the sampler or a topology to compare with none")
    if "WORLD_SIZE" not in os.environ:
        start = f"torchrun --nproc-per-node 2 {shlex.join(sys.argv)}"
        parser.exit(2, f"{parser.prog}: got no WORLD_SIZE, expected the ranks that torchrun starts: {start}\n")
    lists = arguments.micro_batches * int(os.environ["WORLD_SIZE"])
    if lists < 1 or arguments.batch_size < 1 or arguments.batch_size % lists:
        parser.error(
            f"--batch-size: got {arguments.batch_size}, expected a multiple of {lists}, the micro-batches of all ranks"
        )
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main() -> None:
    arguments = parse_arguments()
    device = choose_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    train(arguments, device)
    gc.collect()  # frees what still holds a group, before it is destroyed
    dist.destroy_process_group()


def choose_device() -> torch.device:
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_local:
        if num_gpus > 0 and local_rank == 0:
            print(f"on the CPU: sees {num_gpus} GPUs for {num_local} ranks")
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    options = TrainingOptions(arguments.precision, arguments.batch_size, seed=arguments.seed)
    pictures = load_pictures(arguments.data)
    arguments.out.mkdir(parents=True, exist_ok=True)

    balancer = None
    if arguments.balancer not in ("none", "sampler"):
        cluster = CPU_CLUSTER if device.type == "cpu" else None
        balancer = SequenceBalancer(arguments.balancer, gamma=arguments.gamma, cluster=cluster, d_model=options.d_model)
    balanced = arguments.balancer != "none"
    runs = {"balanced" if balanced else "not balanced": TrainingRun(options, device, balancer)}
    if arguments.compare:
        runs["not balanced"] = TrainingRun(options, device, None)
    if arguments.resume:
        for run in runs.values():
            checkpoints.load_newest(run, arguments.out)
    else:
        checkpoints.check_none(arguments.out)
    (main_run, *_) = runs.values()
    first_step = main_run.num_steps_done

    data = PictureData(pictures, arguments.resolutions, arguments.seed, arguments.time_shift)
    samples = PictureSamples(data, arguments.steps * options.batch_size)
    held_out = PictureData(pictures, arguments.resolutions, arguments.seed + 1, arguments.time_shift)
    validation = pack([draw_sample(held_out, i) for i in range(rank, 24, dist.get_world_size())], options.dtype)
    batches = {name: _batches(arguments, samples, options, first_step, device, name, balancer) for name in runs}
    with Log(arguments.out / "log.jsonl", first_step, arguments.steps, enabled=rank == 0) as log:
        for step in range(first_step, arguments.steps):
            entry: dict[str, Any] = {"step": step}
            # In turns: what disturbs the machine for a while disturbs both.
            for name in sorted(runs, reverse=step % 2 == 1):
                entry[name] = timed_step(runs[name], islice(batches[name], arguments.micro_batches), arguments.gamma)
                if (step + 1) % arguments.validate_every == 0:
                    entry[name]["validation_loss"] = runs[name].validation_loss(validation)
            log.write(entry)
            if main_run.num_steps_done % arguments.checkpoint_every == 0 and not arguments.compare:
                checkpoints.save(main_run, arguments.out)
    if not arguments.no_samples:
        save_samples(main_run, data, arguments.out / "samples.png")


def _batches(
    arguments: argparse.Namespace,
    samples: PictureSamples,
    options: TrainingOptions,
    first_step: int,
    device: torch.device,
    name: str,
    balancer: SequenceBalancer | None,
) -> Iterator[PictureBatch]:
    """This rank's micro-batches of a run, from first_step on. Over all ranks a step has the same samples in any run."""
    batch_size = options.batch_size // dist.get_world_size() // arguments.micro_batches
    lists: Iterable[list[int]]
    if name == "balanced" and balancer is None:
        lengths = samples.lengths()
        sampler = lists = BalancedBatchSampler(
            lengths,
            batch_size=batch_size,
            d_model=options.d_model,
            micro_batches=arguments.micro_batches,
            shuffle=False,  # each sample is drawn at random by itself
            max_tokens_per_rank=batch_size * max(lengths),
            gamma=arguments.gamma,
            cluster=CPU_CLUSTER if device.type == "cpu" else None,
            model=TrainedModel(num_blocks=options.num_blocks, num_parameters=0),
            num_heads=options.num_heads,
        )
        sampler.load_state_dict(sampler.state_dict(num_steps=first_step))
    else:
        in_order = BatchSampler(DistributedSampler(samples, shuffle=False), batch_size, drop_last=False)
        lists = list(in_order)[first_step * arguments.micro_batches :]
    loader = DataLoader(samples, batch_sampler=lists, collate_fn=partial(pack, dtype=options.dtype))
    if name == "not balanced" or balancer is None:
        return iter(loader)
    planned = BalancedLoader(loader, balancer, seq_lens=attrgetter("seq_lens"), empty=lambda: pack([], options.dtype))
    return (batch for batch, _ in planned)  # `balancer` holds the plan of a batch while it is worked on


def of_ranks(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timed_step(run: TrainingRun, batches: Iterable[PictureBatch], gamma: float) -> dict[str, Any]:
    """Runs a step; returns its figures. work, tokens: of each rank in each micro-batch. seconds: from a common start
    until the slowest rank is done, without fetching data. cpu_seconds: CPU time of each rank, which other programs on
    the machine hardly change."""
    workload = WorkloadModel(gamma)
    clock = _Clock()
    gc.collect()  # now, and not in the middle of the step
    gc.disable()
    work, tokens = [], []
    for batch in batches:
        with clock:
            run.accumulate(batch)
        if run.balancer is None:
            own = sum(workload.work(length, run.options.d_model) for length in batch.seq_lens)
            work.append(of_ranks(own))
        else:
            work.append(run.balancer.plan.workload_after)
        tokens.append(of_ranks(sum(batch.seq_lens)))
    with clock:
        loss, gradient_norm = run.finish_step()
    gc.enable()
    return {
        "loss": loss,
        "gradient_norm": gradient_norm,
        "seconds": clock.seconds,
        "cpu_seconds": of_ranks(clock.cpu_seconds),
        "work": work,
        "tokens": tokens,
    }


class _Clock:
    """Adds up the time of the blocks that it encloses, which all ranks enter and leave together."""

    seconds = cpu_seconds = 0.0

    def __enter__(self) -> None:
        dist.barrier()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_seconds += time.process_time() - self._cpu_start
        dist.barrier()
        self.seconds += time.perf_counter() - self._start


class Log:
    """A line of JSON a step, and a progress bar. Lines of steps that are done again after a kill are dropped."""

    def __init__(self, path: Path, first_step: int, num_steps: int, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:first_step] if path.exists() else []
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Log:
        if self._enabled:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._progress.stop()
            self._file.close()

    def write(self, entry: dict[str, Any]) -> None:
        if not self._enabled:
            return
        print(json.dumps(entry), file=self._file, flush=True)
        losses = (f"{name} {value['loss']:.4f}" for name, value in entry.items() if isinstance(value, dict))
        self._progress.update(self._task, advance=1, description="loss " + ", ".join(losses))


if __name__ == "__main__":
    main()
