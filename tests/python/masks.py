"""Dense masks, written out from the definition of each kind in docs/masks.md, attention by them, and draws of masks."""

from __future__ import annotations

import math
import random
import re

import torch
from torch import Tensor


def dense_mask(mask: str, seq_len: int) -> Tensor:
    """(queries, keys): whether a query sees a key."""
    name, *given = mask.split(":")
    i, j = torch.arange(seq_len).unsqueeze(1), torch.arange(seq_len).unsqueeze(0)
    if name == "full":
        return torch.ones(seq_len, seq_len, dtype=torch.bool)
    if name == "causal":
        return j <= i
    if name == "prefix":
        return (j <= i) | ((i < int(given[0])) & (j < int(given[0])))
    if name == "block_causal":
        text, frame = map(int, given)
        block = torch.where(torch.arange(seq_len) < text, -1, (torch.arange(seq_len) - text).div(frame).floor().long())
        return block.unsqueeze(0) <= block.unsqueeze(1)
    if name == "window":
        return (i - j <= int(given[0])) & (j - i <= int(given[1]))
    seen = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    return _ranges(mask, seen) if name == "ranges" else _parts(mask, seen)


def packed_mask(seq_lens: list[int], masks: list[str]) -> Tensor:
    """Of sequences one after another."""
    dense = [dense_mask(mask, n) for mask, n in zip(masks, seq_lens, strict=True)]
    return torch.block_diag(dense_mask("full", 0), *dense).bool()  # of no sequences, too


def dense_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """One matrix of all scores. A query that sees nothing gets 0."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1).masked_fill(~allowed, 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v)


def _ranges(mask: str, seen: Tensor) -> Tensor:
    query = 0
    for run in mask.removeprefix("ranges:").split(";"):
        count, _, keys = run.partition("=")
        for moved in range(int(count)):
            for text in filter(None, keys.split(",")):
                ends = (int(end.strip("+")) + moved * end.endswith("+") for end in text.split("-"))
                seen[query, slice(*ends)] = True
            query += 1
    return seen


def _parts(mask: str, seen: Tensor) -> Tensor:
    parts: list[tuple[str, int, list[int]]] = []  # kind, tokens, parts that are seen beside itself
    for word in mask.split():
        chunks = re.fullmatch(r"(clean|noisy):(\d+)x(\d+)", word)
        if chunks:
            if chunks[1] == "clean":
                first_clean = len(parts)
            for i in range(int(chunks[2])):
                parts.append(("f", int(chunks[3]), list(range(first_clean + i))))
            continue
        own, _, others = word.partition("@")
        sees = list(range(len(parts)))
        if "@" in word:
            spans = [[int(end) for end in span.split("-")] for span in filter(None, others.split(","))]
            sees = [part for span in spans for part in range(span[0], span[-1] + 1)]
        parts.append((own[0], int(own[1:]), sees))
    starts = [sum(n for _, n, _ in parts[:p]) for p in range(len(parts) + 1)]
    for p, (kind, n, sees) in enumerate(parts):
        rows = slice(starts[p], starts[p + 1])
        for other in sees:
            seen[rows, starts[other] : starts[other + 1]] = True
        seen[rows, rows] = torch.ones(n, n, dtype=torch.bool).tril() if kind == "c" else True
    return seen


def random_mask(draw: random.Random, seq_len: int) -> str:
    """Of any kind."""
    cut = draw.randint(0, seq_len)
    named = ["full", "causal", f"prefix:{cut}", f"block_causal:{cut}:{draw.randint(1, seq_len)}",
             f"window:{cut}:{draw.randint(0, seq_len)}"]  # fmt: skip
    if seq_len < 8 or draw.random() < 0.4:
        return draw.choice(named)
    if draw.random() < 0.3:
        text, chunks = draw.randint(1, seq_len // 4), draw.randint(1, 3)
        chunk = (seq_len - text) // (2 * chunks)
        rest = seq_len - 2 * chunks * chunk - text
        return f"c{text} clean:{chunks}x{chunk} noisy:{chunks}x{chunk}" + (f" f{rest}@0" if rest else "")
    ends = sorted(draw.sample(range(1, seq_len), draw.randint(1, 4)))
    words = []
    for p, (first, end) in enumerate(zip([0, *ends], [*ends, seq_len], strict=True)):
        others = [other for other in range(len(ends) + 1) if other != p and draw.random() < 0.5]
        words.append(draw.choice("fc") + str(end - first) + draw.choice(["", "@" + ",".join(map(str, others))]))
    return " ".join(words)
