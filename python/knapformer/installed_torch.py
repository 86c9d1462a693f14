"""Whether the torch of this installation is the one that knapformer was built for. Imports no torch."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import knapformer._core as _core

_BUILD_AGAIN = (
    "build it again beside the torch that it is to run with (pip install torch && pip install --force-reinstall "
    "--no-deps .; with uv: uv pip install torch --group build && uv pip install --reinstall --no-deps "
    "--no-build-isolation .)"
)


def installed_torch() -> str | None:
    """The version of the installed torch, as in "2.13.0+cpu" (its metadata may lack "+cpu"); None: not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))["__version__"])


def torch_problem() -> str | None:
    """Why knapformer's torch part cannot be loaded here; None: no reason is known."""
    installed = installed_torch()
    if installed is None:
        return "needs torch, which is not installed; install its CPU or CUDA build"
    if _core.torch_version is None:
        return f"this knapformer was built without torch and only plans; {_BUILD_AGAIN}"
    # Minor releases change LibTorch's binary interface: the module would not load, or worse.
    if installed.split(".")[:2] != _core.torch_version.split(".")[:2]:
        return f"this knapformer was built for torch {_core.torch_version}, and torch is {installed}; {_BUILD_AGAIN}"
    return None
