"""BalancedLoader: batches with their plan, each planned while the one before it computes. Needs torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from knapformer._core import ArgumentError, Plan, StateError
from knapformer._torch import PlanningAhead
from knapformer.balancer import SequenceBalancer

Batch = TypeVar("Batch")


class BalancedLoader(Generic[Batch]):
    """Wraps this rank's loader, and yields its batches with the plan of each.

        loader = BalancedLoader(dataloader, balancer, config.d_model, empty=lambda: collate([]))
        for batch, plan in loader:                    # balancer holds the plan of this batch
            loss = step(model(batch, balancer, planned=True))

        step n     | finish plan n | fetch n+1, start its gather | compute n ...........................|
        a thread                                                 | wait for lengths n+1, plan n+1 |

    loader: a DataLoader, or any iterable of packed batches; each pass over this one is one over that.
    balancer: plans; its ranks are those that step together. All of them iterate, and do nothing with `balancer` that
        the others do not.
    d_model: width of the blocks, in features.
    seq_lens: tokens of each sequence of a batch, as the balancer plans them. None: `batch.seq_lens`, or
        `batch["seq_lens"]`.
    masks: of each of these sequences, as in plan_routing. None: the balancer's own.
    end: "longest": a pass lasts until all ranks have run out, and ranks that have run out before yield `empty()`, a
        batch without sequences, so that every batch of every rank is used once. "shortest": it lasts until one has.

    An exception out of `loader` on one rank ends the pass on all, after the batches before it: that rank raises it, the
    others StateError. After it the balancer is of no more use. A batch that the balancer's max_tokens_per_rank refuses
    ends the pass as well, by ArgumentError on all, but not the balancer.

    A step takes one gather, of lengths, as plan_routing does. It starts when the step begins, on every rank at the same
    point between the balancer's other collectives; the rest of planning is a thread of C++. On a group without a CPU
    backend the gather queues behind the computation: give groups one, "cpu:gloo,cuda:nccl".

    The batch ahead is fetched by the thread that trains: let a DataLoader's workers prepare it.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        balancer: SequenceBalancer,
        d_model: int,
        *,
        seq_lens: Callable[[Batch], Sequence[int] | Tensor] | None = None,
        masks: Callable[[Batch], Sequence[str]] | None = None,
        empty: Callable[[], Batch] | None = None,
        end: Literal["longest", "shortest"] = "longest",
    ) -> None:
        if end not in ("longest", "shortest"):
            raise ArgumentError(f"end: got {end!r}, expected 'longest' or 'shortest'")
        if end == "longest" and empty is None:
            raise ArgumentError(
                "empty: got none, expected a function that makes a batch without sequences, or end='shortest'"
            )
        self._loader = loader
        self._balancer = balancer
        self._d_model = d_model
        self._seq_lens = seq_lens or _seq_lens_of
        self._masks = masks
        self._empty = empty
        self._end = end
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position = _Position()
        self._resume_at: _Position | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Plan]]:
        self._position, self._resume_at = self._resume_at or _Position(), None
        source = _Source(self, self._position)
        ahead = self._start(source)
        while True:
            plan = self._finish(ahead, source)
            if ahead.num_ended >= (1 if self._end == "shortest" else self._balancer.num_ranks):
                break
            batch = source.batch
            ahead = self._start(source)
            self._position = source.position
            yield batch, plan
        self._position = _Position()

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: after the batch that was yielded last. Other ranks' are others: save all of them.

        Holds the wrapped loader's own state where it has `state_dict` and `load_state_dict` (torchdata's
        StatefulDataLoader). Keyed by rank, so that torch.distributed.checkpoint may save it as it is.
        """
        position = self._position
        state: dict[str, Any] = {"num_batches": position.num_batches, "ended": position.ended}
        if self._stateful:
            state["loader"] = self._snapshot() if position.state is None else position.state
        return {self._key: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on behind the batch that was yielded last when `state` was taken, with the same batches.

        A wrapped loader with a state of its own goes on by that. Any other is iterated anew, and the batches that were
        used are skipped: its order must be the same again (a seeded generator, `set_epoch` called as before).
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

    @property
    def _key(self) -> str:
        return f"rank_{self._balancer.rank}_of_{self._balancer.num_ranks}"

    def _snapshot(self) -> bytes | None:
        """Of the wrapped loader's state: not the state itself, which may go on changing. Bytes, as checkpoints that are
        loaded in place need a state of the same structure at any time."""
        return pickle.dumps(self._loader.state_dict()) if self._stateful else None  # type: ignore[attr-defined]

    def _start(self, source: _Source[Batch]) -> PlanningAhead:
        seq_lens, masks = source.fetch()
        failure = None if source.error is None else f"data: {type(source.error).__name__}: {source.error}"
        return self._balancer.start_planning(
            seq_lens, self._d_model, ended=source.position.ended, failure=failure, masks=masks
        )

    def _finish(self, ahead: PlanningAhead, source: _Source[Batch]) -> Plan:
        try:
            return self._balancer.finish_planning(ahead)
        except StateError:
            if source.error is not None:
                raise source.error from None
            raise


@dataclass(frozen=True)
class _Position:
    """In a pass over the wrapped loader, before the batch that is fetched next."""

    num_batches: int = 0  # taken from it
    ended: bool = False  # it has no more
    state: bytes | None = None  # its own, where it has one, inside a pass


class _Source(Generic[Batch]):
    """One pass over this rank's batches, and then what it yields for want of more."""

    def __init__(self, loader: BalancedLoader[Batch], position: _Position) -> None:
        self._loader = loader
        self._batches = self._from(0 if loader._stateful else position.num_batches)
        self._num_batches = position.num_batches
        self.position = position  # before `batch`
        self.batch: Batch
        self.error: Exception | None = None

    def _from(self, num_skipped: int) -> Iterator[Batch]:
        """Opens the loader lazily: what it raises is an error of the first batch."""
        yield from islice(self._loader._loader, num_skipped, None)

    def fetch(self) -> tuple[Sequence[int] | Tensor, Sequence[str] | None]:
        """The next batch's lengths and masks. An error is kept, for it is raised when the other ranks know of it."""
        of = self._loader
        try:
            if not self.position.ended:
                self.position = _Position(self._num_batches, False, of._snapshot())
                try:
                    self.batch = next(self._batches)
                except StopIteration:
                    self.position = _Position(self._num_batches, True, of._snapshot())
                else:
                    self._num_batches += 1
                    return of._seq_lens(self.batch), of._masks(self.batch) if of._masks else None
            if of._empty is not None:
                self.batch = of._empty()
        except Exception as error:
            self.error = error
        return [], None


def _seq_lens_of(batch: Any) -> Sequence[int] | Tensor:
    lens = batch["seq_lens"] if isinstance(batch, dict) else getattr(batch, "seq_lens", None)
    if lens is None:
        raise ArgumentError(
            f"seq_lens: got batches of {type(batch).__name__}, which have none; expected a function of a batch"
        )
    return lens  # type: ignore[no-any-return]
