"""One step of a packed model: where the tokens are while the blocks run.

    home rank                                               home rank
    packed sequences --enter--> chunks, block ... block, --leave--> packed sequences, same order

Without a balancer the chunks are the rank's own sequences and nothing moves. So the models are written only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knapformer import ArgumentError
from knapformer.attention.inputs import as_autocast
from knapformer.attention.kernels import PackedAttention
from knapformer.attention.packed_rows import Segments, lengths_list, segment_index, to_device

if TYPE_CHECKING:
    from knapformer import Plan, SequenceBalancer, Step

Attend = Callable[..., Tensor]  # q, k, v and the lengths of their sequences -> o, as q


class PackedStep:
    """Made once a forward pass, by every rank, also by one without sequences: with a balancer `enter` and `leave` are
    collectives, and so is every `attention` in a bag of several ranks.

    seq_lens: tokens of each of this rank's sequences. d_model: width of the blocks, in features. mask: see
    PackedAttention; where the balancer has planned another one, `attention` raises ArgumentError. planned: the balancer
    holds the plan of these sequences already, as in a loop over a BalancedLoader. placed: it holds the plan of
    sequences that lie where they are computed, each on all ranks that share it, as a BalancedBatchSampler with bags
    deals them. `enter` then takes the rows that this rank computes, and `leave` puts them back among rows of zeros:
    nothing travels.
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        d_model: int,
        balancer: SequenceBalancer | None = None,
        mask: str = "full",
        planned: bool = False,
        placed: bool = False,
    ) -> None:
        self._step: Step | None = None  # held: what is computed again goes by it, whatever was planned meanwhile
        self._attend = PackedAttention(mask)
        self._seq_lens = list(seq_lens)
        self.is_alone = balancer is None  # whole sequences stay on this rank
        self.chunk_lens = self._seq_lens
        self._own: Tensor | None = None  # (tokens,) which this rank computes; None: all that it computes travel
        if balancer is None:
            if placed:
                raise ArgumentError("placed: got True, expected False without a balancer, whose plan places samples")
            return
        if not (planned or placed):
            balancer.plan_routing(self._seq_lens, d_model)
        self._step = balancer.current
        if placed:
            of_plan = self._take_own(self._step.plan, balancer.rank)
            told = "the samples that this rank computes, whole or in part (placed=True)"
        else:
            of_plan = self._step.seq_lens.tolist()
            told = (
                "this rank's own samples; those that a sampler's or a loader's plan has placed are computed without a "
                "balancer in the model, or with placed=True"
            )
        if of_plan != self._seq_lens:
            error = f"seq_lens: got {self._seq_lens}, expected {of_plan}, as the balancer has planned for {told}"
            balancer.report(error)
            raise ArgumentError(error)

    def _take_own(self, plan: Plan, rank: int) -> list[int]:
        """The lengths of the whole sequences of this rank's chunks, of which it computes these tokens alone."""
        lens, chunks = list(itertools.chain(*plan.seq_lens)), plan.chunks_on(rank)
        counts = [(begin, end - begin, lens[i] - end) for i, begin, end in chunks]
        flags = torch.tensor([False, True, False]).repeat(len(chunks))
        self._own = flags.repeat_interleave(torch.tensor(counts, dtype=torch.int64).reshape(-1))
        self.chunk_lens = [count for _, count, _ in counts]
        return [lens[i] for i, _, _ in chunks]

    def enter(
        self, x: Tensor, features: Sequence[Tensor], sequence_features: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Takes the tokens to where they are computed.

        x (tokens, d_model), features (tokens, ...) of any dtype, sequence_features (sequences, ...) -> the same of the
        chunks that this rank holds: (chunk tokens, d_model), (chunk tokens, ...), (chunks, ...).

        Features that the host reads, such as lengths, may be on the CPU where x is not. They travel between hosts in
        an exchange of their own and stay on the CPU, so that reading them waits for no accelerator.
        """
        if self._step is None:
            return x, list(features), list(sequence_features)
        if self._own is not None:
            self._rows = to_device(self._own.nonzero().squeeze(1), x.device)
            own = (rows[self._own] if rows.is_cpu else rows.index_select(0, self._rows) for rows in (x, *features))
            return next(own), list(own), list(sequence_features)
        given, num_features = [*features, *sequence_features], len(features)
        moved: dict[int, Tensor] = {}
        for on_host in (True, False):
            chosen = [i for i, tensor in enumerate(given) if (tensor.is_cpu and not x.is_cpu) == on_host]
            if on_host and not chosen:
                continue
            of_tokens, of_sequences = ([i for i in chosen if (i < num_features) == kind] for kind in (True, False))
            chunk_lens, rows, token_rows, sequence_rows = self._step.route(
                torch.empty(x.shape[0], 0) if on_host else x,
                [given[i] for i in of_tokens],
                sequence_features=[given[i] for i in of_sequences],
            )
            moved |= zip([*of_tokens, *of_sequences], [*token_rows, *sequence_rows], strict=True)
        self.chunk_lens = lengths_list(chunk_lens)
        in_order = [moved[i] for i in range(len(given))]
        return rows, in_order[:num_features], in_order[num_features:]

    def segments(self, x: Tensor) -> Segments:
        """The chunk that each chunk token belongs to, on the device of x."""
        return Segments.of_lengths(self.chunk_lens, x.device)

    def counts_of(self, flags: Tensor) -> list[int]:
        """For each chunk, how many of its tokens are flagged. flags (chunk tokens,) bool, on the CPU."""
        counts = torch.zeros(len(self.chunk_lens), dtype=torch.int64)
        return lengths_list(counts.index_add_(0, segment_index(self.chunk_lens), flags.long()))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Tensor:
        """Every token attends to its whole sequence. q (chunk tokens, heads, head_dim), k and v with as many heads or
        a divisor -> (chunk tokens, heads, head_dim). attend: taken in place of PackedAttention, with the same mask."""
        q, k, v = as_autocast(q, k, v)
        attend = attend or self._attend
        if self._step is None:
            return attend(q, k, v, self._seq_lens)
        o: Tensor = self._step.attention(q, k, v, attend, self._attend.mask)
        return o

    def leave(self, x: Tensor) -> Tensor:
        """(chunk tokens, d_model) -> (tokens, d_model), in the order that `enter` was given."""
        if self._step is None:
            return x
        if self._own is not None:
            return x.new_zeros((len(self._own), *x.shape[1:])).index_copy(0, self._rows, x)
        _, x = self._step.reverse_route(x)
        return x

    def is_own(self, like: Tensor, rows: Tensor | None) -> Tensor:
        """Flags of the shape of `like`, (rows, ...): whether this rank computes the token that a row is of. rows: which
        of the tokens of `leave`, on the device; None: all."""
        assert self._own is not None
        flags = to_device(self._own, like.device)
        flags = flags if rows is None else flags.index_select(0, rows)
        return flags.unsqueeze(1).expand_as(like)
