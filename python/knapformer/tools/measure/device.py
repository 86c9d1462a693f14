"""The device of a rank, and the group that it joins."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from knapformer.tools.launch import check_device

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def use_device(name: str, threads: int, local_rank: int = 0, num_local: int = 1) -> torch.device:
    """The device of this rank among the ranks of its machine, made the current device.

    name: "auto" (CUDA where there is a GPU for each), "cpu" or "cuda". Raises ArgumentError where CUDA lacks devices.
    """
    num_gpus = check_device(name, num_local)
    if name == "cuda" or (name == "auto" and num_gpus >= num_local):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if name == "auto" and num_gpus > 0 and local_rank == 0:
        print(f"knapformer: runs on the CPU, as it sees {num_gpus} GPUs for {num_local} ranks", file=sys.stderr)
    torch.set_num_threads(threads)
    return torch.device("cpu")


def memory_bytes(device: torch.device) -> int:
    """The memory of a rank: its accelerator's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def default_dtype(device: torch.device) -> str:
    """A name in knapformer.models.parallel.DTYPES."""
    return "fp32" if device.type == "cpu" else "bf16"


@contextlib.contextmanager
def joined_group(name: str, threads: int, num_ranks: int) -> Iterator[torch.device]:
    """Joins the world that torchrun's environment variables describe; yields this rank's device."""
    device = use_device(name, threads, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    if dist.get_world_size() != num_ranks:
        raise RuntimeError(f"ranks: got {num_ranks}, expected {dist.get_world_size()}, as were started")
    yield device
    # Not after an error: taking groups apart waits for collectives in flight, which other ranks may never join.
    gc.collect()  # frees objects that still hold a group
    dist.destroy_process_group()
