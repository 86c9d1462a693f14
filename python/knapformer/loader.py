"""Loaders that plan each step while the one before it computes: BalancedLoader, BalancedStepLoader. Needs torch."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from torch import Tensor

from knapformer._core import ArgumentError, Plan, StateError, Topology
from knapformer._torch import PlanningAhead, Samples
from knapformer.argument_checks import integer
from knapformer.balancer import SequenceBalancer
from knapformer.shared_samples import gives_shared_samples

Batch = TypeVar("Batch")
Item = TypeVar("Item")
Of = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class _Position:
    """A position in a pass over the wrapped loader: before the batch that is fetched next."""

    num_batches: int = 0  # taken from the loader
    ended: bool = False  # the loader has no more batches
    state: bytes | None = None  # the loader's own, where it has one, inside a pass


class _Loader(Generic[Item]):
    """What both loaders do: passes over the wrapped loader, in which ranks run out at different times, their position,
    and errors of the data, which are raised when the other ranks know of them."""

    def __init__(
        self,
        loader: Iterable[Any],
        balancer: SequenceBalancer,
        seq_lens: Callable[[Any], Sequence[int] | Tensor],
        masks: Of | None,
        work: Of | None,
    ) -> None:
        if hasattr(loader, "gradient_state"):  # it would say "the last batch" when that is drawn, ahead of its step
            raise ArgumentError(
                "loader: got one that accelerate prepared, expected the DataLoader itself, with a DistributedSampler"
            )
        self._loader = loader
        self._balancer = balancer
        self._seq_lens = seq_lens
        self._said = {name: of for name, of in (("masks", masks), ("work", work)) if of is not None}
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position = _Position()
        self._resume_at: _Position | None = None
        self._has_looked = False  # a pass took this position and has yielded only its first batch so far

    def __iter__(self) -> Iterator[tuple[Item, Plan]]:
        if self._has_looked:  # to begin at the start would be silent, and there the order may be another by now
            raise StateError(
                "load_state_dict: its position was taken by a pass that was left at its first batch, expected that "
                "pass to go on, or load_state_dict again"
            )
        resumes, self._position, self._resume_at = self._resume_at is not None, self._resume_at or _Position(), None
        if resumes:
            self._balancer.plan_routing(())  # a rank that begins anew calls start_planning: StateError on all
        source = _Source(self._loader, self._position, self._snapshot)
        try:
            for item in self._iterate(source):
                self._has_looked = self._has_looked or resumes
                yield item
                if resumes:
                    self._has_looked = resumes = False
        except StateError:
            if source.error is not None:  # the error of this rank's own data, in place of what all ranks are told
                raise source.error from None
            raise
        self._position = _Position()

    def _iterate(self, source: _Source) -> Iterator[tuple[Item, Plan]]:
        raise NotImplementedError

    def _has_ended(self, ahead: PlanningAhead) -> bool:
        return ahead.num_ended == self._balancer.num_ranks

    def _start(self, source: _Source, batches: list[Any], seq_lens: Any, **of_step: Any) -> PlanningAhead:
        """Starts to plan these batches of this rank. An error of the data is kept in `source`."""
        said: dict[str, Any] = {}
        with source.keeping_error():
            said = {name: [item for batch in batches for item in of(batch)] for name, of in self._said.items()}
        if source.error is not None:
            of_step["failure"] = f"data: {type(source.error).__name__}: {source.error}"
            seq_lens, said = (), {}
        return self._balancer.start_planning(seq_lens, ended=source.position.ended, **said, **of_step)

    def _lens_of(self, batch: Any) -> list[int] | Tensor:
        lens = self._seq_lens(batch)
        return lens if isinstance(lens, Tensor) else list(lens)  # an iterator can be read once

    def state_dict(self) -> dict[str, Any]:
        """This rank's position: after the batch, or the optimizer step, that was yielded last. Each rank has its own:
        save those of all ranks.

        Micro-batches of a step that has not ended are computed again, as a checkpoint does not hold their gradients.

        Holds the wrapped loader's own state where that has `state_dict` and `load_state_dict` (torchdata's
        StatefulDataLoader). Keyed by rank, so that torch.distributed.checkpoint may save it as it is.
        """
        position = self._position
        state: dict[str, Any] = {"num_batches": position.num_batches, "ended": position.ended}
        if self._stateful:
            state["loader"] = self._snapshot() if position.state is None else position.state
        return {self._key: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on after the batch that was yielded last when `state` was taken. All ranks load theirs.

        A wrapped loader with a state of its own goes on from that state. Any other is iterated from its start, and the
        batches that were used are skipped: its order must be the same again (a seeded generator, `set_epoch` called as
        before).

        One pass takes the position. If it is left at its first batch (`next(iter(loader))`), another one raises
        StateError: to begin there again, load the state again.
        """
        if self._key not in state:
            raise ArgumentError(f"state: got that of {', '.join(map(str, state)) or 'nobody'}, expected {self._key}")
        own = state[self._key]
        if self._stateful != ("loader" in own):
            has, expected = ("a", "none") if "loader" in own else ("no", "one")
            raise ArgumentError(f"state: got {has} state of the wrapped loader, expected {expected}, as it is now")
        if self._stateful:
            self._loader.load_state_dict(pickle.loads(own["loader"]))  # type: ignore[attr-defined]
        self._position = self._resume_at = _Position(own["num_batches"], own["ended"], own.get("loader"))
        self._has_looked = False

    @property
    def _key(self) -> str:
        return f"rank_{self._balancer.rank}_of_{self._balancer.num_ranks}"

    def _snapshot(self) -> bytes | None:
        """A copy of the wrapped loader's state, if it has one, as the state itself may go on changing. Bytes, as
        checkpoints that are loaded in place need a state of the same structure at any time."""
        return pickle.dumps(self._loader.state_dict()) if self._stateful else None  # type: ignore[attr-defined]


