"""Builds the modules beside the sources with the torch that is installed. Only `install` downloads anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIN_PYTHON, MIN_TORCH, MIN_CMAKE = (3, 10), (2, 11), (3, 25)


def problems(builds: bool) -> list[str]:
    """A line for each thing that is missing to run and, if `builds`, to build."""
    found = []
    if sys.version_info < MIN_PYTHON:
        found.append(f"Python {sys.version.split()[0]}, expected {_text(MIN_PYTHON)} or newer: make gpu PYTHON=...")
    if importlib.util.find_spec("torch") is None:
        found.append(f"{sys.executable} has no torch, expected {_text(MIN_TORCH)} or newer: make gpu PYTHON=...")
    elif (version := _torch_version()) < MIN_TORCH:
        found.append(f"torch {_text(version)}, expected {_text(MIN_TORCH)} or newer")
    found += [
        f"Python's {name}: pip install {name}"
        for name in ("rich", "numpy", "diffusers")
        if importlib.util.find_spec(name) is None
    ]
    return [*found, *_build_problems()] if builds else found


def _build_problems() -> Iterator[str]:
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        yield "a C++20 compiler: apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield f"Python.h of {sys.executable}: apt-get install python3-dev"
    cmake = _tool("cmake")
    if cmake is None:
        yield f"cmake {_text(MIN_CMAKE)} or newer: pip install cmake"
    elif (version := _cmake_version(cmake)) < MIN_CMAKE:
        yield f"cmake {_text(version)}, expected {_text(MIN_CMAKE)} or newer: pip install cmake"
    if _tool("ninja") is None:
        yield "ninja: pip install ninja"
    headers = (Path(folder, "nlohmann/json.hpp") for folder in ("/usr/include", "/usr/local/include"))
    if importlib.util.find_spec("nlohmann_json") is None and not any(map(Path.exists, headers)):
        yield "nlohmann-json: pip install nlohmann-json, or apt-get install nlohmann-json3-dev"


def is_built() -> bool:
    """Whether the modules for this Python and its torch exist and are newer than every source."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    modules = [ROOT / "python/knapformer" / f"{name}{suffix}" for name in ("_core", "_torch")]
    if not all(map(Path.exists, modules)):
        return False
    sources = [*(ROOT / "knapformer").rglob("*.*"), *(ROOT / "cmake").iterdir(), ROOT / "CMakeLists.txt"]
    if min(file.stat().st_mtime for file in modules) < max(file.stat().st_mtime for file in sources):
        return False
    asks = "import sys; from knapformer.installed_torch import torch_problem; sys.exit(torch_problem())"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.run([sys.executable, "-c", asks], env=environment, stderr=subprocess.DEVNULL).returncode == 0


def install() -> None:
    """Installs what building and running need, and torch if there is none. Raises subprocess.CalledProcessError."""
    torch = [] if importlib.util.find_spec("torch") else ["torch"]
    groups = [option for group in ("build", "run") for option in ("--group", f"{ROOT / 'pyproject.toml'}:{group}")]
    for what in (["pip>=25.1"], [*torch, *groups]):  # pip knows dependency groups from 25.1 on
        subprocess.run([sys.executable, "-m", "pip", "install", *what], check=True)
    importlib.invalidate_caches()


def build() -> None:
    """Raises subprocess.CalledProcessError."""
    folder = ROOT / "build" / f"gpu-{sysconfig.get_config_var('SOABI')}"
    cmake, ninja = str(_tool("cmake")), str(_tool("ninja"))
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}", "-DKNAPFORMER_TORCH=ON"]
    for command in (
        [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--target", "_core", "_torch"],
        [cmake, "--install", str(folder), "--prefix", str(ROOT / "python")],
    ):
        subprocess.run(command, check=True)


def _tool(name: str) -> str | None:
    """The tool's path: beside this Python, where pip installs it, or on PATH. None: there is none."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _torch_version() -> tuple[int, ...]:
    from importlib.metadata import version

    return tuple(int(part) for part in version("torch").split(".")[:2])


def _cmake_version(cmake: str) -> tuple[int, ...]:
    answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout.split()
    return tuple(int(part) for part in answer[2].split(".")[:2]) if len(answer) > 2 else (0, 0)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
