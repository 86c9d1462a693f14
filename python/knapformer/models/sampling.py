"""Pictures of a packed flow-matching model: requests of any resolutions and aspect ratios at once, over all ranks.

    requests = [SampleRequest(noise, ids, text, pooled, guidance_scale=4.0), ...]    # this rank's, may be none
    pictures = sample(model, requests, balancer, num_steps=28)                       # of them: (image tokens, channels)

A request under classifier-free guidance is two sequences, one with its text and one without (or with a negative one).
The planner places them as any others: together, on different ranks, or shared by the ranks of a bag. Both velocities
come home with `reverse_route`, and are combined there. So a picture does not depend on what else is sampled with it,
nor on the number of ranks, but for the order of floating-point sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from knapformer.models.flux import FluxBatch
from knapformer.models.packing import segment_index

if TYPE_CHECKING:
    from knapformer.balancer import SequenceBalancer

# (packed tokens (tokens, channels), time of each sample (samples,)) -> velocity (tokens, channels).
Velocity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SampleRequest:
    """One picture to make. Tensors are on the model's device; text of no words is (0, text_channels)."""

    noise: Tensor  # (image tokens, channels): where the flow starts, at time 1
    image_ids: Tensor  # (image tokens, 3) integers: frame, row, column
    text: Tensor  # (text tokens, text_channels)
    pooled: Tensor  # (pooled_channels,)
    guidance_scale: float = 1.0  # of classifier-free guidance: 1 takes the conditional velocity alone
    negative_text: Tensor | None = None  # (tokens, text_channels), what guidance leads away from; None: no text
    negative_pooled: Tensor | None = None  # (pooled_channels,); None: zeros
    embedded_guidance: float = 0.0  # for models that take guidance as an input (FluxConfig.guidance)
    shift: float = 1.0  # spends more steps (> 1) near the noise, as large pictures want: t' = s t / (1 + (s - 1) t)

    def __post_init__(self) -> None:
        num_tokens = self.noise.shape[0]
        if self.noise.ndim != 2 or num_tokens == 0:
            raise ValueError(f"noise: got shape {tuple(self.noise.shape)}, expected (image tokens, channels)")
        if tuple(self.image_ids.shape) != (num_tokens, 3):
            raise ValueError(f"image_ids: got shape {tuple(self.image_ids.shape)}, expected ({num_tokens}, 3)")
        for name in ("text", "negative_text", "pooled", "negative_pooled"):
            value, is_text = getattr(self, name), name.endswith("text")
            if value is not None and value.ndim != (2 if is_text else 1):
                expected = "(text tokens, text_channels)" if is_text else "(pooled_channels,)"
                raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {expected}")
        if not self.shift > 0:
            raise ValueError(f"shift: got {self.shift}, expected a number > 0")


