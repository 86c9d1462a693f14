"""examples/train_unified.py and train_causal_video.py: on two ranks the losses are those of one process with dense
masks, however the ranks are balanced."""

from __future__ import annotations

import statistics

import pytest
import torch
from distributed.ranks import run_ranks
from masked_training_ranks import dense_training, example, trainings
from masks import dense_mask

import knapformer

STEPS, BATCH, LONGEST = 4, 5, 300
SMALL = ("--steps", str(STEPS), "--batch-size", str(BATCH), "--longest", str(LONGEST))
WAYS = {"none": ("--balance", "none"), "length": ("--balance", "length"), "flat": ("--topology", "g1n2"),
        "shared": ("--topology", "g2n1"), "nested": ("--topology", "g2/1n1"), "of the node": ()}  # fmt: skip


@pytest.mark.parametrize("name", ["train_unified", "train_causal_video"])
def test_two_ranks_train_as_one_process(name: str) -> None:
    (expected,) = run_ranks(dense_training, 1, name, STEPS, BATCH, LONGEST, timeout_s=240)
    logs, of_the_other = run_ranks(trainings, 2, name, [(*SMALL, *way) for way in WAYS.values()], timeout_s=240)
    for way, log, other in zip(WAYS, logs, of_the_other, strict=True):
        assert len(log) == STEPS
        for entry, same, wanted in zip(log, other, expected, strict=True):
            for key, value in wanted.items():
                assert entry[key] == same[key] == pytest.approx(value, rel=1e-9), (way, key)
        num_shared = sum(entry["shared"] for entry in log)
        assert num_shared == {"none": 0, "flat": 0, "shared": STEPS * BATCH}.get(way, num_shared)
    assert expected[-1] != expected[0]


def test_the_loss_falls() -> None:
    for name, losses in (("train_unified", ("text", "image")), ("train_causal_video", ("loss",))):
        ((log,),) = run_ranks(trainings, 1, name, [("--steps", "70", "--longest", "200")], timeout_s=240)
        for key in losses:
            first, last = (statistics.mean(entry[key] for entry in part) for part in (log[:5], log[-5:]))
            assert last < 0.8 * first, (name, key, first, last)


def test_masks_say_what_samples_are_made_of() -> None:
    for number in range(40):
        sample = example("train_unified").draw_sample(number, 300)
        starts = torch.ones(len(sample.words), dtype=torch.bool)
        starts[1:] = sample.is_patch[1:] != sample.is_patch[:-1]
        part = starts.cumsum(0)
        same_image = (part.unsqueeze(1) == part) & sample.is_patch
        assert torch.equal(dense_mask(sample.mask, len(part)), torch.ones_like(same_image).tril() | same_image)
        assert not (sample.next_words[sample.is_patch] >= 0).any() and not sample.velocity[~sample.is_patch].any()

        sample = example("train_causal_video").draw_sample(number, 300)
        chunk, noisy = sample.chunks, sample.is_noisy  # chunk 0 is the prompt
        earlier = ~noisy & ((chunk < chunk.unsqueeze(1)) | ((chunk == chunk.unsqueeze(1)) & ~noisy.unsqueeze(1)))
        seen = earlier | ((chunk == chunk.unsqueeze(1)) & (noisy & noisy.unsqueeze(1)))
        seen[:8, :8] = torch.ones(8, 8, dtype=torch.bool).tril()
        assert torch.equal(dense_mask(sample.mask, len(chunk)), seen)
        assert not sample.velocity[~noisy].any() and not sample.times[~noisy].any() and sample.times[noisy].all()


@pytest.mark.parametrize("name", ["train_unified", "train_causal_video"])
def test_planning_by_pairs_is_worth_something(name: str) -> None:
    """The work of the busiest rank, by the pairs of the masks, over 10 steps of the default options."""
    module, busiest = example(name), {"none": 0.0, "length": 0.0, "mask": 0.0}
    for step in range(10):
        ranks = [[module.draw_sample(8 * step + i, 2400) for i in range(rank, 8, 2)] for rank in range(2)]
        lens, masks = [[len(s.times) for s in of] for of in ranks], [[s.mask for s in of] for of in ranks]
        work = [24 * n * 64**2 + module.GAMMA * 4 * 64 * int(dense_mask(mask, n).sum())
                for n, mask in zip(lens[0] + lens[1], masks[0] + masks[1], strict=True)]  # fmt: skip
        as_if_full = [[24 * n * 64**2 + module.GAMMA * 4 * 64 * n**2 for n in of] for of in lens]
        plans = [knapformer.plan(lens, "g1n2", d_model=64, gamma=module.GAMMA, cluster=module.CPU, model=module.MODEL,
                                 masks=masks, work=given) for given in (as_if_full, None)]  # fmt: skip
        busiest["none"] += max(sum(work[:4]), sum(work[4:]))
        for way, planned in zip(("length", "mask"), plans, strict=True):
            of_ranks = [0.0, 0.0]
            for of_sequence, rank in zip(work, planned.first_rank_of_sequence, strict=True):
                of_ranks[rank] += of_sequence
            busiest[way] += max(of_ranks)
    assert 1.08 * busiest["mask"] < busiest["length"] and 1.15 * busiest["mask"] < busiest["none"], busiest