class _Source:
    """One pass over this rank's batches."""

    def __init__(self, loader: Iterable[Any], position: _Position, snapshot: Callable[[], bytes | None]) -> None:
        self._loader = loader
        self._snapshot = snapshot
        self._batches: Iterator[Any] | None = None
        self._num_batches = position.num_batches
        self.position = position  # the one before the batches that were drawn last
        self.error: Exception | None = None

    @contextlib.contextmanager
    def keeping_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error

    def draw(self, most: int) -> list[Any]:
        """The next batches; none where there are no more, and after an error."""
        batches: list[Any] = []
        with self.keeping_error():
            if self.position.ended or self.error is not None:
                return []
            if self._batches is None:  # here: an error of opening counts as one of the first batch
                self._batches, used = iter(self._loader), 0 if self.position.state else self._num_batches
                if (found := sum(1 for _ in islice(self._batches, used))) < used:
                    raise StateError(f"load_state_dict: got a position after {used} batches, expected at most {found}")
            self.position = _Position(self._num_batches, state=self._snapshot())
            batches = list(islice(self._batches, most))
            self._num_batches += len(batches)
            if not batches:
                self.position = _Position(self._num_batches, ended=True, state=self._snapshot())
        return batches


class BalancedLoader(_Loader[Batch]):
    """Wraps this rank's loader, and yields its batches with the plan of each.

        loader = BalancedLoader(dataloader, balancer, seq_lens=lambda batch: batch.lens, empty=lambda: collate([]))
        for batch, plan in loader:                    # balancer holds the plan of this batch
            loss = step(model(batch, balancer, planned=True))

    loader: a DataLoader, or any iterable of packed batches; each pass over the BalancedLoader is one pass over it.
    balancer: makes the plans, by a cost with d_model; its ranks are those that step together. All of them iterate, and
        all make the same calls on `balancer`.
    seq_lens: of a batch, the tokens of each of its sequences, as the balancer plans them.
    masks, work: of a batch, those of each of its sequences, as in plan_routing. None: the cost's mask, and the
        formula's work.
    empty: makes a batch without sequences: a pass lasts until all ranks have run out, and ranks that have run out
        before yield `empty()`, so that every batch of every rank is used once.

    An exception out of `loader` on one rank ends the pass on all ranks, after the batches before it: that rank raises
    it, the others raise StateError. The balancer cannot be used after it. A batch that the balancer's
    max_tokens_per_rank refuses also ends the pass, by ArgumentError on all ranks, but the balancer stays usable.

    A step takes one gather, of lengths. The thread that trains fetches the batch ahead: let workers prepare it.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        balancer: SequenceBalancer,
        *,
        seq_lens: Callable[[Batch], Sequence[int] | Tensor],
        empty: Callable[[], Batch],
        masks: Callable[[Batch], Sequence[str]] | None = None,
        work: Callable[[Batch], Sequence[float]] | None = None,
    ) -> None:
        super().__init__(loader, balancer, seq_lens, masks, work)
        self._empty = empty

    def _iterate(self, source: _Source) -> Iterator[tuple[Batch, Plan]]:
        batch, ahead = self._fetch(source)
        while True:
            plan = self._balancer.finish_planning(ahead)
            if self._has_ended(ahead):
                return
            item = batch
            batch, ahead = self._fetch(source)
            self._position = source.position
            yield item, plan

    def _fetch(self, source: _Source) -> tuple[Any, PlanningAhead]:
        batches = source.draw(1)
        batch: Any = None
        lens: list[int] | Tensor = []
        with source.keeping_error():
            if batches:
                batch, lens = batches[0], self._lens_of(batches[0])
            elif source.error is None:
                batch = self._empty()
        return batch, self._start(source, batches, lens)


class BalancedStepLoader(_Loader[list[dict[str, Tensor]]]):
    """Wraps this rank's loader, plans whole optimizer steps, and moves samples to the ranks that compute them, before
    the model sees them.

        loader = BalancedStepLoader(samples, balancer, 4, per_token=["latents", "target"], per_sample=["text"])
        for i, (samples, plan) in enumerate(loader):    # a micro-batch; balancer holds its plan
            loss = token_mean(per_token_loss(model, samples), total=loader.step_plan.num_tokens)

    The samples of a list lie in the order of `loader.chunks`. Nothing is routed in the model; only attention exchanges,
    for shared samples. A pass lasts until all ranks have run out: a rank that has run out before computes samples of
    others. Every rank holds samples of two steps ahead. A step takes one gather, and one all-to-all of
    bytes, which both overlap with the step before.

    loader, balancer, masks, work: as of BalancedLoader. Each batch of `loader` is a list of samples, and a
        sample is a dict of tensors.
    micro_batches: the number of them in an optimizer step: a step yields so many lists, on every rank. A list may be
        empty. So many batches are drawn from `loader` for a step, fewer at the end of `loader`.
    per_token, per_sample: together the names of all tensors of a sample. Tensors in per_token have a row for each token
        and are cut where several ranks share the sample. Tensors in per_sample have any shape and go whole to every
        rank that holds a part of the sample; so all may be in per_sample only where every bag is one rank. All are
        dense, on the CPU, of any dtype, without gradients. Tensors that come from other ranks are views of the buffer
        that received them, in pinned memory once the balancer has seen tensors of an accelerator.
    seq_lens: of a batch, the tokens of each of its samples. None: the number of rows of the first tensor in per_token.
    """

    def __init__(
        self,
        loader: Iterable[Sequence[dict[str, Tensor]]],
        balancer: SequenceBalancer,
        micro_batches: int,
        *,
        per_token: Sequence[str] = (),
        per_sample: Sequence[str] = (),
        seq_lens: Callable[[Any], Sequence[int] | Tensor] | None = None,
        masks: Callable[[Any], Sequence[str]] | None = None,
        work: Callable[[Any], Sequence[float]] | None = None,
    ) -> None:
        self._micro_batches = integer("micro_batches", micro_batches, 1)
        self._fields = [(name, True) for name in per_token] + [(name, False) for name in per_sample]
        self._names = [name for name, _ in self._fields]
        for name, count in Counter(self._names).items():
            if count > 1:
                raise ArgumentError(f"per_token, per_sample: got {name!r} twice, expected each name once")
        if seq_lens is None and not per_token:
            raise ArgumentError("per_token: got none, expected names of tensors, or seq_lens")
        super().__init__(loader, balancer, seq_lens or partial(_rows_of, per_token[0]), masks, work)
        topology = Topology(balancer.topology, balancer.num_ranks)
        # What goes whole to each rank that shares a sample would count once for each of them.
        if not per_token and any(len(bag) > 1 for bag in topology.bags):
            raise ArgumentError(
                f"per_token: got none, for a balancer of {topology}, whose ranks share samples; expected the names of "
                f"tensors that are cut where a sample is shared, or a balancer of g1n{balancer.num_ranks}"
            )
        gives_shared_samples(self, topology, f"a loader of g1n{balancer.num_ranks}")
        self._step_plan: Plan | None = None
        self._micro_batch = 0

    def _iterate(self, source: _Source) -> Iterator[tuple[list[dict[str, Tensor]], Plan]]:
        balancer = self._balancer
        # Two steps ahead: the next step's samples are in flight, and the lengths of the step after it.
        moving, before_moving = self._fetch(source), source.position
        balancer.start_moving(moving)
        drawn, before_drawn = None if self._has_ended(moving) else self._fetch(source), source.position
        while drawn is not None:
            planned = balancer.finish_planning(moving)
            micro_batches = balancer.finish_moving(moving)
            balancer.start_moving(drawn)
            moving, drawn = drawn, None if self._has_ended(drawn) else self._fetch(source)
            self._position, before_moving, before_drawn = before_moving, before_drawn, source.position
            self._step_plan = planned
            for number, tensors in enumerate(micro_batches):
                if number == len(micro_batches) - 1:
                    self._position = before_moving
                self._micro_batch = number
                plan = balancer.follow(planned, number)
                yield [dict(zip(self._names, chunk, strict=True)) for chunk in tensors], plan
        balancer.finish_planning(moving)
        balancer.finish_moving(moving)  # nobody computes these, but nothing may stay in flight

    def _fetch(self, source: _Source) -> PlanningAhead:
        batches = source.draw(self._micro_batches)
        samples = Samples(self._fields, [], [])
        with source.keeping_error():
            tensors = [_tensors_of(sample, self._names) for batch in batches for sample in batch]
            lens = [integer("seq_lens", length, 1) for batch in batches for length in self._lens_of(batch)]
            samples = Samples(self._fields, tensors, lens)
        return self._start(source, batches, (), samples=samples, micro_batches=self._micro_batches)

    @property
    def step_plan(self) -> Plan:
        """The plan of the optimizer step in which the loop is, with all its micro-batches."""
        if self._step_plan is None:
            raise StateError("step_plan: no step has begun, expected a loop over the loader")
        return self._step_plan

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(sequence, begin, end) of each entry of the list yielded last: this rank computes the tokens [begin, end) of
        that sequence of the step, all of them where it is not shared."""
        return self.step_plan.chunks_on(self._balancer.rank, self._micro_batch)


def _tensors_of(sample: Any, names: Sequence[str]) -> list[Tensor]:
    if not isinstance(sample, dict) or sample.keys() != set(names):
        came = ", ".join(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        raise ArgumentError(f"sample: got {came}; expected a dict of {', '.join(names)} (collate_fn=list)")
    for name in names:
        if not isinstance(sample[name], Tensor):
            raise ArgumentError(f"sample['{name}']: got {type(sample[name]).__name__}, expected a tensor")
    return [sample[name] for name in names]


def _rows_of(name: str, samples: Any) -> list[int]:
    return [len(sample[name]) for sample in samples]