def flow_times(num_steps: int, shifts: Sequence[float]) -> Tensor:
    """(num_steps + 1, requests) float64 from 1, the noise, down to 0: evenly spaced where the shift is 1."""
    even = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64).unsqueeze(1)
    shift = torch.tensor(shifts, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def euler_flow(velocity: Velocity, x: Tensor, seq_lens: Sequence[int], times: Tensor) -> Tensor:
    """Follows the velocity with Euler steps.

    x: (tokens, channels), packed samples at times[0]; seq_lens: tokens of each; times: (steps + 1, samples), on the
    CPU. Returns x at times[-1]. Calls `velocity` once a step, also for no samples.
    """
    lens = torch.as_tensor(list(seq_lens), dtype=torch.int64)
    for now, after in itertools.pairwise(times):
        step = torch.repeat_interleave(after - now, lens).to(x.device, x.dtype)
        x = x + step.unsqueeze(1) * velocity(x, now.to(x.device, x.dtype))
    return x


@torch.no_grad()
def sample(
    model: nn.Module,
    requests: Sequence[SampleRequest],
    balancer: SequenceBalancer | None = None,
    *,
    num_steps: int = 28,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Collective: every rank of the group calls, with its own requests or none, and the same num_steps.

    model: a FluxTransformer, or what takes (FluxBatch, balancer) and returns the velocity of the image tokens, from
    picture to noise, at a time in [0, 1]; sharded or not. group: the ranks that call, those of `balancer` and of the
    model's shards; None: the world, or this process alone where torch.distributed is not in use.

    Returns the pictures of this rank's requests, (image tokens, channels) each, in the dtype of the noise. Raises
    ValueError on every rank where num_steps, or the channels or dtypes of requests, are wrong or differ between ranks.
    """
    form = _agreed_form(requests, num_steps, group)
    if form is None:
        return []
    pairs = _GuidedPairs(requests, form, next(model.parameters()).device)

    def velocity(x: Tensor, times: Tensor) -> Tensor:
        return pairs.combine(model(pairs.batch(x, times), balancer).to(x.dtype))

    try:
        done = euler_flow(velocity, pairs.noise, pairs.image_lens, flow_times(num_steps, [r.shift for r in requests]))
    finally:
        # The root of FSDP keeps its parameters gathered for a backward pass, which here does not come.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return list(done.split(pairs.image_lens)) if requests else []


@dataclass(frozen=True)
class _Form:
    """What all requests of all ranks have in common: a rank without any learns it from the others."""

    channels: int
    text_channels: int
    pooled_channels: int
    dtype: torch.dtype

    @staticmethod
    def of(request: SampleRequest) -> _Form:
        negative = request.negative_text, request.negative_pooled
        for name, value, like in zip(("text", "pooled"), negative, (request.text, request.pooled), strict=True):
            if value is not None and value.shape[-1] != like.shape[-1]:
                raise ValueError(f"negative_{name}: got {value.shape[-1]} channels, expected {like.shape[-1]}")
        widths = (request.noise.shape[-1], request.text.shape[-1], request.pooled.shape[-1])
        return _Form(*widths, request.noise.dtype)

    def __str__(self) -> str:
        widths = f"{self.channels} channels, {self.text_channels} of text, {self.pooled_channels} pooled"
        return f"{widths}, {str(self.dtype).removeprefix('torch.')}"


def _agreed_form(requests: Sequence[SampleRequest], num_steps: int, group: dist.ProcessGroup | None) -> _Form | None:
    """None where no rank has a request. What is wrong on one rank is raised on all: none goes on and waits."""
    error, forms = None, []
    try:
        forms = sorted({_Form.of(request) for request in requests}, key=str)
        if type(num_steps) is not int or num_steps < 1:
            raise ValueError(f"num_steps: got {num_steps!r}, expected an integer >= 1")
    except ValueError as problem:
        error = str(problem)
    mine = (error, num_steps, forms)
    said = [mine]
    if group is not None or dist.is_initialized():
        said *= dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    for theirs, _, _ in said:
        if theirs is not None:
            raise ValueError(theirs)
    if len(steps := {steps for _, steps, _ in said}) > 1:
        raise ValueError(f"num_steps: got {sorted(steps)} on different ranks, expected the same on all")
    if len(all_forms := {form for _, _, theirs in said for form in theirs}) > 1:
        got = "; ".join(sorted(map(str, all_forms)))
        raise ValueError(f"requests: got {got}, expected one of these for all requests of all ranks")
    return all_forms.pop() if all_forms else None


class _GuidedPairs:
    """The requests as sequences: the conditional one of each, then the unconditional ones of those under guidance."""

    def __init__(self, requests: Sequence[SampleRequest], form: _Form, device: torch.device) -> None:
        is_guided = torch.tensor([request.guidance_scale != 1.0 for request in requests], dtype=torch.bool)
        guided = [request for request in requests if request.guidance_scale != 1.0]
        self.image_lens = [len(request.noise) for request in requests]
        self._guided_lens = [len(request.noise) for request in guided]

        def empty(*shape: int, dtype: torch.dtype = form.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        no_text, no_pooled = empty(0, form.text_channels), empty(form.pooled_channels).zero_()
        texts = [request.text for request in requests]
        texts += [no_text if request.negative_text is None else request.negative_text for request in guided]
        pooled = [request.pooled for request in requests]
        pooled += [no_pooled if request.negative_pooled is None else request.negative_pooled for request in guided]

        self.noise = torch.cat([empty(0, form.channels), *(request.noise for request in requests)])
        self._image_ids = torch.cat([empty(0, 3, dtype=torch.int64), *(r.image_ids for r in [*requests, *guided])])
        self._text, self._text_lens = torch.cat([no_text, *texts]), [len(text) for text in texts]
        self._pooled = torch.stack([no_pooled, *pooled])[1:]
        embedded = [request.embedded_guidance for request in [*requests, *guided]]
        self._embedded_guidance = torch.tensor(embedded, dtype=form.dtype, device=device)

        self._guided_requests = is_guided.nonzero().squeeze(1).to(device)
        self._guided_rows = is_guided[segment_index(self.image_lens)].nonzero().squeeze(1).to(device)
        scales = torch.tensor([request.guidance_scale - 1.0 for request in guided], dtype=form.dtype)
        self._scale_of_row = scales[segment_index(self._guided_lens)].unsqueeze(1).to(device)

    def batch(self, x: Tensor, times: Tensor) -> FluxBatch:
        """x: (image tokens, channels) and times (requests,), of the requests."""
        return FluxBatch(
            image=torch.cat([x, x.index_select(0, self._guided_rows)]),
            image_ids=self._image_ids,
            image_lens=self.image_lens + self._guided_lens,
            text=self._text,
            text_lens=self._text_lens,
            pooled=self._pooled,
            timestep=torch.cat([times, times.index_select(0, self._guided_requests)]),
            guidance=self._embedded_guidance,
        )

    def combine(self, velocity: Tensor) -> Tensor:
        """Of all sequences -> of the requests: unconditional + scale * (conditional - unconditional)."""
        conditional, unconditional = velocity.split([sum(self.image_lens), sum(self._guided_lens)])
        difference = conditional.index_select(0, self._guided_rows) - unconditional
        combined: Tensor = conditional.index_add(0, self._guided_rows, self._scale_of_row * difference)
        return combined
