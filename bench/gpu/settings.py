"""The settings of a run and its sizes: those for an accelerator, and tiny ones for a CPU that runs the same code."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from knapformer.tools.files import write_atomically

from knapformer import DataMix

MIXES = ("joint", "mixed", "low")  # the one with the highest published HFU first

# Seconds after which a part is stopped. The parts that run on one GPU have 9 minutes together, less the time that the
# build took before them, up to half of theirs.
LIMITS_S = {"correctness": 150, "calibrate": 130, "packing": 30, "launches": 60, "replay": 170, "steps": 400}
ONE_GPU_S = 9 * 60
SHARE_TO_BEGIN = 0.8  # share of these seconds in which a part begins something new


@dataclass(frozen=True)
class Sizes:
    models: tuple[str, ...]  # of the correctness checks
    samples: tuple[tuple[int, int], ...]  # of the correctness checks: text and visual tokens, dealt to ranks in turn
    compiled: tuple[str, ...]  # those of `models` that the correctness checks compile, too
    compiler: str
    calibrated: tuple[str, ...]
    calibration: tuple[str, ...]  # options
    packed_tokens: int  # of a rank, 3,072 wide in bfloat16
    packing_repeats: int
    replay_model: str
    replay_ranks: int
    replay: tuple[str, ...]  # options
    steps_model: str
    steps_mixes: tuple[str, ...]
    steps: tuple[str, ...]  # options
    micro_batches: int


_SIZES = {
    "cuda": Sizes(
        models=("flux-demo", "wan-demo"),
        samples=((77, 1024), (20, 256), (392, 2048), (7, 64), (50, 576), (77, 400), (128, 1600), (3, 144)),
        compiled=("flux-demo", "wan-demo"),
        compiler="inductor",
        calibrated=("flux", "wan-14b"),
        calibration=("--repeats", "4", "--warmup", "2"),
        packed_tokens=1 << 15,
        packing_repeats=4,  # few, since the other rank is a CPU and Gloo moves the data
        replay_model="flux",
        replay_ranks=32,
        replay=("--repeats", "1", "--warmup", "1"),
        steps_model="flux",
        steps_mixes=MIXES,
        steps=("--steps", "2", "--warmup", "1"),
        micro_batches=2,
    ),
    "cpu": Sizes(
        models=("flux-tiny", "wan-tiny"),
        samples=((5, 36), (2, 9), (12, 64), (3, 16)),
        compiled=("wan-tiny",),
        compiler="eager",
        calibrated=("flux-tiny", "wan-tiny"),
        calibration=("--repeats", "1", "--warmup", "1", "--lengths", "32,64,128,256"),
        packed_tokens=512,
        packing_repeats=2,
        replay_model="flux-tiny",
        replay_ranks=2,
        replay=("--repeats", "1", "--warmup", "1", "--scale", "16", "--max-text-tokens", "8"),
        steps_model="flux-tiny",
        steps_mixes=("mixed",),
        steps=("--steps", "1", "--warmup", "0", "--scale", "16", "--max-text-tokens", "8", "--gamma", "0.5"),
        micro_batches=2,
    ),
}


def sizes_of(args: argparse.Namespace) -> Sizes:
    return _SIZES[args.device]


def start_part(args: argparse.Namespace, part: str) -> None:
    """Starts the part's clock. A CPU, which only tests use, may be busy with other work, so it has an hour."""
    limit_s = LIMITS_S[part] * max(0.5, 1 - args.build_s / ONE_GPU_S) if args.device == "cuda" else 3600.0
    begin_s = SHARE_TO_BEGIN * limit_s
    if args.seconds is not None:
        begin_s, limit_s = args.seconds, max(limit_s, args.seconds / SHARE_TO_BEGIN)
    now = time.monotonic()  # one clock for all processes of a machine
    args.begins_until, args.ends_at = now + begin_s, now + limit_s


def seconds_left(args: argparse.Namespace) -> float:
    """Seconds after which the part is stopped; at least 1."""
    return max(1.0, float(args.ends_at) - time.monotonic())


