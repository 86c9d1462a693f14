"""BalancedBatchSampler: who loads what, where lengths are known before the data is. Needs torch."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from knapformer import __version__
from knapformer._core import MAX_MAGNITUDE, MAX_SEQUENCE_TOKENS, ArgumentError, Plan, StateError, Topology, TrainedModel
from knapformer.argument_checks import checked_integers, checked_masks, checked_numbers, described, extremes, integer
from knapformer.cost import Cost, CostSettings
from knapformer.epoch_steps import EpochOrder, EpochPass, EpochSteps
from knapformer.equal_on_ranks import check_equal_on_ranks
from knapformer.groups import check_initialized
from knapformer.planning import attention_pairs
from knapformer.shared_samples import gives_shared_samples
from knapformer.trainers import check_iterated, keep_lists

if TYPE_CHECKING:
    from typing_extensions import Unpack

Batch = TypeVar("Batch")
_MAX_SEED = 2**62  # of an epoch, too: torch takes their sum as a seed
_MAX_REPEATS = 2**31 - 1  # their sum over all samples is an int64
_LISTS_AHEAD = 64  # that a DataLoader may have fetched ahead of the trainer: two each of 32 workers


class _Pass(EpochPass):
    """With what its iterator and the caller have come to. set_epoch and load_state_dict make another pass."""

    num_lists: int = 0  # yielded
    num_seen: int = 1  # steps that the caller has come to, as its calls show
    is_running: bool = False  # an iterator is at it
    is_done: bool = False  # an iterator came to its end
    is_told: bool = False  # set_epoch or load_state_dict said where it begins


class BalancedBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches, as lists of indices, with equal work on every rank. No data travels between ranks.

        sampler = BalancedBatchSampler(lengths, batch_size=4, d_model=3072, micro_batches=4)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(num_epochs):
            sampler.set_epoch(epoch)
            for step, micro_batch, batch in sampler.steps(loader):
                token_mean(model(batch), total=sampler.num_tokens(step)).backward()
                if micro_batch == 3:
                    optimizer.step()

    An optimizer step holds the samples that a DistributedSampler of the same seed and epoch gives to all ranks for it,
    batch_size * micro_batches to each. Which rank computes a sample, and in which micro-batch, is planned: every rank
    makes the same plan by itself from the lengths, without a collective. Ranks and micro-batches hold different numbers
    of samples, so losses are to be weighted over the whole step (knapformer.losses).

    In a process group, all ranks begin each pass, which compares their samplers through the default group's store.
    Where num_replicas and rank are given, nothing is compared; `digest` is there for that.

    Where `topology` has bags of several ranks, long samples are shared: all ranks of a group get the index, each
    computes its `chunks`, and a balancer of that topology follows `plan` (docs/training.md). No token is routed.

    lengths: tokens of every sample, text and visual, each at least 1: a list, a tensor or an array of any integers. For
        trainers that stack or pad, as many as its place in the stack has.
    cost, settings: a `Cost`, or its fields as keyword arguments, of which d_model is always needed. The model's
        `routed` is ignored: nothing is routed.
    batch_size: mean number of samples of a rank in a micro-batch.
    micro_batches: the number of them in an optimizer step: so many lists make a step, on every rank.
    topology: of bags of ranks, as a SequenceBalancer takes it ("g2/1n4"), the same in all steps: not "auto", but
        what `rank_topologies` puts first. For models that compute a part of a sample and call the balancer's attention,
        such as those of `knapformer.balance`, called with placed=True. None: every sample is whole on one rank.
    repeats: how often each sample stands in an epoch, in the form of `lengths`; 0 leaves it out. An epoch is that of a
        DistributedSampler over data in which each sample stands so often, in adjacent places. None: once.
    weights: as of WeightedRandomSampler: an epoch is as many samples as there are lengths, which are drawn with
        replacement in proportion to the weights, alike on all ranks and anew in each epoch. Numbers from 0 on, in the
        form of `lengths`.
    num_replicas, rank: the number of data-parallel ranks; this rank. None: as in the default process group, or 1 and 0.
    shuffle, seed: as of DistributedSampler.
    drop_last: leave out the samples that do not fill a step. Otherwise they are a last, shorter step, planned like the
        others. Unlike with DistributedSampler, no sample is repeated to fill it.
    allow_empty: lists may be empty, for a dataset and a collate function that take them. Otherwise every list has a
        sample: data whose last step has too few is refused, and, in iteration, a step in which a rank cannot be given
        one (some with bags of several sizes, or with max_tokens_per_rank).
    work: FLOPs of one block forward for every sample, as in `plan` and in the form of `lengths`; replaces the formula
        of the length. None: the formula.
    masks: the text of every sample's mask (see `attention_pairs`). Plans count its exact pairs and carry it, so that
        `balancer.attention(q, k, v)` computes it. None: the cost's mask for all.
    max_tokens_per_rank: in a micro-batch. 0: as in `plan`. A sample that is longer is refused at once, unless ranks of
        a bag can share it.

    Raises ArgumentError; in iteration, too, where a step's samples cannot keep max_tokens_per_rank. At the begin of a
    pass: StateError on all ranks, where samplers differ, or a rank does not begin it within the store's timeout.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | Any,
        cost: Cost | None = None,
        *,
        batch_size: int,
        micro_batches: int = 1,
        topology: str | None = None,
        work: Sequence[float] | Tensor | Any | None = None,
        masks: Sequence[str] | Any | None = None,
        repeats: Sequence[int] | Tensor | Any | None = None,
        weights: Sequence[float] | Tensor | Any | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        allow_empty: bool = False,
        max_tokens_per_rank: int = 0,
        **settings: Unpack[CostSettings],
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "rank", "cost", "settings")}
        cost = Cost.of(cost, settings)
        self._is_compared = num_replicas is None and dist.is_initialized()
        num_replicas, rank = _place(num_replicas, rank)
        batch_size = integer("batch_size", batch_size, 1)
        micro_batches = integer("micro_batches", micro_batches, 1)
        seed = integer("seed", seed, 0, _MAX_SEED)
        if topology == "auto":
            raise ArgumentError(
                "topology: got 'auto', expected one for all steps, as the balancer that follows has; "
                "knapformer.rank_topologies names the best"
            )
        if not isinstance(cost.model, TrainedModel | None):
            raise ArgumentError(f"model: got {cost.model!r}, expected a TrainedModel")
        if weights is not None and repeats is not None:
            raise ArgumentError("repeats: got some, expected none with weights")
        if weights is not None and not shuffle:
            raise ArgumentError("shuffle: got False, expected True with weights")
        lengths = checked_integers("lengths", lengths, low=1, high=MAX_SEQUENCE_TOKENS)
        size = len(lengths)
        work = None if work is None else checked_numbers("work", work, size, 1 / MAX_MAGNITUDE)
        masks = None if masks is None else checked_masks(masks, lengths)
        if masks is None and size > 0:
            for extreme in extremes(lengths):  # a written mask is of one length
                attention_pairs(cost.mask, extreme)
        of_weights = None if weights is None else checked_numbers("weights", weights, size, 0)
        of_repeats = None if repeats is None else checked_integers("repeats", repeats, size, 0, _MAX_REPEATS)
        epoch_size = size if of_repeats is None else int(of_repeats.sum())
        self._order = EpochOrder(epoch_size, shuffle, seed, of_repeats, of_weights)
        self._rank = rank
        self._steps = EpochSteps(
            lengths=lengths, work=work, masks=masks, topology=f"g1n{num_replicas}" if topology is None else topology,
            cost=dataclasses.replace(cost, model=(cost.model or TrainedModel()).replace(routed=False),
                                     effort="low" if cost.effort is None else cost.effort),
            num_ranks=num_replicas, micro_batches=micro_batches, num_samples=self._order.num_samples,
            step_size=num_replicas * micro_batches * batch_size, drop_last=drop_last, allow_empty=allow_empty,
            max_tokens_per_rank=max_tokens_per_rank,
        )  # fmt: skip
        checked = {"lengths": lengths, "work": work, "masks": masks, "weights": of_weights, "repeats": of_repeats}
        planned = self._steps.checked(of_weights, of_repeats)
        self._compared = _compared(given | checked | {"num_replicas": num_replicas}, self._steps.cost, planned)
        self._next_pass = self._pass_from(epoch=0, first=0)
        self._pass = self._next_pass  # of which the methods speak
        self._steps.check_last_step(0)
        self._lowest_epoch: int | None = None  # that of the state loaded last
        keep_lists(BalancedBatchSampler)
        bags = Topology(self._steps.topology, num_replicas)
        gives_shared_samples(self, bags, "placed=True for its samples")
        self._is_asked = all(len(bag) == 1 for bag in bags.bags)  # nothing is shared: no need to ask

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists(sys._getframe(1))

    def _lists(self, by: FrameType) -> Iterator[list[int]]:
        check_iterated(self, by)  # not in __iter__: a DataLoader with workers could not clean up yet
        del by
        keep_lists(BalancedBatchSampler)
        if self._is_compared and dist.is_initialized():
            check_equal_on_ranks("passes of samplers", self._description)
        own, last = self._next_pass, self._pass
        was_left = not (last.is_running or last.is_done)
        if last.first > 0 and was_left and not own.is_told:  # to begin anew would be silent
            raise StateError(
                "load_state_dict: its position was taken by a pass that was left before its end (next(iter(loader)), "
                "say), expected load_state_dict again, or set_epoch with another epoch"
            )
        if last.is_done:
            self._warn_of_parts()
        self._next_pass = self._pass_from(own.epoch, 0)
        own.is_running = True
        try:
            for step in range(own.num_steps):
                for micro_batch in range(self._steps.micro_batches):
                    indices = [index for index, _, _ in own.chunks(step, micro_batch, self._rank)]
                    self._pass = own  # another iterator may have begun since: "this pass" is that of the last list
                    own.num_lists += 1
                    if own.num_lists > _LISTS_AHEAD:
                        self._warn_of_parts()
                    yield indices
            own.is_done = True
        finally:
            own.is_running = False

    def __len__(self) -> int:
        """The number of lists in a pass: the micro-batches of its steps."""
        return self._pass.num_steps * self._steps.micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Sets the order of the next pass, which starts at the epoch's first sample, unless a state of this epoch was
        loaded. A running pass goes on unchanged, and is "this pass" until the next one begins."""
        epoch = integer("epoch", epoch, 0, _MAX_SEED)
        if self._lowest_epoch is not None and epoch < self._lowest_epoch:
            raise StateError(
                f"epoch: got {epoch}, though a state of epoch {self._lowest_epoch} was loaded; expected no lower one "
                "(a loader that accelerate prepared counts its own passes: call its set_epoch before each)"
            )
        if epoch != self._next_pass.epoch:
            self._begin_next_at(epoch, 0)

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: accelerate and Lightning call `set_epoch` of a batch sampler's `sampler`."""
        return self

    def steps(self, loader: Iterable[Batch], first: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """A pass over `loader`, which has this sampler: step, micro-batch, batch. Steps count from 0 in each pass, as
        methods here take them, also after load_state_dict; after accelerate's skip_first_batches from `first`."""
        for i, batch in enumerate(loader, first * self._steps.micro_batches):
            yield *divmod(i, self._steps.micro_batches), batch

    def num_samples(self, step: int) -> int:
        """The samples of all ranks in an optimizer step of this pass."""
        return len(self._pass.samples(self._asked(step)))

    def num_tokens(self, step: int, counted: Sequence[int] | Tensor | Any | None = None) -> int:
        """The tokens of all ranks in an optimizer step of this pass.

        counted: the tokens of every sample that count, such as those that bear a loss, in the form of `lengths`: 0 to
            the sample's length. None: all. All but a tensor or an array of int64 is converted in each call.
        """
        samples = self._pass.samples(self._asked(step))
        lengths = self._steps.lengths[samples]
        if counted is None:
            return int(lengths.sum())
        values = checked_integers("counted", counted, len(self._steps.lengths))[samples]
        for k in ((values < 0) | (values > lengths)).nonzero()[:1].flatten().tolist():
            raise ArgumentError(
                f"counted: got {values[k]} for sample {samples[k]}, expected 0 to {lengths[k]}, its length"
            )
        return int(values.sum())

    def step_plan(self, step: int) -> Plan:
        """The plan of an optimizer step of this pass. Its sequence ids number the step's samples."""
        self._is_asked = True
        return self._pass.planned(self._asked(step))[1]

    def plan(self, step: int, micro_batch: int) -> Plan:
        """The plan of a micro-batch of this pass, the same on all ranks: for SequenceBalancer.follow."""
        return self.step_plan(step).plans[integer("micro_batch", micro_batch, 0, self._steps.micro_batches - 1)]

    def chunks(self, step: int, micro_batch: int) -> list[tuple[int, int, int]]:
        """What this rank computes in a micro-batch of this pass: (index, begin, end) of each entry of its list, in
        order. The rank computes the tokens [begin, end) of that sample, all of them where it is not shared."""
        self._is_asked = True
        return self._pass.chunks(self._asked(step), micro_batch, self._rank)

    def state_dict(self, num_steps: int | None = None) -> dict[str, int]:
        """The position of the pass, the same on all ranks: after the last whole optimizer step.

        Micro-batches of a step that has not ended are computed again: a checkpoint does not hold their gradients.

        num_steps: optimizer steps taken in this pass, which began where the state that was loaded last says. None: as
            many as were yielded whole, which is right only where nothing fetches ahead; a DataLoader's workers do.
            Warns if more steps were yielded than other methods were asked about. Before a pass: how many it is to skip.
        """
        own = self._pass
        num_whole = own.num_lists // self._steps.micro_batches
        if num_steps is not None:
            most = num_whole if own.num_lists > 0 else own.num_steps
            num_whole = integer("num_steps", num_steps, 0, most)
        else:
            if num_whole > own.num_seen:
                warnings.warn(
                    f"num_steps: got None after {num_whole} steps were yielded, expected the number of those taken in "
                    "this pass; those that workers of a DataLoader have fetched ahead would be lost",
                    stacklevel=2,
                )
            own.num_seen = num_whole + 1  # torchdata's StatefulDataLoader asks after each list, and keeps the answers
        after = min(own.first + num_whole * self._steps.step_size, self._order.num_samples)
        return {"epoch": own.epoch, "next_sample": after, **self._order.state}

    @property
    def digest(self) -> str:
        """A hash of what must be equal on all ranks when the next pass begins: every argument but the rank, lengths and
        other values of samples included, the epoch, the position, and this package's version."""
        return hashlib.blake2b(repr(self._description).encode(), digest_size=16).hexdigest()

    @property
    def _description(self) -> dict[str, str]:
        position = {"epoch": str(self._next_pass.epoch), "next_sample": str(self._next_pass.first)}
        return self._described | position

    @cached_property
    def _described(self) -> dict[str, str]:
        return {"knapformer": __version__, **{name: described(value) for name, value in self._compared.items()}}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass goes on from the position in `state`, with any number of ranks and micro-batches for which the
        last step has samples enough (drop_last, allow_empty). A pass that an iterator is at is not changed.

        One pass takes the position. If its iterator is dropped before its end (`next(iter(loader))`), the next pass is
        a StateError: load the state again, or set another epoch."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state: got {type(state).__name__}, expected a dict, which state_dict returned")
        for name, own in self._order.state.items():
            if state.get(name) != own:
                raise ArgumentError(f"state: got {name} {state.get(name)}, expected {own}")
        epoch = integer("state", state.get("epoch"), 0, _MAX_SEED, of="epoch ")
        next_sample = integer("state", state.get("next_sample"), 0, self._order.num_samples, of="sample ")
        self._steps.check_last_step(next_sample)
        self._lowest_epoch = epoch
        self._begin_next_at(epoch, next_sample)

    def _pass_from(self, epoch: int, first: int) -> _Pass:
        return _Pass(self._order, self._steps, epoch, first)

    def _begin_next_at(self, epoch: int, first: int) -> None:
        self._next_pass = self._pass_from(epoch, first)
        self._next_pass.is_told = True
        if not self._pass.is_running:
            self._pass = self._next_pass

    def _asked(self, step: int) -> int:
        """The step of this pass that the caller asks about. A step whose lists were yielded counts as reached."""
        step = integer("step", step, 0, self._pass.num_steps - 1)
        if step * self._steps.micro_batches < self._pass.num_lists:
            self._pass.num_seen = max(self._pass.num_seen, step + 1)
            if step > 0:
                self._warn_of_parts(4)
        return step

    def _warn_of_parts(self, level: int = 3) -> None:
        """Warns once, if the user's loop has not asked which parts of samples this rank computes."""
        if not self._is_asked:
            self._is_asked = True
            warnings.warn(
                f"topology: got {self._steps.topology}, whose ranks share samples, and no call of chunks() or "
                "plan(): a model that computes its samples whole counts shared ones several times; expected "
                "sampler.chunks(step, micro_batch) in the loop, or a topology of bags of one rank",
                stacklevel=level,
            )


def _compared(given: dict[str, Any], cost: Cost, planned: Plan) -> dict[str, Any]:
    """What ranks compare, in one form, whatever form it was given in. planned: any plan, for its settings."""
    arguments = given | vars(cost)
    for name in ("cluster", "model", "num_heads"):  # fields of these are among the plan's settings
        del arguments[name]
    return arguments | {"topology": str(planned.topology), **dict(planned.settings)}


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks, and this rank."""
    if (num_replicas is None) != (rank is None):
        raise ArgumentError("num_replicas, rank: got one of them, expected both or neither")
    if num_replicas is None and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if num_replicas is None:
        check_initialized("num_replicas, rank", "them, or ")
    num_replicas = integer("num_replicas", 1 if num_replicas is None else num_replicas, 1)
    try:
        Topology(f"g1n{num_replicas}")
    except ArgumentError as error:
        raise ArgumentError(f"num_replicas: got {num_replicas}, more than a topology may have ({error})") from None
    return num_replicas, integer("rank", 0 if rank is None else rank, 0, num_replicas - 1)
