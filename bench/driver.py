"""What the benchmarks share: local ranks, and results with the hardware, versions, commit and load they belong to."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from knapformer.tools.measure.environment import host_environment

NUM_RANKS = 2
_LOAD = os.getloadavg()  # before the benchmark adds to it


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark: `--json`, for write_results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    return parser


def on_ranks(
    run_rank: Callable[[argparse.Namespace], Any], args: argparse.Namespace, num_ranks: int = NUM_RANKS
) -> Any:
    """`run_rank(args)` on local ranks of one thread each, in a Gloo group; what rank 0 returned."""
    import torch.multiprocessing as mp

    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (folder, num_ranks, run_rank, args), num_ranks)
        return json.loads(Path(folder, "result.json").read_text())


def _rank_main(
    rank: int, folder: str, num_ranks: int, run_rank: Callable[[argparse.Namespace], Any], args: argparse.Namespace
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timeout
    )
    result = run_rank(args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    # Not before the balancers are gone: the last to hold the group would take it apart.
    dist.destroy_process_group()


def bare_all_to_all(send_splits: list[int], recv_splits: list[int]) -> Callable[[], Any]:
    """The collective alone: so many float32 numbers to and from each rank, from and into tensors that stay."""
    import torch
    import torch.distributed as dist

    send, recv = torch.ones(sum(send_splits)), torch.empty(sum(recv_splits))
    return lambda: dist.all_to_all_single(recv, send, recv_splits, send_splits)


def published_module(checkout: Path) -> ModuleType:
    """The published implementation's balancer, from a checkout of it."""
    path = checkout / "knapformer" / "sequence_balancer.py"
    spec = importlib.util.spec_from_file_location("published_sequence_balancer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
