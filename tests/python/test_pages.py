"""Python blocks of pages that test_integration_guide.py does not run, executed on one rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from knapformer.calibration import Calibration
from torch.utils.data import DataLoader

import knapformer
from knapformer import BalancedBatchSampler, SequenceBalancer

ROOT = Path(__file__).parents[2]
RUN_ELSEWHERE = {"integration.md", "training.md"}
LENGTHS = [[40, 3], [5], [7, 2], [11]] * 8  # of 32 ranks


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(block: str, **given: Any) -> dict[str, Any]:
    exec(compile(block, "block of a page", "exec"), given)
    return given


def on_one_rank(block: str) -> str:
    """With the topology of one, and no group."""
    block = re.sub(r"^dist\.init_process_group.*$", "", block, flags=re.MULTILINE)
    return re.sub(r'SequenceBalancer\("[^"]+"', 'SequenceBalancer("g1n1"', block)


def test_these_are_all_blocks() -> None:
    pages = {path.name: len(blocks_of(f"docs/{path.name}")) for path in (ROOT / "docs").glob("*.md")}
    assert {page for page, count in pages.items() if count} - RUN_ELSEWHERE == {
        "commands.md", "solver.md",
    }  # fmt: skip


def test_readme_step() -> None:
    block = blocks_of("README.md")[2]

    def attending(x: torch.Tensor, features: list[torch.Tensor], balancer: SequenceBalancer) -> torch.Tensor:
        q = x.unflatten(1, (2, 4))
        return x + balancer.attention(q, q, q, lambda q, k, v, seq_lens: q * k + v).flatten(1)

    x = torch.randn(7, 8, requires_grad=True)
    logged: list[Any] = []
    run(
        on_one_rank(block), loader=[([4, 3], x, [torch.ones(7, 2)])], d_model=8, blocks=[attending] * 2, loss=torch.sum,
        log=logged.append,
    )  # fmt: skip
    expected = x.detach().clone().requires_grad_()
    once = expected + expected * expected + expected
    (once + once * once + once).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, expected.grad, atol=1e-4)
    assert len(logged) == 1


def test_readme_diffusers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(knapformer, "balance", lambda *given: calls.append(given))  # test_adapters runs it
    run(blocks_of("README.md")[1], knapformer=knapformer, transformer=len, balancer="b", samples=[{}, {}])
    assert calls == [(len, "b")]


def test_readme_sampler() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    scale = torch.ones((), requires_grad=True)
    weights: list[torch.Tensor] = []

    def token_mean(losses: torch.Tensor, total: int) -> torch.Tensor:
        weights.append(losses.detach().sum() / total)
        return losses.sum() / total

    run(
        blocks_of("README.md")[0], BalancedBatchSampler=BalancedBatchSampler, DataLoader=DataLoader, dataset=data,
        lengths=[13] * 64, image_tokens=[10] * 64, model=lambda batch: batch[0] * scale,
        loss_per_token=lambda out: out * 0 + 10, token_mean=token_mean,
    )  # fmt: skip
    assert sum(weights).item() == pytest.approx(
        4
    )  # 64 samples of 10 tokens in 4 steps, each of which is a mean of ones


def test_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h100.json").write_text(json.dumps(Calibration(0.5, 2e-15, 3072, True, 0.0, 0.0, 0.0).to_dict()))
    _, block = blocks_of("docs/commands.md")
    made = run(on_one_rank(block), seq_lens_per_rank=LENGTHS)["made"]
    assert float(capsys.readouterr().out) == pytest.approx(knapformer.predict_micro_batch(made).total_s)


def test_given_work() -> None:
    (block,) = blocks_of("docs/solver.md")
    made = run(block)
    own = [24 * tokens * width**2 + 0.41 * 4 * tokens**2 * width for tokens, width in ((12_000, 4096), (1_000, 2048))]
    assert sum(made["plan"].workload_before) == pytest.approx(sum(map(sum, made["work"])))
    assert made["plan"].workload_before[1] == pytest.approx(sum(own))


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    predict, _ = blocks_of("docs/commands.md")
    made = run(predict, plan=knapformer.plan(LENGTHS, "g8n4", d_model=3072))
    assert made["step"].total_s > 0 and len(capsys.readouterr().out.split()) == 4
