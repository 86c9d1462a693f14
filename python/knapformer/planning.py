"""Plans of all ranks at once, and what they are predicted to take: without process groups and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex, TypeAlias

from knapformer import _core
from knapformer._core import Cluster, MicroBatchTime, Plan, TopologyOption, TrainedModel
from knapformer.cost import Cost, CostSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack

Lengths: TypeAlias = Iterable[Iterable[SupportsIndex]]  # for each rank
Work: TypeAlias = Iterable[Iterable[SupportsFloat]]


def plan(
    seq_lens_per_rank: Lengths,
    topology: str,
    cost: Cost | None = None,
    *,
    micro_batches: SupportsIndex | str = 1,
    max_tokens_per_rank: SupportsIndex = 0,
    masks: str | Iterable[Iterable[str]] | None = None,
    work: Work | None = None,
    solver: str | None = None,
    **settings: Unpack[CostSettings],
) -> Plan:
    """Plans the sequences of all ranks: those of a step, or of an optimizer step of several micro-batches.

    seq_lens_per_rank: for each rank the lengths of its sequences, in tokens.
    topology: its text, or 'auto' for the best of `rank_topologies` for these lengths.
    cost, settings: a `Cost`, or its fields as keyword arguments. d_model is always needed.
    micro_batches: how many the step has, of which each rank's list holds all sequences; 'auto': as few as keep
        max_tokens_per_rank. The step is predicted to take no longer than if each rank's list were cut in consecutive
        parts and each part planned by itself, within the same limit.
    max_tokens_per_rank: a limit that every rank keeps, in each micro-batch; lengths that cannot keep it are refused. 0:
        of several micro-batches, 1.5 times what the fullest rank holds if lists are cut in such parts; of one, none.
    masks: in place of the cost's mask, one for all sequences or one for each, in lists like the lengths' (see
        `attention_pairs`).
    work: the work of each sequence, in lists like the lengths', in place of what the formula gives for its length:
        FLOPs of one block forward, as from `WorkloadModel.work` (seconds over seconds per FLOP), positive. Tokens still
        count for the exchanges and for max_tokens_per_rank.
    solver: one of `solver_names()`. None: the first of them.

    Raises ArgumentError, naming the argument. The same input gives the same plan, bit for bit, on any machine.
    """
    return _core.plan(
        seq_lens_per_rank, topology, Cost.of(cost, settings), micro_batches, max_tokens_per_rank, masks, work, solver
    )


def rank_topologies(
    batches: Iterable[Lengths],
    cost: Cost | None = None,
    *,
    max_tokens_per_rank: SupportsIndex = 0,
    masks: Iterable[Iterable[Iterable[str]] | str] | None = None,
    work: Iterable[Work] | None = None,
    **settings: Unpack[CostSettings],
) -> list[TopologyOption]:
    """Topologies for a sample of batches, best predicted time first.

    They are flat and nested bags of up to two nodes' ranks, or more where a sequence needs them, planned by the default
    solver. Of topologies within a thousandth of the time, the one that exchanges less comes first. Topologies that
    cannot keep max_tokens_per_rank come last, with an infinite predicted_time.

    batches: of each, for each rank a list of lengths, in tokens. masks, work: lists like `batches`, of texts and of
    numbers. The other arguments are as in `plan`; effort and sync have no effect. Raises ArgumentError.
    """
    return _core.rank_topologies(batches, Cost.of(cost, settings), max_tokens_per_rank, masks, work)


def predict_micro_batch(
    plan: Plan,
    cluster: Cluster | str | None = None,
    model: TrainedModel | None = None,
    measured: Sequence[tuple[float, float, float]] = (),
) -> MicroBatchTime:
    """Predicted time of a step of one micro-batch under `plan`, by phase.

    cluster, model: None for those that it was planned for.
    measured: per rank three numbers, which replace the plan's work over cluster.flops_per_s: the seconds of one block's
        forward pass in the per-token layers, in attention on whole sequences, and in attention on shared ones.

    Raises ArgumentError.
    """
    if cluster is not None or model is not None:
        plan = plan.on(cluster, model)
    return _core.predict_micro_batch(plan, measured)


def plan_home(plan: Plan) -> Plan:
    """The plan that leaves every sequence of `plan` at home, whole: the step without a balancer."""
    return _core.plan_home(plan)


def solver_names() -> list[str]:
    """The names that `solver` may be, the default first."""
    return _core.solver_names()


def attention_pairs(mask: str, seq_len: SupportsIndex) -> int:
    """How many (query, key) pairs a mask leaves of a sequence of `seq_len` tokens.

    mask: 'full', 'causal', 'prefix:TEXT', 'block_causal:TEXT:FRAME' or 'window:LEFT:RIGHT' with counts of tokens (FRAME
    at least 1), 'density:SHARE' with a share from 0 to 1, or a written one of this length, such as 'c120 f1024'
    (docs/masks.md). Raises ArgumentError.
    """
    return _core.attention_pairs(mask, seq_len)
