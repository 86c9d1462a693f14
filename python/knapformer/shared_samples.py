"""Which samplers and loaders of this process give out samples that several ranks share. The packed call of a model,
which would compute such a sample whole on each of these ranks, asks."""

from __future__ import annotations

import weakref

from knapformer._core import Topology

_SOURCES: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()


def gives_shared_samples(source: object, topology: Topology, expected: str) -> None:
    """To be called by a source; without effect where every bag is one rank. expected: what computes its samples."""
    if any(len(bag) > 1 for bag in topology.bags):
        _SOURCES[source] = f"a {type(source).__name__} of {topology}, whose ranks share samples; expected {expected}"


def source_of_shared_samples() -> str | None:
    """What there is, and what is expected of the model; None: no such source is alive."""
    return next(iter(_SOURCES.values()), None)
