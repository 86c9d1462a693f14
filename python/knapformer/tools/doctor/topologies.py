"""Topologies for a sample of steps, best predicted time first, with the reasons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group

from knapformer import TopologyOption, rank_topologies
from knapformer.tools.doctor.alternatives import Case
from knapformer.tools.files import table_of
from knapformer.tools.ways import Draw

_MAX_STEPS, _MAX_BATCHES = 2, 4  # a larger sample changes the order by less than the predictions' error


def ranked(draw: Draw) -> list[TopologyOption]:
    """Ranks topologies for micro-batches that are planned one by one, with tokens routed in the model."""
    of, drawn = draw.planning, itertools.chain.from_iterable(draw.batches[:_MAX_STEPS])
    return rank_topologies(
        list(itertools.islice(drawn, _MAX_BATCHES)), of.d_model, of.gamma, mask=of.mask,
        max_tokens_per_rank=draw.max_tokens, rank_speed=of.rank_speed, cluster=of.cluster,
        model=of.model.replace(routed=True),
    )  # fmt: skip


def sharing(ranking: Sequence[TopologyOption], count: int = 2) -> list[str]:
    """The best `count` topologies in which ranks share sequences."""
    return [option.topology for option in ranking if not option.topology.startswith("g1n")][:count]


def as_dict(option: TopologyOption, case: Case) -> dict[str, Any]:
    figures = {
        "predicted_time_s": option.predicted_time,
        "over_ideal": option.efficiency_loss,
        "exchanged_fraction": option.exchanged_fraction,
        "max_tokens_over_mean": option.max_tokens_over_mean,
    }
    kept = math.isfinite(option.predicted_time)  # JSON has no infinity
    named = {"topology": case.of_job(option.topology)}
    return {**named, **(figures if kept else dict.fromkeys(figures)), "reason": option.reason}


def table(ranking: Sequence[TopologyOption], case: Case) -> list[str | Group]:
    caption = (
        f"Seconds of a micro-batch planned by itself, mean over at most {_MAX_BATCHES}. Exchanged: of the tokens, in "
        "each all-to-all of attention."
    )
    named = {case.of_job(option.topology): option for option in ranking}
    rows = table_of([{"topology": name, **_cells(of)} for name, of in named.items()], left="topology", caption=caption)
    return ["Topologies of bags, best first:", rows, *(f"{name}: {of.reason}." for name, of in named.items())]


def _cells(option: TopologyOption) -> dict[str, str]:
    cells = {
        "predicted s": f"{option.predicted_time:.4g}",
        "over ideal": f"{option.efficiency_loss - 1:.1%}",
        "exchanged": f"{option.exchanged_fraction:.1%}",
        "fullest rank": f"{option.max_tokens_over_mean:.2f} x mean",
    }
    kept = math.isfinite(option.predicted_time)
    return cells if kept else dict.fromkeys(cells, "-")
