"""Runs what README.md and docs/cpp.md tell a new user to run, word for word, each in a fresh clone: `make installs`.

    python tests/package/installs.py torch==2.13.0

The argument is installed first, where a page's plain `torch` would bring CUDA (gigabytes). The commands find programs
of the system and of the environment alone; ccache, where the system has it, keeps what was compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from wheels import MOVES, PLANS, ROOT, environment, run

SUDO = 'sudo() { apt-get update -qq; DEBIAN_FRONTEND=noninteractive "$1" -y "${@:2}"; }; ' * (os.geteuid() == 0)


def commands(page: str, above: str) -> list[str]:
    """The lines of the first indented block below a line, without their comments."""
    _, _, below = (ROOT / page).read_text().partition(f"{above}\n")
    (block,) = re.findall(r"\n\n((?:    .+\n)+)", below)[:1]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def main(torch: str) -> None:
    scratch = Path(tempfile.mkdtemp())

    def follow(name: str, command: str, environment: Path | None = None, *programs: Path, **own: str) -> None:
        start = time.monotonic()
        clone = scratch / name / "knapformer"
        run("git", "clone", "--quiet", ROOT, clone)
        own |= {"CCACHE_BASEDIR": str(scratch), "CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "pch_defines,time_macros"}
        if shutil.which("ccache", path=os.defpath):
            own["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        if environment:
            own["VIRTUAL_ENV"] = str(environment)
            programs = (environment / "bin", *programs)
        own["PATH"] = ":".join([*map(str, programs), os.defpath])
        run("bash", "-ec", SUDO + command, cwd=clone, env=os.environ | own, stdin=subprocess.DEVNULL)
        print(f"{command}\n    {time.monotonic() - start:.0f} s", flush=True)

    def check(environment: Path, program: str, built: str) -> None:
        python = environment / "bin/python"
        print(run(python, "-c", program, cwd=scratch).strip(), flush=True)
        assert built in run(python, "-m", "knapformer", "--version", cwd=scratch)

    pip, uv, planner = commands("README.md", "## Install")
    beside_torch = environment(scratch / "beside_torch", sys.executable, torch).parents[1]
    uv_program = environment(scratch / "uv", sys.executable, "uv").parent / "uv"
    (scratch / "programs").mkdir()
    (scratch / "programs/uv").symlink_to(uv_program)
    follow("pip", pip, beside_torch)
    check(beside_torch, PLANS + MOVES, "for torch")
    run(beside_torch / "bin/python", "-m", "pip", "uninstall", "--yes", "--quiet", "knapformer")
    follow("with_uv", uv, beside_torch, scratch / "programs")
    check(beside_torch, PLANS + MOVES, "for torch")
    alone = environment(scratch / "alone", sys.executable).parents[1]
    follow("planner", planner, alone)
    check(alone, PLANS, "planner only")
    follow("cpp", "\n".join(commands("docs/cpp.md", "# From C++")), DESTDIR=str(scratch))
    assert list(scratch.glob("opt/knapformer/lib*/cmake/knapformer/knapformer-config.cmake"))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(*sys.argv[1:])
