"""Generated command lines and files: whatever they hold, a command ends with its result or with one line and status 2.

`make fuzz` runs this for long: KNAPFORMER_FUZZ_SECONDS.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from knapformer.calibration import Calibration, ExchangeCost
from knapformer.tools.cli import main

from knapformer import Cluster, TrainedModel

_LENGTHS = [[40, 3], [5, 1], [7], []]
_COST = ExchangeCost(num_ranks=2, latency_s=1e-5, bytes_per_s=1e10)
_FILES: dict[str, Any] = {
    "lengths": [_LENGTHS, _LENGTHS],  # of two batches
    "calibration": Calibration(0.4, 1e-15, 8, True, 0.01, 0.02, 0.0, node=_COST).to_dict(),
    "cluster": {"cluster": Cluster("h100").to_dict(), "model": TrainedModel().to_dict()},
}
_TEXTS = [
    "", " ", "g4n1", "g2/1n2", "g4/3n1", "auto", "causal", "window:1:-1", "density:nan", "h100", "high", "1,1,1,1", "/",
    "\udc80", "é", "-",
]  # fmt: skip
_NUMBERS = [0, 1, 2, 3, -1, 0.5, 1e-320, 1e308, float("nan"), float("inf"), 2**31, 2**63, -(2**64), 10**400]
# --ranks, --steps and the like ask for as much work as they say: a command that takes long is not wrong.
_OPTIONS = [
    "--gamma", "--d-model", "--mask", "--max-tokens-per-rank", "--ranks-per-node", "--mode", "--solver", "--seed",
]  # fmt: skip
_COMMANDS = (
    ["plan", "--topology", "g4/2/1n1", "--effort", "low", "--lengths", "{lengths}"],
    ["plan", "--topology", "g2n2", "--effort", "low", "--micro-batches", "2", "--lengths", "{lengths}"],
    ["doctor", "--steps", "2", "--model", "wan-1.3b", "{lengths}"],
    ["plan", "--topology", "g4n1", "--effort", "low", "--lengths", "{lengths}", "--report", "{output}"],
)

_anything = st.one_of(
    st.sampled_from([*_NUMBERS, *_TEXTS, None, True, [], {}]), st.integers(-5, 100), st.text(max_size=8)
)


def _whole(name: str) -> bytes:
    return json.dumps(_FILES[name]).encode()


@st.composite
def _content(draw: st.DrawFn, name: str) -> bytes:
    """A file with a place or two of it changed."""
    value: Any = json.loads(_whole(name))
    for _ in range(draw(st.integers(1, 2))):
        at, parent, key = value, None, None
        while isinstance(at, dict | list) and at and (parent is None or draw(st.integers(0, 3))):
            parent, key = at, draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            at = at[key]
        if parent is None:
            value = draw(_anything)
        elif draw(st.booleans()):
            parent[key] = draw(_anything)
        else:
            del parent[key]
    content = json.dumps(value).encode()
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(content)))
        content = content[:cut] + draw(st.binary(max_size=4)) + content[cut + draw(st.integers(0, 3)) :]
    return content


@st.composite
def _command(draw: st.DrawFn) -> tuple[list[str], dict[str, bytes]]:
    command = list(draw(st.sampled_from(_COMMANDS)))
    for file in ("calibration", "cluster"):
        if draw(st.booleans()):
            command += [f"--{file}", f"{{{file}}}"]
    for option in draw(st.lists(st.sampled_from(_OPTIONS), max_size=2)):
        command += [option, str(draw(_anything))]
    read = [name for name in _FILES if f"{{{name}}}" in command]
    changed = draw(st.sampled_from([*read, None]))
    return command, {name: draw(_content(name)) if name == changed else _whole(name) for name in read}


def _check(command: list[str], files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"{{{name}}}": str(Path(folder, f"{name}.json")) for name in [*_FILES, "output"]}
        for name, content in files.items():
            Path(folder, f"{name}.json").write_bytes(content)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([paths.get(argument, argument) for argument in command])
    message = err.getvalue()
    assert status in (0, 2), (status, message)
    if status == 2:
        lines = [line for line in message.split("\n") if "far from where it was measured" not in line]  # a warning
        assert len(lines) == 2 and lines[0] and not lines[1], message


def _found(place: str) -> tuple[list[str], dict[str, bytes]]:
    """A number that no float can be, in a calibration."""
    calibration = json.dumps(_FILES["calibration"] | {place: 10**400}).encode()
    return [*_COMMANDS[0], "--calibration", "{calibration}"], {"lengths": _whole("lengths"), "calibration": calibration}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@example(_found("gamma"))
@example(_found("seconds_per_flop"))
@example(_found("d_model"))
@given(_command())
def test_commands_end_with_a_result_or_one_line(made: tuple[list[str], dict[str, bytes]]) -> None:
    _check(*made)


def test_for_longer() -> None:
    end = time.monotonic() + float(os.environ.get("KNAPFORMER_FUZZ_SECONDS", "0"))

    @settings(max_examples=1000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(_command())
    def check(made: tuple[list[str], dict[str, bytes]]) -> None:
        _check(*made)

    while time.monotonic() < end:
        check()