class Agenda:
    """What a part does: one thing after another while there is time, and at least one. The next is taken to last as
    long as the longest so far. A resumed part does not repeat what was done before. Each rank asks for the same things;
    rank 0's clock decides."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._done = args, frozenset(args.kept["done"])
        self._before = self._kept = so_far(args)
        self._left_before = self._before.get("left_out", [])  # by an agenda that was stopped
        self._begun_at = self._longest_s = 0.0
        self.done: list[str] = []
        self.left_out: list[str] = []

    def begins(self, thing: str, expected_s: float = 0.0) -> bool:
        """Whether to do this thing now. expected_s: how long it takes at least. Collective, where there is a group."""
        import torch
        import torch.distributed as dist

        if thing in self._done:
            return False
        is_first = not self.done and not self._before.get("done")
        self._begun_at = now = time.monotonic()
        ends_at = now + max(expected_s, self._longest_s)
        in_time = torch.tensor(is_first or (now < self._args.begins_until and ends_at <= self._args.ends_at))
        if dist.is_initialized():
            dist.broadcast(in_time, 0)
        (self.done if in_time else self.left_out).append(thing)
        if in_time:
            self._write(f"{thing}, in which the part was stopped, and what follows")
        return bool(in_time)

    def keep(self, result: dict[str, Any]) -> None:
        """Saves the results so far, after a thing is done: they stay if the part is stopped in the next thing."""
        self._longest_s = max(self._longest_s, time.monotonic() - self._begun_at)
        self._kept = copy.deepcopy(merged_results(self._before, result, {"done": self.done}))
        self._write()

    def _write(self, *begun: str) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_rank() == 0:
            left_out = {"left_out": [*self._left_before, *self.left_out, *begun]}
            write_atomically(str(self._args.so_far), json.dumps(self._kept | left_out | self._args.stamp))

    def fails(self, thing: str) -> None:
        """That what began last is not done: a resumed part tries it again."""
        self.done.remove(thing)
        self.left_out.append(thing)
        self._write()

    def result(self) -> dict[str, list[str]]:
        return {"done": self.done, "left_out": self.left_out}


def run_command(command: list[str], limit_s: float) -> int:
    """Returns the command's exit status. At the limit, which raises subprocess.TimeoutExpired, and at any other error
    it is asked to end: what starts ranks ends these first."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(limit_s)
        except BaseException:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def so_far(args: argparse.Namespace) -> dict[str, Any]:
    """The results of the part in this go, as its agendas have kept them."""
    kept: dict[str, Any] = json.loads(args.so_far.read_text()) if args.so_far.exists() else {}
    return kept


def merged_results(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merges the results of a part that ran in several goes: lists and dictionaries are joined; for any other key the
    last value wins. `left_out` is that of the last one, too."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            before = merged.get(key)
            if isinstance(value, list) and isinstance(before, list) and key != "left_out":
                merged[key] = before + value
            elif isinstance(value, dict) and isinstance(before, dict):
                merged[key] = before | value
            else:
                merged[key] = value
    return merged


def correctness_ranks(args: argparse.Namespace) -> int:
    """As many as are asked for; where that is one, four ranks share the accelerator."""
    return 4 if args.ranks == 1 else int(args.ranks)


def backend_of(args: argparse.Namespace, num_ranks: int) -> str:
    """NCCL wants a device for each rank: where there are fewer, ranks share one, and Gloo stages through the host."""
    return "cpu:gloo,cuda:nccl" if args.device == "cuda" and num_ranks <= args.num_devices else "gloo"


def rank_device(args: argparse.Namespace) -> Any:
    """The device of this rank (of rank 0 where there is no group). Makes it the current one."""
    import torch
    import torch.distributed as dist

    if args.device == "cpu":
        return torch.device("cpu")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))  # for references, and for building models
    device = torch.device("cuda", rank % args.num_devices)
    torch.cuda.set_device(device)
    return device


def scaled_mix(mix: str, num_ranks: int) -> str:
    """Data codes for num_ranks ranks, with the shares of a published mix of 32 ranks, rounded to whole ranks by largest
    remainder. Of equal remainders, codes with more ranks come first, then earlier ones."""
    codes = [code.split("b", 1) for code in str(DataMix.parse(mix)).split(",")]
    of = [int(ranks[1:]) for ranks, _ in codes]
    wanted = [num_ranks * share / sum(of) for share in of]
    counts = [int(want) for want in wanted]
    by_remainder = sorted(range(len(of)), key=lambda i: (counts[i] - wanted[i], -of[i], i))
    for i in by_remainder[: num_ranks - sum(counts)]:
        counts[i] += 1
    return ",".join(f"g{count}b{rest}" for count, (_, rest) in zip(counts, codes, strict=True) if count > 0)


def flat_topologies(num_ranks: int) -> dict[str, str]:
    """The topologies of bags of 1, 2, 4 and 8 that these ranks can have, by their names in the published table."""
    bags = [(size, count) for size, count in ((1, 32), (2, 16), (4, 8), (8, 4)) if num_ranks % size == 0]
    return {f"g{size}n{count}": f"g{size}n{num_ranks // size}" for size, count in bags}


def nested_topology(num_ranks: int) -> str:
    """Bags of 8, or as large a power of two as divides the ranks, with all smaller ones inside: g8/4/2/1."""
    size = max(size for size in (1, 2, 4, 8) if num_ranks % size == 0)
    inner = [str(1 << e) for e in range(size.bit_length() - 1, -1, -1)]
    return f"g{'/'.join(inner)}n{num_ranks // size}"
