"""The code of docs/integration.md, executed: the blocks of each section in order, in one namespace."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "integration.md"


def blocks_of(section: str) -> list[str]:
    """The Python blocks under a heading of the second level."""
    text = GUIDE.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", body, re.DOTALL | re.MULTILINE)


def run_blocks(rank: int, world_size: int, folder: str, blocks: list[str]) -> None:
    os.chdir(folder)
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{GUIDE.name}, block {number + 1}", "exec"), namespace)


def test_known_models(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    small = diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=12, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    small.save_pretrained(tmp_path / "FLUX.1-dev" / "transformer")
    blocks = blocks_of("Known models")
    assert len(blocks) == 6
    run_ranks(run_blocks, 1, str(tmp_path), blocks)
    saved = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "trained" / "transformer")
    for name, value in saved.state_dict().items():
        assert value.equal(small.state_dict()[name]), f"{name} changed, though nothing was trained"
