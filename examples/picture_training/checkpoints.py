"""Checkpoints in a folder, by number of steps. Half-written files of a killed run are never taken for a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from picture_training.training import TrainingRun

_KEPT = 2


def save(run: TrainingRun, folder: Path) -> None:
    """Collective. All ranks write their shards into a folder with another name, which then gets the final name."""
    target = folder / f"step_{run.num_steps_done:06d}"
    partial = target.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    dcp.save({"run": run}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in _complete(folder)[:-_KEPT]:
            shutil.rmtree(old)


def check_none(folder: Path) -> None:
    """Exits where the folder has checkpoints: those of another run would be taken for this one's."""
    if _complete(folder):
        raise SystemExit(f"--out: got {folder}, which has checkpoints, expected another folder, or --resume")


def load_newest(run: TrainingRun, folder: Path) -> None:
    """Collective."""
    complete = _complete(folder)
    if not complete:
        raise SystemExit(f"--resume: got no checkpoint in {folder}, expected one that an earlier run has left")
    dcp.load({"run": run}, checkpoint_id=complete[-1])


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if not path.suffix)
