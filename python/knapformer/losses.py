"""Losses over sequences of unequal length on all ranks, weighted as one process with all the data would weigh them.

In the mean of the ranks' means a token would weigh more on a rank with few tokens. Here every rank divides its own sum
by the count over all ranks. The returned loss is scaled so that, after the gradient reduction of DDP or FSDP (a mean
over ranks by default), the gradient is that of the mean over all data. Where gradients are added up over ranks instead,
divide it by their number.

    loss = token_mean(per_token)          # per_token: (tokens,), after reverse_route
    loss.backward()
    print(global_mean(loss))                 # the mean over all data

The count takes an all-reduce of one number, on the CPU where the group has a CPU backend. So every rank has to call, in
the same order, also a rank without data: its part of the loss is 0 and stays attached to the model. No all-reduce is
needed where the caller knows the count: `total=plan.num_tokens`, say, where every token that was planned bears a loss.
With gradient accumulation the count is that of all micro-batches:

    total = count_over_ranks(sum(len(batch.target) for batch in micro_batches))
    for batch in micro_batches:
        token_mean(per_token_of(batch), total=total).backward()

Some training loops divide the loss by the number of micro-batches: accelerate's and DeepSpeed's `backward`, Lightning,
transformers' Trainer. `loss_divisor` says by how many; not to say so is an error with `total`, or under accelerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer._core import ArgumentError
from knapformer.argument_checks import checked_integers, integer
from knapformer.attention.packed_rows import to_device
from knapformer.trainers import check_nothing_divides


def token_mean(
    per_token: Tensor,
    *,
    total: int | None = None,
    group: dist.ProcessGroup | None = None,
    loss_divisor: int | None = None,
) -> Tensor:
    """The mean over all tokens of all ranks.

    per_token: (tokens,), the loss of each token of this rank; may be empty. Leave out tokens that bear no loss.
    total: the number of tokens of all ranks that bear a loss, over all micro-batches of a step; saves the all-reduce.
    group: the ranks that gradients are reduced over. None: the world; one rank where torch.distributed is not in use.
    loss_divisor: what the training loop divides the loss by before its backward pass; the loss is multiplied by it.
        None: by nothing, which is an error while accelerate accumulates micro-batches, and, with `total`, where
        Lightning, transformers' Trainer or DeepSpeed is imported.

    Returns a scalar in float32 or better. Where no rank has data it is 0, attached to the graph. Raises ArgumentError.
    """
    _check_vector("per_token", per_token)
    factor = _factor(group, loss_divisor, total)
    return _share_of_mean(per_token.sum(dtype=_wide(per_token)), len(per_token), total, group, factor)


def sample_mean(
    per_token: Tensor,
    seq_lens: Sequence[int] | Tensor,
    *,
    total: int | None = None,
    group: dist.ProcessGroup | None = None,
    loss_divisor: int | None = None,
) -> Tensor:
    """The mean over all samples of all ranks. Each sample, short or long, counts once, with the mean over its tokens.

    seq_lens: tokens in `per_token` of each of this rank's samples, each at least 1, on the CPU. total: the number of
    samples. The other arguments, and errors: as in token_mean. Where ranks share samples, take token_mean of sums over
    chunks, each over the tokens of its whole sample.
    """
    _check_vector("per_token", per_token)
    factor = _factor(group, loss_divisor, total)
    lens = checked_integers("seq_lens", seq_lens)
    if int(lens.sum()) != len(per_token) or (len(lens) > 0 and int(lens.min()) < 1):
        expected = f"lengths of at least 1 that add up to {len(per_token)}"
        raise ArgumentError(f"seq_lens: got {lens.tolist()}, expected {expected}")
    weights = torch.repeat_interleave(1.0 / lens.to(torch.float64), lens)
    weighted = per_token * to_device(weights.to(_wide(per_token)), per_token.device)
    return _share_of_mean(weighted.sum(), len(lens), total, group, factor)


def count_over_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum of a count, at least 0, over the ranks of a group, all of which call. Raises ArgumentError."""
    return int(_sum_over_ranks(integer("count", count, 0), group))


def global_mean(loss: Tensor, group: dist.ProcessGroup | None = None, loss_divisor: int | None = None) -> Tensor:
    """The mean over all data, made of what token_mean or sample_mean returned on each rank; detached, to look at. Of a
    micro-batch it is the part of the step's mean.

    A collective of the group. group, loss_divisor: as they were given to that function.
    """
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise ArgumentError(f"loss: got {_kind(loss)}, expected what token_mean or sample_mean returned")
    factor = _factor(group, loss_divisor, None)
    whole = loss.detach().clone()
    if _num_ranks(group) > 1:
        dist.all_reduce(whole, group=group)
    return whole / factor


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_vector(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or value.ndim != 1 or value.is_complex():
        raise ArgumentError(f"{name}: got {_kind(value)}, expected real numbers, (tokens,)")


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _num_ranks(group: dist.ProcessGroup | None) -> int:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"group: got {group!r}, expected a process group that this rank is in")
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def _factor(group: dist.ProcessGroup | None, loss_divisor: int | None, total: int | None) -> int:
    """What a rank's share is multiplied by, since later steps divide: a mean over ranks divides by their number."""
    if loss_divisor is None and torch.is_grad_enabled():
        check_nothing_divides(total)
    divisor = 1 if loss_divisor is None else integer("loss_divisor", loss_divisor, 1)
    return divisor * _num_ranks(group)


def _share_of_mean(
    local_sum: Tensor, local_count: int, total: int | None, group: dist.ProcessGroup | None, factor: int
) -> Tensor:
    if total is not None:
        if (total := integer("total", total, 0)) < local_count:
            raise ArgumentError(f"total: got {total}, expected that of the step, at least this rank's {local_count}")
        return local_sum * (factor / max(total, 1))
    # Where the group has no CPU backend, the count stays on the device: the host does not wait for it.
    count = _sum_over_ranks(local_count, group).clamp(min=1)
    return local_sum * (factor / count.to(local_sum.dtype))


def _sum_over_ranks(count: int, group: dist.ProcessGroup | None) -> Tensor:
    if _num_ranks(group) == 1:
        return torch.tensor(count, dtype=torch.int64)
    devices = {str(device) for device in (group or dist.group.WORLD)._device_types}  # type: ignore[union-attr]
    device = "cpu" if "cpu" in devices else min(devices)  # on the CPU nothing waits for the accelerator
    total = torch.full((), count, dtype=torch.int64, device=device)  # filled there: a copy would wait
    dist.all_reduce(total, group=group)
    return total
