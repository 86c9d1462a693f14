"""BalancedLoader: batches with their plan, each planned while the one before it computes. Needs torch.

With micro-batches it plans whole optimizer steps, and moves their samples to the ranks that compute them.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from knapformer._core import ArgumentError, Plan, StateError, StepPlan, Topology
from knapformer._torch import PlanningAhead, Samples
from knapformer.balancer import SequenceBalancer
from knapformer.lengths_log import Recorder

Batch = TypeVar("Batch")


class BalancedLoader(Generic[Batch]):
    """Wraps this rank's loader, and yields its batches with the plan of each.

        loader = BalancedLoader(dataloader, balancer, config.d_model, empty=lambda: collate([]))
        for batch, plan in loader:                    # balancer holds the plan of this batch
            loss = step(model(batch, balancer, planned=True))

        step n     | finish plan n | fetch n+1, start its gather | compute n ...........................|
        a thread                                                 | wait for lengths n+1, plan n+1 |

    loader: a DataLoader, or any iterable of packed batches; each pass over the BalancedLoader is one pass over it.
    balancer: makes the plans; its ranks are those that step together. All of them iterate, and all make the same calls
        on `balancer`.
    d_model: width of the blocks, in features.
    seq_lens: of a batch, the tokens of each of its sequences, as the balancer plans them. None: `batch.seq_lens`, or
        `batch["seq_lens"]`.
    masks, work: of a batch, those of each of its sequences, as in plan_routing. None: the balancer's mask, and the
        formula's work.
    end: "longest": a pass lasts until all ranks have run out, and ranks that have run out before yield `empty()`, a
        batch without sequences, so that every batch of every rank is used once. "shortest": a pass lasts until one rank
        has run out.

    record: a log of `knapformer.record`, to which the lengths of every batch that is drawn are written.
    device: where the model's tensors will be ("cuda": the current one). The planning thread then packs the index tables
        of the first steps for it, too, and their samples arrive in pinned memory. None: the device is known from the
        first exchange on.

    An exception out of `loader` on one rank ends the pass on all ranks, after the batches before it: that rank raises
    it, the others raise StateError. The balancer cannot be used after it. A batch that the balancer's
    max_tokens_per_rank refuses also ends the pass, by ArgumentError on all ranks, but the balancer stays usable.

    A step takes one gather, of lengths, as plan_routing does. The gather starts when the step begins, on every rank at
    the same point between the balancer's other collectives. The rest of planning runs in a C++ thread.

    The batch ahead is fetched by the thread that trains: let a DataLoader's workers prepare it.

    With `micro_batches` an optimizer step is planned as a whole, and samples move before the model sees them:

        loader = BalancedLoader(samples, balancer, config.d_model, micro_batches=4,
                                per_token=["latents", "target"], per_sample=["text"])
        for i, (samples, plan) in enumerate(loader):    # a micro-batch; balancer holds its plan
            loss = token_mean(per_token_loss(model, samples), total=loader.step_plan.num_tokens)

        before step n | wait for samples n | plan n+1 is there: send its samples | draw n+2, start its gather |

    micro_batches: the number of them in an optimizer step: a step yields so many lists, on every rank. A list may be
        empty. So many batches are drawn from `loader` for a step, fewer at the end of `loader`. Each of these batches
        is a list of samples, and a sample is a dict of tensors.
    per_token, per_sample: together the names of all tensors of a sample. Tensors in per_token have a row for each token
        and are cut where several ranks share the sample. Tensors in per_sample have any shape and go whole to every
        rank that holds a part of the sample; so all may be in per_sample only where every bag is one rank. All are
        dense, on the CPU, of any dtype, without gradients. Tensors that come from other ranks are views of the buffer
        that received them, in pinned memory once an accelerator is known.
    seq_lens: None: the number of rows of the first tensor in per_token.
    sync: as in `knapformer.plan`.
    max_bytes_in_flight: the most that a rank sends, and that it receives, in one all-to-all; 0 for no limit. The bytes
        of a step beyond it move when the step before has ended, in all-to-alls of at most this size. A sample that is
        larger raises ArgumentError on all ranks, which ends the pass as max_tokens_per_rank does.

    The samples then lie on the ranks that compute them, in the order of `loader.chunks`. Nothing is routed in the
    model; only attention exchanges, for shared samples. Every rank holds samples of two steps ahead. `empty` is not
    used. A step takes one gather, and one all-to-all of bytes, which both overlap with the step before.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        balancer: SequenceBalancer,
        d_model: int,
        *,
        micro_batches: int | None = None,
        per_token: Sequence[str] = (),
        per_sample: Sequence[str] = (),
        sync: str = "micro_batch",
        max_bytes_in_flight: int = 0,
        seq_lens: Callable[[Batch], Sequence[int] | Tensor] | None = None,
        masks: Callable[[Batch], Sequence[str]] | None = None,
        work: Callable[[Batch], Sequence[float]] | None = None,
        empty: Callable[[], Batch] | None = None,
        end: Literal["longest", "shortest"] = "longest",
        record: Recorder | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if end not in ("longest", "shortest"):
            raise ArgumentError(f"end: got {end!r}, expected 'longest' or 'shortest'")
        if micro_batches is None:
            if per_token or per_sample:
                raise ArgumentError("per_token, per_sample: got names, expected none without micro_batches")
        elif micro_batches < 1:
            raise ArgumentError(f"micro_batches: got {micro_batches}, expected at least 1")
        elif seq_lens is None and not per_token:
            raise ArgumentError("per_token: got none, expected names of tensors, or seq_lens")
        self._balancer = balancer
        self._micro_batches = micro_batches
        self._fields = [(name, True) for name in per_token] + [(name, False) for name in per_sample]
        for name, count in Counter(self._names).items():
            if count > 1:
                raise ArgumentError(f"per_token, per_sample: got {name!r} twice, expected each name once")
        if max_bytes_in_flight < 0:
            raise ArgumentError(f"max_bytes_in_flight: got {max_bytes_in_flight}, expected at least 0")
        if micro_batches is None and end == "longest" and empty is None:
            raise ArgumentError(
                "empty: got none, expected a function that makes a batch without sequences, or end='shortest'"
            )
        if hasattr(loader, "gradient_state"):  # it would say "the last batch" when that is drawn, ahead of its step
            raise ArgumentError(
                "loader: got one that accelerate prepared, expected the DataLoader itself, with a DistributedSampler"
            )
        with contextlib.suppress(StateError):  # "auto": the balancer chooses it for the first step
            self._check_shared(Topology(balancer.topology, balancer.num_ranks))
        if device is not None:
            balancer.expect_device(torch.device(device))
        self._loader = loader
        self._d_model = d_model
        self._sync = sync
        self._max_bytes_in_flight = max_bytes_in_flight
        self._seq_lens = seq_lens or (_seq_lens_of if micro_batches is None else self._rows_of)
        self._record = record
        self._masks = masks
        self._work = work
        self._empty = empty
        self._end = end
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position = _Position()
        self._resume_at: _Position | None = None
        self._has_looked = False  # the pass from there was left at its first batch, as far as is known
        self._step_plan: StepPlan | None = None
        self._micro_batch = 0

    def __iter__(self) -> Iterator[tuple[Batch, Plan]]:
        if self._has_looked:  # to begin at the start would be silent, and there the order may be another by now
            raise StateError(
                "load_state_dict: its position was taken by a pass that was left at its first batch, expected that "
                "pass to go on, or load_state_dict again"
            )
        resumes, self._position, self._resume_at = self._resume_at is not None, self._resume_at or _Position(), None
        source = _Source(self, self._position)
        try:
            batches = self._iterate_batches(source) if self._micro_batches is None else self._iterate_steps(source)
            for first in islice(batches, 1):
                self._has_looked = resumes
                yield first
            self._has_looked = False
            yield from batches
        except StateError:
            if source.error is not None:  # the error of this rank's own data, in place of what all ranks are told
                raise source.error from None
            raise

    def _iterate_batches(self, source: _Source[Batch]) -> Iterator[tuple[Batch, Plan]]:
        ahead = self._start(source)
        while True:
            plan = self._balancer.finish_planning(ahead)
            assert isinstance(plan, Plan)
            if self._has_ended(ahead):
                break
            batch = source.batch
            ahead = self._start(source)
            self._position = source.position
            yield batch, plan
        self._position = _Position(is_left=not source.position.ended)

    def _iterate_steps(self, source: _Source[Any]) -> Iterator[tuple[Any, Plan]]:
        balancer = self._balancer
        # Two steps ahead: the next step's samples are in flight, and the lengths of the step after it.
        moving, position = self._start_step(source), source.position
        balancer.start_moving(moving)
        drawn, after = None if self._has_ended(moving) else self._start_step(source), source.position
        while drawn is not None:
            planned = balancer.finish_planning(moving)
            assert isinstance(planned, StepPlan)
            self._check_shared(planned.plans[0].topology)
            micro_batches = balancer.finish_moving(moving)
            balancer.start_moving(drawn)
            moving, drawn = drawn, None if self._has_ended(drawn) else self._start_step(source)
            self._position, position, after = position, after, source.position
            self._step_plan = planned
            for number, tensors in enumerate(micro_batches):
                if number == len(micro_batches) - 1:
                    self._position = position
                self._micro_batch = number
                plan = balancer.follow(planned, number)
                yield [dict(zip(self._names, chunk, strict=True)) for chunk in tensors], plan
        balancer.finish_planning(moving)
        balancer.finish_moving(moving)  # nobody computes these, but nothing may stay in flight
        self._position = _Position(is_left=not source.position.ended)

    @property
    def step_plan(self) -> StepPlan:
        """The plan of the optimizer step in which the loop is; with micro_batches alone."""
        if self._step_plan is None:
            raise StateError("step_plan: no step has begun, expected a loop over a loader with micro_batches")
        return self._step_plan

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(sequence, begin, end) of each entry of the list yielded last: this rank computes the tokens [begin, end) of
        that sequence of the step, all of them where it is not shared."""
        return self.step_plan.chunks_on(self._balancer.rank, self._micro_batch)

    def state_dict(self) -> dict[str, Any]:
        """This rank's position: after the batch that was yielded last. Each rank has its own: save those of all ranks.

        With micro-batches: after the last whole step. Micro-batches of a step that has not ended are computed again,
        as a checkpoint does not hold their gradients.

        Holds the wrapped loader's own state where that has `state_dict` and `load_state_dict` (torchdata's
        StatefulDataLoader). Keyed by rank, so that torch.distributed.checkpoint may save it as it is.
        """
        position = self._position
        state: dict[str, Any] = {
            "num_batches": position.num_batches,
            "ended": position.ended,
            "is_left": position.is_left,
        }
        if self._stateful:
            state["loader"] = self._snapshot() if position.state is None else position.state
        return {self._key: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on after the batch that was yielded last when `state` was taken, with the same batches.

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
        is_left = own.get("is_left", False)
        if self._stateful and is_left:
            iter(self._loader)  # the rest of the pass that was left; the next iterator begins a new one
        self._position = self._resume_at = _Position(own["num_batches"], own["ended"], is_left, own.get("loader"))
        self._has_looked = False

    @property
    def _key(self) -> str:
        return f"rank_{self._balancer.rank}_of_{self._balancer.num_ranks}"

    def _snapshot(self) -> bytes | None:
        """A copy of the wrapped loader's state, as the state itself may go on changing. Bytes, as checkpoints that are
        loaded in place need a state of the same structure at any time."""
        return pickle.dumps(self._loader.state_dict()) if self._stateful else None  # type: ignore[attr-defined]

    def _start(self, source: _Source[Batch]) -> PlanningAhead:
        seq_lens, of_each = source.fetch()
        failure = None if source.error is None else f"data: {type(source.error).__name__}: {source.error}"
        return self._balancer.start_planning(
            seq_lens, self._d_model, ended=source.position.ended, failure=failure, **of_each
        )

    def _start_step(self, source: _Source[Any]) -> PlanningAhead:
        samples, of_each = source.fetch_step()
        failure = None if source.error is None else f"data: {type(source.error).__name__}: {source.error}"
        return self._balancer.start_planning(
            (),
            self._d_model,
            samples=samples,
            micro_batches=self._micro_batches or 1,
            sync=self._sync,
            max_bytes_in_flight=self._max_bytes_in_flight,
            ended=source.position.ended,
            failure=failure,
            **of_each,
        )

    def _check_shared(self, topology: Topology) -> None:
        """What goes whole to each rank that shares a sample would count once for each of them."""
        if self._micro_batches is None or any(is_cut for _, is_cut in self._fields):
            return
        if any(len(bag) > 1 for bag in topology.bags):
            raise ArgumentError(
                f"per_token: got none, for a balancer of {topology}, whose ranks share samples; expected the names of "
                f"tensors that are cut where a sample is shared, or a balancer of g1n{self._balancer.num_ranks}"
            )

    def _has_ended(self, ahead: PlanningAhead) -> bool:
        return ahead.num_ended >= (1 if self._end == "shortest" else self._balancer.num_ranks)

    @property
    def _names(self) -> list[str]:
        return [name for name, _ in self._fields]

    def _lens_of(self, batch: Any) -> Sequence[int] | Tensor:
        """The lengths of a batch that was just drawn. Adds them to the log, if there is one."""
        lens = self._seq_lens(batch)
        if not hasattr(lens, "__len__"):  # an iterator can be read once
            lens = list(lens)
        if self._record is not None:
            self._record(lens)
        return lens

    def _of_each(self, batches: Sequence[Any]) -> dict[str, Any]:
        """The masks and the work of each sequence in these batches, where they are given."""
        said = {"masks": self._masks, "work": self._work}
        return {name: [item for batch in batches for item in of(batch)] for name, of in said.items() if of is not None}

    def _rows_of(self, samples: Any) -> list[int]:
        return [len(sample[self._fields[0][0]]) for sample in samples]


@dataclass(frozen=True)
class _Position:
    """A position in a pass over the wrapped loader: before the batch that is fetched next."""

    num_batches: int = 0  # taken from the loader
    ended: bool = False  # the loader has no more batches
    is_left: bool = False  # between passes, of which the last one left batches over (end="shortest")
    state: bytes | None = None  # the loader's own, where it has one, inside a pass


class _Source(Generic[Batch]):
    """One pass over this rank's batches, and after the last one batches without sequences."""

    def __init__(self, loader: BalancedLoader[Batch], position: _Position) -> None:
        self._loader = loader
        self._batches: Iterator[Batch] | None = None
        self._num_skipped = 0 if loader._stateful else position.num_batches
        self._num_batches = position.num_batches
        self.position = position  # the one before `batch`
        self.batch: Batch
        self.error: Exception | None = None

    def _draw(self, most: int) -> list[Batch]:
        """The next batches; none where there are no more."""
        if self.position.ended:
            return []
        of = self._loader
        if self._batches is None:  # here: an exception in opening the loader is an error of the first batch
            self._batches = islice(of._loader, self._num_skipped, None)
        self.position = _Position(self._num_batches, state=of._snapshot())
        batches = list(islice(self._batches, most))
        self._num_batches += len(batches)
        if not batches:
            self.position = _Position(self._num_batches, ended=True, state=of._snapshot())
        return batches

    def fetch(self) -> tuple[Sequence[int] | Tensor, dict[str, Any]]:
        """The next batch's lengths, and the masks and work of its sequences. An error is kept, and raised when the
        other ranks know of it."""
        of = self._loader
        try:
            for batch in self._draw(1):
                self.batch = batch
                return of._lens_of(batch), of._of_each([batch])
            if of._empty is not None:
                self.batch = of._empty()
        except Exception as error:
            self.error = error
        return [], {}

    def fetch_step(self) -> tuple[Samples, dict[str, Any]]:
        """The next step's samples, and their masks and work. An error is kept, as in fetch; after it nothing more is
        drawn."""
        of = self._loader
        try:
            batches: list[Any] = [] if self.error else self._draw(of._micro_batches or 1)
            samples = [_tensors_of(sample, of._names) for batch in batches for sample in batch]
            seq_lens = [_integer(length) for batch in batches for length in of._lens_of(batch)]
            return Samples(of._fields, samples, seq_lens), of._of_each(batches)
        except Exception as error:
            self.error = error
        return Samples(of._fields, [], []), {}


def _tensors_of(sample: Any, names: Sequence[str]) -> list[Tensor]:
    if not isinstance(sample, dict) or sample.keys() != set(names):
        came = ", ".join(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        raise ArgumentError(f"sample: got {came}; expected a dict of {', '.join(names)}")
    for name in names:
        if not isinstance(sample[name], Tensor):
            raise ArgumentError(f"sample['{name}']: got {type(sample[name]).__name__}, expected a tensor")
    return [sample[name] for name in names]


def _integer(length: Any) -> int:
    try:
        return operator.index(length)
    except TypeError:
        raise ArgumentError(f"seq_lens: got {length!r}, expected integers") from None


def _seq_lens_of(batch: Any) -> Sequence[int] | Tensor:
    lens = batch["seq_lens"] if isinstance(batch, dict) else getattr(batch, "seq_lens", None)
    if lens is None:
        raise ArgumentError(
            f"seq_lens: got batches of {type(batch).__name__}, which have none; expected a function of a batch"
        )
    return lens  # type: ignore[no-any-return]
