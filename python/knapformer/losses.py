"""Losses over sequences of unequal length on all ranks, weighted as one process with all the data would weigh them.

The mean of the ranks' means is not the mean over all data: a token would weigh more on a rank with few tokens. Here
every rank divides its own sum by the count over all ranks. The returned loss is scaled so that, after the gradient
reduction of DDP or FSDP (a mean over ranks by default), the gradient is that of the mean over all data.

    loss = token_mean(per_token)          # per_token: (tokens,), after reverse_route
    loss.backward()
    print(global_mean(loss))                 # the mean over all data

The count takes an all-reduce of one number, on the CPU where the group has a CPU backend. So every rank has to call, in
the same order, also a rank without data: its part of the loss is 0 and stays attached to the model. No all-reduce is
needed where the count is known: from the plan (`plan`), or from the caller (`total`). With gradient accumulation the
count is that of all micro-batches: `total=step.num_tokens` where a StepPlan has planned them, else the caller's:

    total = count_over_ranks(sum(len(batch.target) for batch in micro_batches))
    for batch in micro_batches:
        token_mean(per_token_of(batch), total=total).backward()
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.device_copies import to_device

if TYPE_CHECKING:
    from knapformer._core import Plan, StepPlan

GradientReduction = Literal["mean", "sum"]


def token_mean(
    per_token: Tensor,
    *,
    plan: Plan | None = None,
    total: int | None = None,
    group: dist.ProcessGroup | None = None,
    gradient_reduction: GradientReduction = "mean",
) -> Tensor:
    """The mean over all tokens of all ranks.

    per_token: (tokens,), the loss of each token of this rank; may be empty. Leave out tokens that bear no loss.
    plan: saves the all-reduce where every token that was planned bears a loss. Not of one of several micro-batches,
        whose mean is not that of the step: `total=step_plan.num_tokens`.
    total: the number of tokens of all ranks, where it is known; saves the all-reduce, too.
    group: the ranks that gradients are reduced over. None: the world; one rank where torch.distributed is not in use.
    gradient_reduction: what the training loop does with gradients over these ranks.

    Returns a scalar in float32 or better. Where no rank has data it is 0, attached to the graph.
    """
    _check_vector("per_token", per_token)
    num_tokens = len(per_token)
    if plan is not None:
        rank = _checked_rank(plan, group)
        if (planned := plan.tokens_before[rank]) != num_tokens:
            raise ValueError(
                f"per_token: got {num_tokens} tokens, expected the {planned} that the plan has of this rank; where "
                "only some of them bear a loss, leave plan out"
            )
        total = plan.num_tokens
    return _share_of_mean(per_token.sum(dtype=_wide(per_token)), num_tokens, total, group, gradient_reduction)


def sample_mean(
    per_token: Tensor,
    seq_lens: Sequence[int] | Tensor,
    *,
    sample_lens: Sequence[int] | Tensor | None = None,
    plan: Plan | None = None,
    total: int | None = None,
    group: dist.ProcessGroup | None = None,
    gradient_reduction: GradientReduction = "mean",
) -> Tensor:
    """The mean over all samples of all ranks. Each sample, short or long, counts once, with the mean over its tokens.

    seq_lens: tokens in `per_token` of each of this rank's samples, each at least 1, on the CPU. sample_lens: tokens of
    the whole samples, where this rank computes only a chunk of some; it requires `total`, and chunks may be empty.
    plan, total: as in token_mean, but for samples. The other arguments: as in token_mean.
    """
    _check_vector("per_token", per_token)
    lens = _integers("seq_lens", seq_lens)
    shortest = 1 if sample_lens is None else 0
    if int(lens.sum()) != len(per_token) or (len(lens) > 0 and int(lens.min()) < shortest):
        expected = f"lengths of at least {shortest} that add up to {len(per_token)}"
        raise ValueError(f"seq_lens: got {lens.tolist()}, expected {expected}")
    whole = lens
    if sample_lens is not None:
        whole = _integers("sample_lens", sample_lens)
        if total is None:
            raise ValueError("total: got none, expected the samples of all ranks: chunks do not say how many they are")
        if whole.shape != lens.shape or bool((whole < lens.clamp(min=1)).any()):
            raise ValueError(
                f"sample_lens: got {whole.tolist()}, expected one for each of the chunks of {lens.tolist()}, each at "
                "least as long"
            )
    if plan is not None:
        rank = _checked_rank(plan, group)
        if len(plan.seq_lens[rank]) != len(lens):
            expected = f"the {len(plan.seq_lens[rank])} that the plan has of this rank"
            raise ValueError(f"seq_lens: got {len(lens)} samples, expected {expected}")
        total = plan.num_sequences
    weights = torch.repeat_interleave(1.0 / whole.to(torch.float64), lens)
    weighted = per_token * to_device(weights.to(_wide(per_token)), per_token.device)
    return _share_of_mean(weighted.sum(), len(lens) if sample_lens is None else 0, total, group, gradient_reduction)


def count_over_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum of a count over the ranks of a group, all of which call."""
    return int(_sum_over_ranks(count, group).item())


