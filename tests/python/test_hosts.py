"""Ranks on two hosts with a network between them: network namespaces on this machine, where they can be made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("knapformer._torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from namespaces import CannotMakeHosts, Host, run_on, two_hosts


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    made = two_hosts(rate_mbit=1000)
    try:
        both = made.__enter__()
    except CannotMakeHosts as reason:
        pytest.skip(f"no network namespaces: {reason}")
    try:
        yield both
    finally:
        made.__exit__(None, None, None)
        assert not any(host.name in names() for host in both)


def test_every_way_computes_the_same_over_a_network(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "-m", "knapformer", "simulate", "--data", "g3b2i64f1s0,g1b3i128f1s0", "--max-text-tokens", "20",
        "--model", "transformer-tiny", "--dtype", "fp64", "--device", "cpu", "--gamma", "0.5", "--ranks-per-node", "2",
        "--topology", "g2n2", "--topology", "g4n1", "--topology", "g4/2/1n1", "--micro-batches", "2",
        "--steps", "2", "--warmup", "0", "--json", str(out),
    ]  # fmt: skip
    run_on(hosts, arguments, num_local=2, timeout_s=200, shares_cpu=False)
    results = json.loads(out.read_text())
    none, *others = results["variants"]
    assert [of["name"] for of in others] == ["g2n2", "g4n1", "g4/2/1n1", "step planned"]
    for of in others:
        assert of["loss_per_step"] == pytest.approx(none["loss_per_step"], rel=1e-12), of["name"]
        assert of["gradient_difference"] < 1e-12
    # Sequences were shared over the network, and the planned step moved none.
    assert others[1]["tokens_moved"] > 0.5 and others[-1]["tokens_moved"] == 0


def test_what_fails_on_a_host_is_said(hosts: tuple[Host, Host]) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_on(hosts, ["-c", "1 / 0"], num_local=1, timeout_s=60, shares_cpu=False)
