"""Step: a plan on this rank, by which its tensors move. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

import knapformer._torch as _torch

# (q, k, v, lengths) -> o or (o, log_sum_exp), as in Step.attention.
Attend: TypeAlias = Callable[..., Tensor | tuple[Tensor, Tensor]]


class Step(_torch.Step):
    """A plan on this rank, with the tables and groups by which its tensors move: what `balancer.step` and
    `balancer.current` give. A step that is held goes by its own plan, whatever is planned after it.

    plan: the Plan of this micro-batch.
    seq_lens, chunk_lens: int32 on the CPU, the same objects all through a step: tokens of this rank's sequences, and of
        the chunks that this rank holds, in the order of its rows.
    """

    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None, sequence_features: Sequence[Tensor] | None = None
    ) -> tuple[Any, ...]:
        """Sends this rank's tokens where the plan wants them: (chunk_lens, x, features), and sequence_features as a
        fourth where given.

        x, features: (tokens of this rank's sequences, ...), packed in the order of seq_lens; any dtype and trailing
            shape each, moved bit for bit.
        sequence_features: (sequences of this rank, ...), one row a sequence: it goes to every rank that holds a chunk
            of the sequence, and its gradient is the sum of theirs.

        Returns chunk_lens; x and features of these tokens; sequence_features with one row a chunk. route may be called
        several times with one plan.

        Collective over the balancer's group, one all-to-all for all tensors together, forward and backward. All ranks
        pass tensors that differ only in their number of rows, and backward runs on all ranks or none. So a rank without
        rows computes x and the others from none, as ranks do that have some: they require gradients where theirs do.
        With a group of one the tensors come back as views.
        """
        x, of_tokens, of_sequences = super().route(x, features, sequence_features)
        routed = (self.chunk_lens, x, of_tokens)
        return routed if sequence_features is None else (*routed, of_sequences)

    def reverse_route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sends tokens home: (seq_lens, x).

        x: (tokens of the chunks that this rank holds, ...), any dtype and trailing shape. Returns x of this rank's own
        sequences, in their order.

        Collective over the balancer's group, one all-to-all, as route is.
        """
        return self.seq_lens, super().reverse_route(x)

    def pre_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: str = "full") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From all heads of chunks to some heads of whole sequences: (seq_lens, q, k, v).

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. Returns
        seq_lens, int32 on the CPU, of the sequences of this rank's bag, and their q, k and v: whole sequences, packed
        one after another, with this rank's share of the heads, so that attention is plain grouped-query attention.
        Shares are uneven where the bag's size does not divide the heads; in a bag of more ranks than heads some ranks
        have none. mask: the one that the kernel applies, as in attention.

        Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one, where views come back.
        """
        return super().pre_attn(q, k, v, mask)

    def post_attn(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """Undoes pre_attn for attention's output: (chunk_lens, o).

        o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...). Returns o with all
        heads of the chunks that this rank holds. Needs a pre_attn before it, for the number of heads.

        Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one.
        """
        return self.chunk_lens, super().post_attn(o)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective: a graph ends before it
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None, mask: str | None = None
    ) -> Tensor:
        """Every token of a chunk attends to its whole sequence, over flat and nested bags: o.

        q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. Returns
            (chunk tokens, heads, ...).
        attend(q, k, v, seq_lens): the attention kernel: it sees whole sequences, packed, with a share of the heads (see
            pre_attn), and returns o, (tokens, heads, ...), or (o, log_sum_exp), of which the second is not used. It is
            called once for each degree (number of sharing ranks) of the sequences here; on a rank without tokens it is
            called once, with none. Where more ranks than heads share a sequence, some see it without heads.
            With a TrainedModel of cuts_queries, ranks share queries as well as heads: then attend.cuts_queries must be
            true, as it is of PackedAttention, and the call is attend(q, k, v, query_lens, key_lens, query_starts), each
            int32 on the CPU with a number for each sequence: q has consecutive queries of it, k and v the keys that its
            mask lets them see, or more, and the first of these queries is at query_starts among these keys. Of a short
            sequence there may be none of either.
            ArgumentError on all ranks for a kernel that does not say so.
            None: the project's own kernel, which applies to each sequence the mask that was planned for it
            (docs/masks.md), whole or shared by heads and queries. ArgumentError on all ranks for a density.
        mask: the one that attend applies, as in `knapformer.attention_pairs`, or 'planned' where attend applies to each
            sequence the mask that was planned for it. None: attend.mask where attend is an object with that text, as
            PackedAttention of knapformer.models, or else 'full'. Raises ArgumentError on all ranks where the plan
            counts with another mask (the balancer's, that of plan_routing or of the sampler), also with given work.

        Sequences that are whole on this rank attend while the others travel, forward and backward. Where attend raises,
        the other ranks raise the error, too.

        Collective over the ranks of this rank's bag: one all-to-all before attention, one more for each further stage
        of keys, and one after it; none where no sequence of the bag is shared.
        """
        if attend is None:
            from knapformer.attention.kernels import kernel_for  # here, as it loads FlexAttention

            attend = kernel_for(self.common_mask)
        by_masks = bool(getattr(attend, "takes_masks", False))  # planned for each sequence (attention/masked.py)
        cuts_queries = by_masks or bool(getattr(attend, "cuts_queries", False))
        return super().attention(q, k, v, attend, cuts_queries, by_masks, getattr(attend, "mask", None), mask)
