"""Topologies for which tests here run."""

from __future__ import annotations

import pytest

TOPOLOGIES = {
    1: ["g1n1"],
    2: ["g1n2", "g2n1", "g2/1n1"],
    3: ["g1n3", "g3n1"],
    4: ["g4n1", "g4/2/1n1", "g2n2", "g1n2+g2n1"],
}

each_topology = pytest.mark.parametrize(
    ("world", "topology"), [(n, topology) for n in TOPOLOGIES for topology in TOPOLOGIES[n]]
)
