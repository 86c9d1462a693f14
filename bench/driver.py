"""What the benchmarks share: local ranks, and results with the hardware, versions, commit and load they belong to."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from knapformer.tools.measure.environment import host_environment

NUM_RANKS, LIMIT_S = 2, 3600
RunRank = Callable[[argparse.Namespace], Any]
# Imported by the process that ranks are forked from: none of these modules touches a device.
PRELOADED = ["torch.distributed", "knapformer.balancer"]
_LOAD = os.getloadavg()  # before the benchmark adds to it


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark: `--json`, for write_results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    return parser


def on_ranks(run_rank: RunRank, args: argparse.Namespace, num_ranks: int = NUM_RANKS) -> Any:
    """Runs `run_rank(args)` on local ranks of one thread each, in a group of Gloo, and returns what rank 0 returned.

    Ranks are forked from a process that has imported PRELOADED and has touched no device. Raises TimeoutError where
    they take longer than LIMIT_S; an exception of a rank is raised here, with its traceback.
    """
    import torch.multiprocessing as mp

    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # The ranks are local. Otherwise Gloo asks for the address of the host's name, and without a network waits for it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload(PRELOADED)
    deadline = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank_main, (folder, run_rank, args, num_ranks), num_ranks, join=False, start_method="forkserver"
        )
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"{run_rank.__name__}: {num_ranks} ranks took more than {LIMIT_S} s")
        return json.loads(Path(folder, "result.json").read_text())


def _rank_main(rank: int, folder: str, run_rank: RunRank, args: argparse.Namespace, num_ranks: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
    result = run_rank(args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    # Only here, where the balancers are gone: otherwise the last of them to hold the group would tear it down.
    dist.destroy_process_group()


def bare_all_to_all(send_splits: list[int], recv_splits: list[int]) -> Callable[[], Any]:
    """The collective alone, with as many float32 numbers to and from each rank; its tensors are made once."""
    import torch
    import torch.distributed as dist

    send, recv = torch.ones(sum(send_splits)), torch.empty(sum(recv_splits))
    return lambda: dist.all_to_all_single(recv, send, recv_splits, send_splits)


def module_at(path: Path, *absent: str) -> Any:
    """A file of another project's checkout as a module. absent: modules that it imports and does not need here; names
    that begin with a dot are relative."""
    spec = importlib.util.spec_from_file_location(f"others.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stubs = {f"others{name}" if name.startswith(".") else name: mock.MagicMock() for name in absent}
    sys.modules.update(stubs)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stubs:
            del sys.modules[name]
    return module


def write_results(path: Path, benchmark: str, configuration: dict[str, Any], **results: Any) -> None:
    report = {
        "benchmark": benchmark,
        "environment": host_environment(),
        "load_average": _LOAD,
        "configuration": configuration,
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
