"""The code of docs/integration.md and docs/training.md, executed: a section's blocks in order, in one namespace."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, TRAINING = DOCS / "integration.md", DOCS / "training.md"


def blocks_of(section: str, page: Path = GUIDE) -> list[str]:
    """The Python blocks under a heading of the second level."""
    text = page.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", body, re.DOTALL | re.MULTILINE)


def run_blocks(rank: int, world_size: int, folder: str, blocks: list[str]) -> None:
    os.chdir(folder)
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{GUIDE.name}, block {number + 1}", "exec"), namespace)


def test_a_diffusers_model(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    small = diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=12, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    small.save_pretrained(tmp_path / "FLUX.1-dev" / "transformer")
    (block,) = blocks_of("A diffusers model")
    run_ranks(run_blocks, 2, str(tmp_path), [block])


PLAIN = "A plain FSDP2 loop"


def losses_of(rank: int, world_size: int) -> list[float]:
    """In float64."""
    torch.set_default_dtype(torch.float64)
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks_of(PLAIN)):
        exec(compile(block, f"{GUIDE.name}, {PLAIN}, block {number + 1}", "exec"), namespace)
    losses: list[float] = namespace["losses"]
    return losses


def test_two_ranks_compute_what_one_computes() -> None:
    (alone,), (first, second) = run_ranks(losses_of, 1), run_ranks(losses_of, 2)
    assert len(alone) >= 3 and len(set(alone)) == len(alone)
    assert first == second == pytest.approx(alone, rel=1e-11)


def test_every_python_block_of_the_guide_is_run() -> None:
    sections = re.findall(r"^## (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    run = {"A diffusers model", PLAIN, "Trainers"}  # the last in trainers/test_trainers.py
    assert {section for section in sections if blocks_of(section)} == run


def train_as_told(rank: int, world_size: int) -> None:
    namespace: dict[str, Any] = {}
    for section in re.findall(r"^## (.*)$", TRAINING.read_text(encoding="utf-8"), re.MULTILINE):
        for number, block in enumerate(blocks_of(section, TRAINING)):
            if "import Accelerator" in block:  # which other blocks would feel; trainers/test_trainers.py runs it
                continue
            exec(compile(block, f"{TRAINING.name}, {section}, block {number + 1}", "exec"), namespace)


def test_training() -> None:
    run_ranks(train_as_told, 2, timeout_s=200)
