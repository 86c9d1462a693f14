"""What test_train_with_masks.py runs: the two examples whose samples have masks, and the same models in one process
over the whole batch, sample by sample, with dense masks and losses written out."""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from masks import dense_mask
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def trainings(rank: int, world: int, name: str, ways: list[tuple[str, ...]]) -> list[list[dict[str, Any]]]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_default_dtype(torch.float64)
    module = example(name)
    return [module.train(module.parse_arguments(list(options))) for options in ways]


def dense_training(rank: int, world: int, name: str, steps: int, batch_size: int, longest: int) -> list[dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    module = example(name)
    torch.manual_seed(0)
    model = module.Unified(None) if name == "train_unified" else module.CausalVideo(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log = []
    for step in range(steps):
        samples = [module.draw_sample(step * batch_size + i, longest) for i in range(batch_size)]
        means = (
            _unified_losses(module, model, samples) if name == "train_unified" else _video_loss(module, model, samples)
        )
        (means["text"] + 5 * means["image"] if "text" in means else means["loss"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({key: value.item() for key, value in means.items()})
    return log


def _unified_losses(module: Any, model: Any, samples: list[Any]) -> dict[str, Tensor]:
    of_words, of_patches = [], []
    for sample in samples:
        with _dense_attention(module, sample.mask, len(sample.words)):
            logits, velocity = model([sample])
        log_probs = logits.log_softmax(-1)
        of_words += [-log_probs[i, word] for i, word in enumerate(sample.next_words.tolist()) if word >= 0]
        of_patches += [((velocity - sample.velocity[sample.is_patch]) ** 2).sum(1) / velocity.shape[1]]
    return {"text": torch.stack(of_words).mean(), "image": torch.cat(of_patches).mean()}


def _video_loss(module: Any, model: Any, samples: list[Any]) -> dict[str, Tensor]:
    errors = []
    for sample in samples:
        with _dense_attention(module, sample.mask, len(sample.tokens)):
            errors.append((model([sample]) - sample.velocity[sample.is_noisy]) ** 2)
    return {"loss": torch.cat(errors).mean()}


class _dense_attention:
    """In place of the example's MaskedAttention, for one sample."""

    def __init__(self, module: Any, mask: str, seq_len: int) -> None:
        self._module, self._seen = module, dense_mask(mask, seq_len)

    def __enter__(self) -> None:
        self._before = self._module.MaskedAttention
        self._module.MaskedAttention = lambda _lens, _masks: self._attend

    def __exit__(self, *_: object) -> None:
        self._module.MaskedAttention = self._before

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~self._seen, -math.inf).softmax(-1), v)