def global_mean(
    loss: Tensor, group: dist.ProcessGroup | None = None, gradient_reduction: GradientReduction = "mean"
) -> Tensor:
    """The mean over all data, made of what token_mean or sample_mean returned on each rank; detached, to look at.

    A collective of the group. group, gradient_reduction: as they were given to that function.
    """
    whole = loss.detach().clone()
    if _num_ranks(group) > 1:
        dist.all_reduce(whole, group=group)
    return whole / _factor(group, gradient_reduction)


def _check_vector(name: str, value: Tensor) -> None:
    if value.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected (tokens,)")


def _integers(name: str, values: Sequence[int] | Tensor) -> Tensor:
    tensor = torch.as_tensor(values, device="cpu")
    if len(tensor) > 0 and (tensor.is_floating_point() or tensor.is_complex()):  # torch makes floats of an empty list
        raise ValueError(f"{name}: got {tensor.dtype}, expected integers")
    return tensor.to(torch.int64)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _num_ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def _checked_rank(plan: Plan | StepPlan, group: dist.ProcessGroup | None) -> int:
    if hasattr(plan, "plans"):
        raise ValueError(
            "plan: got that of a step of micro-batches, expected one plan; for the mean over the step give "
            "total=step.num_tokens, or step.num_sequences in sample_mean"
        )
    num_ranks = _num_ranks(group)
    if plan.num_ranks != num_ranks:
        raise ValueError(
            f"plan: got one over {plan.num_ranks} ranks, expected one over the {num_ranks} that gradients are reduced "
            "over; where the balancer's group is only some of them, leave plan out"
        )
    return dist.get_rank(group) if num_ranks > 1 else 0


def _factor(group: dist.ProcessGroup | None, gradient_reduction: GradientReduction) -> int:
    """A rank's share is multiplied by this: a gradient reduction by mean divides by the number of ranks."""
    if gradient_reduction not in ("mean", "sum"):
        raise ValueError(f"gradient_reduction: got {gradient_reduction!r}, expected 'mean' or 'sum'")
    return _num_ranks(group) if gradient_reduction == "mean" else 1


def _share_of_mean(
    local_sum: Tensor,
    local_count: int,
    total: int | None,
    group: dist.ProcessGroup | None,
    gradient_reduction: GradientReduction,
) -> Tensor:
    factor = _factor(group, gradient_reduction)
    if total is not None:
        try:
            total = operator.index(total)
        except TypeError:
            raise ValueError(f"total: got {total!r}, expected an integer") from None
        if total < local_count:
            raise ValueError(f"total: got {total}, expected at least the {local_count} of this rank")
        return local_sum * (factor / max(total, 1))
    # Where the group has no CPU backend, the count stays on the device: the host does not wait for it.
    count = _sum_over_ranks(local_count, group)
    return local_sum * (factor / count.clamp(min=1).to(local_sum.dtype))


def _sum_over_ranks(count: int, group: dist.ProcessGroup | None) -> Tensor:
    if _num_ranks(group) == 1:
        return torch.tensor(count, dtype=torch.int64)
    total = torch.full((), count, dtype=torch.int64, device=_metadata_device(group))  # filled there: a copy would wait
    dist.all_reduce(total, group=group)
    return total


def _metadata_device(group: dist.ProcessGroup | None) -> torch.device:
    """The CPU where the group has a backend for it, so that nothing waits for the accelerator."""
    devices = {str(device) for device in (group or dist.group.WORLD)._device_types}  # type: ignore[union-attr]
    return torch.device("cpu" if "cpu" in devices else sorted(devices)[0])
