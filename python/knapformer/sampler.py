"""BalancedBatchSampler: who loads what, where lengths are known before the data is. Needs torch."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from knapformer._core import (
    DEFAULT_GAMMA,
    MAX_SEQUENCE_TOKENS,
    ArgumentError,
    Cluster,
    Plan,
    StepPlan,
    TrainedModel,
    plan,
)
from knapformer.sample_values import checked_integers, checked_work, chosen, extremes, integer

_SEEDS = (-(2**63), 2**64 - 1)  # that torch takes
_STEPS_KEPT = 8  # plans that are kept: a DataLoader's workers fetch ahead of the step that a trainer asks for


@dataclass
class _Pass:
    """What an iterator goes through: an epoch's samples from `first` on. set_epoch and load_state_dict make another."""

    epoch: int
    first: int  # the position in the epoch's order where it begins
    order: Tensor | None = None  # of all the epoch's samples, once it is needed
    planned: OrderedDict[int, tuple[Tensor, StepPlan]] = field(default_factory=OrderedDict)  # of the last steps
    num_lists: int = 0  # yielded
    is_running: bool = False  # an iterator is at it


class BalancedBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches, as lists of indices, with equal work on every rank. Nothing travels between ranks.

        sampler = BalancedBatchSampler(lengths, batch_size=4, d_model=3072, micro_batches=4)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(num_epochs):
            sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                step, micro_batch = divmod(i, 4)
                token_mean(model(batch), total=sampler.num_tokens(step)).backward()
                if micro_batch == 3:
                    optimizer.step()

    An optimizer step holds the samples that a DistributedSampler of the same seed and epoch gives to all ranks for it,
    batch_size * micro_batches to each. Which rank computes a sample, and in which micro-batch, is planned: every rank
    makes the same plan by itself from the lengths, without a collective. Ranks and micro-batches hold different numbers
    of samples, so losses are to be weighted over the whole step (knapformer.losses).

    Where `topology` has bags of several ranks, a long sample may be shared: all ranks of its group get its index, and
    each computes its own tokens of it. A balancer of that topology follows the plan, and attention exchanges; no token
    is routed, before the model or after it:

        balancer.follow(sampler.plan(step, micro_batch))
        chunks = sampler.chunks(step, micro_batch)     # (index, begin, end), in the order of the list
        x = torch.cat([sample[begin:end] for sample, (_, begin, end) in zip(batch, chunks)])

    lengths: tokens of every sample, text and visual, each at least 1: a list, a tensor or an array, such as a memory
        map, of any integers. An array or a tensor is not copied.
    batch_size: mean number of samples of a rank in a micro-batch.
    d_model: width of the blocks, in features.
    micro_batches: the number of them in an optimizer step: so many lists make a step, on every rank.
    topology: of bags of ranks, as a SequenceBalancer takes it ("g2/1n4"), the same in all steps: not "auto", but
        what `rank_topologies` puts first. For models that compute a part of a sample and call the balancer's attention;
        balanced models of diffusers compute samples whole. None: every sample is whole on one rank.
    num_replicas, rank: the number of data-parallel ranks; this rank. None: as in the default process group, or 1 and 0.
    shuffle, seed: as of DistributedSampler.
    same_shape: for trainers that stack or pad. Samples of equal shape are adjacent in a list; `groups` cuts it where
        the shape changes. The plan counts the cost of stacking: a sample has as many tokens as the longest of its shape
        in the step. Samples of equal count trade places, so that each shape is in few lists. Ranks have different
        numbers of groups: under FSDP all groups of a list belong in one call of the model.
    shapes: with same_shape, the number of every sample's shape, in the form of `lengths`. None: the sample's length.
    drop_last: leave out the samples that do not fill a step. Otherwise they are a last, shorter step, planned like the
        others. Unlike with DistributedSampler, no sample is repeated to fill it.
    allow_empty: lists may be empty, for a dataset and a collate function that take them. Otherwise every list has a
        sample. Data is refused if its last step has too few samples for that, and a step, in iteration, in which a
        rank cannot be given one (some with bags of several sizes, or with max_tokens_per_rank).
    work: FLOPs of one block forward for every sample, as in `plan` and in the form of `lengths`; replaces the formula
        of the length. Not with same_shape, which plans the cost of stacking. None: the formula.
    max_tokens_per_rank: in a micro-batch; 0 for no limit. Set it: without a limit, a list may hold many times the mean.
    model: a TrainedModel. None: the default. Its `routed` is ignored: nothing is routed.
    gamma, mask, rank_speed, cluster, num_heads, sync, effort: as in `plan`.

    Raises ArgumentError, naming the argument; in iteration, too, where a step's samples cannot keep
    max_tokens_per_rank.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | Any,
        *,
        batch_size: int,
        d_model: int,
        micro_batches: int = 1,
        topology: str | None = None,
        same_shape: bool = False,
        shapes: Sequence[int] | Tensor | Any | None = None,
        work: Sequence[float] | Tensor | Any | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        allow_empty: bool = False,
        max_tokens_per_rank: int = 0,
        gamma: SupportsFloat = DEFAULT_GAMMA,
        mask: str = "full",
        rank_speed: Sequence[float] = (),
        cluster: Cluster | str | None = None,
        model: TrainedModel | None = None,
        num_heads: int = 0,
        sync: str = "micro_batch",
        effort: int | str = "low",
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ArgumentError("num_replicas, rank: got one of them, expected both or neither")
        if num_replicas is None or rank is None:
            grouped = dist.is_initialized()
            if not grouped and (started := os.environ.get("WORLD_SIZE", "1")) != "1":
                raise ArgumentError(
                    f"num_replicas, rank: got none, and no process group, in a job of WORLD_SIZE={started}; expected "
                    "them, or init_process_group before"
                )
            num_replicas, rank = (dist.get_world_size(), dist.get_rank()) if grouped else (1, 0)
        batch_size = integer("batch_size", batch_size, 1)
        micro_batches = integer("micro_batches", micro_batches, 1)
        num_replicas = integer("num_replicas", num_replicas, 1)
        rank = integer("rank", rank, 0, num_replicas - 1)
        seed = integer("seed", seed, *_SEEDS)
        if topology == "auto":
            raise ArgumentError(
                "topology: got 'auto', expected one for all steps, as the balancer that follows has; "
                "knapformer.rank_topologies and knapformer doctor --topologies name the best"
            )
        if not isinstance(model, TrainedModel | None):
            raise ArgumentError(f"model: got {model!r}, expected a TrainedModel")
        self._lengths = checked_integers("lengths", lengths)
        if len(self._lengths) > 0:
            shortest, longest = extremes(self._lengths)
            if shortest < 1:
                raise ArgumentError(f"lengths: got {shortest}, expected at least 1")
            if longest > MAX_SEQUENCE_TOKENS:
                raise ArgumentError(f"lengths: got {longest}, expected at most {MAX_SEQUENCE_TOKENS} tokens")
        if shapes is not None and not same_shape:
            raise ArgumentError("shapes: got some, expected none without same_shape=True")
        if same_shape and topology is not None:
            raise ArgumentError(f"topology: got {topology!r}, expected none with same_shape=True")
        self._shapes: Tensor | None = None
        if same_shape:
            self._shapes = self._lengths if shapes is None else checked_integers("shapes", shapes)
            if len(self._shapes) != len(self._lengths):
                raise ArgumentError(f"shapes: got {len(self._shapes)}, expected one for each of {len(self._lengths)}")
        if work is not None and same_shape:
            raise ArgumentError("work: got some, expected none with same_shape=True")
        self._work = None if work is None else checked_work(work, len(self._lengths))
        self._batch_size = batch_size
        self._micro_batches = micro_batches
        self._num_ranks = num_replicas
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._allow_empty = allow_empty
        self._settings: dict[str, Any] = {
            "topology": f"g1n{num_replicas}" if topology is None else topology,
            "d_model": d_model,
            "gamma": gamma,
            "effort": effort,
            "masks": mask,
            "max_tokens_per_rank": max_tokens_per_rank,
            "rank_speed": rank_speed,
            "cluster": cluster,
            "model": (model or TrainedModel()).replace(routed=False),
            "num_heads": num_heads,
            "micro_batches": micro_batches,
            "sync": sync,
        }
        none: list[list[Any]] = [[]] * num_replicas
        plan(
            none, work=None if work is None else none, **self._settings
        )  # refuses settings that are wrong for any samples
        self._pass = self._next_pass = _Pass(
            epoch=0, first=0
        )  # "this pass" of the methods; what the next iterator takes
        self._check_last_step(0)

    def __iter__(self) -> Iterator[list[int]]:
        own = self._next_pass
        self._check_last_step(own.first)
        self._next_pass = _Pass(own.epoch, 0)
        own.is_running = True
        try:
            for step in range(self._num_steps(own)):
                for micro_batch in range(self._micro_batches):
                    self._pass = own  # another iterator may have begun since: "this pass" is that of the last list
                    indices = [index for index, _, _ in self.chunks(step, micro_batch)]
                    own.num_lists += 1
                    yield indices
        finally:
            own.is_running = False

    def __len__(self) -> int:
        """The number of lists in a pass: the micro-batches of its steps."""
        return self._num_steps(self._pass) * self._micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Sets the order of the next pass, which starts at the epoch's first sample, unless a state of this epoch was
        loaded. A pass that an iterator is at goes on unchanged, and is "this pass" until the next one begins."""
        epoch = integer("epoch", epoch, *self._epochs)
        if epoch != self._next_pass.epoch:
            self._begin_next_at(epoch, 0)

    @property
    def _epochs(self) -> tuple[int, int]:
        """The lowest and the highest: with the seed they make a seed of torch's."""
        return _SEEDS[0] - self._seed, _SEEDS[1] - self._seed

    def num_samples(self, step: int) -> int:
        """The samples of all ranks in an optimizer step of this pass."""
        return len(self._samples(step))

    def num_tokens(self, step: int, counted: Sequence[int] | Tensor | Any | None = None) -> int:
        """The tokens of all ranks in an optimizer step of this pass.

        counted: the tokens of every sample that count, such as those that bear a loss, in the form of `lengths`. None:
            all. A list is converted in each call; a tensor or an array is not.
        """
        values = self._lengths if counted is None else checked_integers("counted", counted)
        if len(values) != len(self._lengths):
            raise ArgumentError(f"counted: got {len(values)}, expected one for each of {len(self._lengths)} samples")
        return int(chosen(values, self._samples(step)).sum())

    def step_plan(self, step: int) -> StepPlan:
        """The plan of an optimizer step of this pass. Its sequence ids number the step's samples."""
        return self._planned_step(step)[1]

    def plan(self, step: int, micro_batch: int) -> Plan:
        """The plan of a micro-batch of this pass, the same on all ranks: for SequenceBalancer.follow."""
        return self.step_plan(step).plans[self._checked_micro_batch(micro_batch)]

    def chunks(self, step: int, micro_batch: int) -> list[tuple[int, int, int]]:
        """What this rank computes in a micro-batch of this pass: (index, begin, end) of each entry of its list, in
        order. The rank computes the tokens [begin, end) of that sample, all of them where it is not shared."""
        samples, planned = self._planned_step(step)
        chunks = planned.chunks_on(self._rank, self._checked_micro_batch(micro_batch))
        held = samples[[sequence for sequence, _, _ in chunks]]
        if self._shapes is not None:
            own = held[chosen(self._shapes, held).argsort(stable=True)]
            return [(i, 0, n) for i, n in zip(own.tolist(), chosen(self._lengths, own).tolist(), strict=True)]
        return [(index, begin, end) for index, (_, begin, end) in zip(held.tolist(), chunks, strict=True)]

    def groups(self, step: int, micro_batch: int) -> list[list[int]]:
        """With same_shape: this rank's list in a micro-batch of this pass, cut where the shape changes."""
        if self._shapes is None:
            raise ArgumentError("same_shape: got False, expected True for groups")
        groups: dict[int, list[int]] = {}
        indices = [index for index, _, _ in self.chunks(step, micro_batch)]
        for index, shape in zip(indices, self._shapes[indices].tolist(), strict=True):
            groups.setdefault(shape, []).append(index)
        return list(groups.values())

    def state_dict(self, num_steps: int | None = None) -> dict[str, int]:
        """The position of the pass, the same on all ranks: after the last whole optimizer step.

        Micro-batches of a step that has not ended are computed again: a checkpoint does not hold their gradients.

        num_steps: optimizer steps taken in this pass, which began where the state that was loaded last says. None: as
            many as were yielded whole, which is right only where nothing fetches ahead; a DataLoader's workers do.
            Before a pass has begun: those that it is to leave out.
        """
        num_whole = self._pass.num_lists // self._micro_batches
        if num_steps is not None:
            most = num_whole if self._pass.num_lists > 0 else self._num_steps(self._pass)
            num_whole = integer("num_steps", num_steps, 0, most)
        after = min(self._pass.first + num_whole * self._step_size, len(self._lengths))
        return {"epoch": self._pass.epoch, "next_sample": after, **self._order_follows()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass goes on from the position in `state`, with any number of ranks and micro-batches for which the
        last step has samples enough (drop_last, allow_empty). A pass that an iterator is at is not changed."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state: got {type(state).__name__}, expected a dict, which state_dict returned")
        for name, own in self._order_follows().items():
            if state.get(name) != own:
                raise ArgumentError(f"state: got {name} {state.get(name)}, expected {own}")
        for name in ("epoch", "next_sample"):
            if name not in state:
                raise ArgumentError(f"state: got no {name}, expected one, as state_dict returned it")
        epoch = integer("state", state["epoch"], *self._epochs, of="epoch ")
        next_sample = integer("state", state["next_sample"], 0, len(self._lengths), of="sample ")
        self._check_last_step(next_sample)
        self._begin_next_at(epoch, next_sample)

    def _begin_next_at(self, epoch: int, first: int) -> None:
        self._next_pass = _Pass(epoch, first)
        if not self._pass.is_running:
            self._pass = self._next_pass

    def _order_follows(self) -> dict[str, int]:
        """The values that the order of an epoch's samples depends on."""
        return {"seed": self._seed, "shuffle": int(self._shuffle), "num_samples": len(self._lengths)}

    def _checked_micro_batch(self, micro_batch: int) -> int:
        return integer("micro_batch", micro_batch, 0, self._micro_batches - 1)

    @property
    def _step_size(self) -> int:
        return self._num_ranks * self._micro_batches * self._batch_size

    def _num_steps(self, of: _Pass) -> int:
        left = len(self._lengths) - of.first
        return left // self._step_size if self._drop_last else -(-left // self._step_size)

    def _check_last_step(self, first: int) -> None:
        left = (len(self._lengths) - first) % self._step_size
        num_lists = self._num_ranks * self._micro_batches
        if 0 < left < num_lists and not (self._drop_last or self._allow_empty):
            raise ArgumentError(
                f"lengths: got {len(self._lengths)} samples, of which {left} are left for the last step; expected at "
                f"least {num_lists}, one for each rank and micro-batch, or drop_last=True, or allow_empty=True"
            )

    def _samples(self, step: int) -> Tensor:
        """A step's samples: first those that a DistributedSampler gives to rank 0, then those of rank 1, and so on."""
        own = self._pass
        step = integer("step", step, 0, self._num_steps(own) - 1)
        if own.order is None:
            size = len(self._lengths)
            generator = torch.Generator().manual_seed(self._seed + own.epoch)
            own.order = torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        first = own.first + step * self._step_size
        samples = own.order[first : min(first + self._step_size, len(own.order))]
        dealt = torch.nn.functional.pad(samples, (0, -len(samples) % self._num_ranks), value=-1)
        dealt = dealt.view(-1, self._num_ranks).T.flatten()
        return dealt[dealt >= 0]

    def _planned_step(self, step: int) -> tuple[Tensor, StepPlan]:
        """The step's samples, in the order of the plan's ids, and its plan."""
        samples = self._samples(step)
        done = self._pass.planned
        if step in done:
            done.move_to_end(step)
            return done[step]
        counted = chosen(self._lengths, samples)
        if self._shapes is not None:
            _, shape = chosen(self._shapes, samples).unique(return_inverse=True)
            longest = counted.new_zeros(len(samples)).scatter_reduce_(0, shape, counted, "amax")
            counted = longest[shape]
        work = None if self._work is None else self._by_rank(self._work[samples])
        planned = plan(self._by_rank(counted), work=work, **self._settings)
        if not self._allow_empty:
            planned = planned.fill_ranks()
            self._check_none_is_empty(step, planned)
        if self._shapes is not None:
            samples = self._gathered_shapes(samples, counted, planned)
        done[step] = samples, planned
        if len(done) > _STEPS_KEPT:
            done.popitem(last=False)
        return done[step]

    def _check_none_is_empty(self, step: int, planned: StepPlan) -> None:
        """The same on all ranks, so that none of them waits for one that has nothing to collate."""
        for micro_batch, of_micro_batch in enumerate(planned.plans):
            held = of_micro_batch.sequences_on
            if [] in held:
                raise ArgumentError(
                    f"topology: got {self._settings['topology']}, by which rank {held.index([])} has no sample in "
                    f"micro-batch {micro_batch} of step {step}; expected allow_empty=True, or bags of one size without "
                    "a limit"
                )

    def _by_rank(self, values: Tensor) -> list[list[Any]]:
        """Values of a step's samples, as a list for each rank: as even as possible, the longer lists first."""
        return [of_rank.tolist() for of_rank in values.tensor_split(self._num_ranks)]

    def _gathered_shapes(self, samples: Tensor, counted: Tensor, planned: StepPlan) -> Tensor:
        """The samples in another order: those that count equally many tokens trade places, which changes no list's
        work. After that, for each such count, the lists in their order hold the shapes in their order. So S shapes on L
        lists are at most S + L - 1 groups."""
        assert self._shapes is not None
        places = torch.empty(len(samples), dtype=torch.int64)  # the list of each id
        for micro_batch, of_micro_batch in enumerate(planned.plans):
            ids = torch.tensor(planned.sequences_of(micro_batch), dtype=torch.int64)
            ranks = torch.tensor(of_micro_batch.first_rank_of_sequence, dtype=torch.int64)
            places[ids] = micro_batch * self._num_ranks + ranks
        by_place = places.argsort(stable=True)
        by_place = by_place[counted[by_place].argsort(stable=True)]
        by_shape = chosen(self._shapes, samples).argsort(stable=True)
        by_shape = by_shape[counted[by_shape].argsort(stable=True)]
        gathered = torch.empty_like(samples)
        gathered[by_place] = samples[by_shape]
        return gathered
