"""What an installation is, and that one which can only plan does not come about unasked."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from knapformer.tools.cli import main

from knapformer import _core

ROOT = Path(__file__).parents[2]


def _configure_a_wheel(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As scikit-build-core does in an environment without torch. A later option takes the place of an earlier one."""
    _, _, table = (ROOT / "pyproject.toml").read_text().partition("[tool.scikit-build.cmake.define]\n")
    defined = [f"-D{name}={value}" for name, value in re.findall(r'^(\w+) = "(.*)"', table.partition("\n[")[0], re.M)]
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    environment = folder / "environment"
    if not environment.exists():
        venv.create(environment)
    python = environment / "bin/python"
    return subprocess.run(
        [cmake, "-S", ROOT, "-B", folder / "build", "-DSKBUILD=2", f"-DPython_EXECUTABLE={python}", *defined, *options],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": str(environment)},
    )


def test_a_wheel_that_only_plans_must_be_asked_for(tmp_path: Path) -> None:
    without = _configure_a_wheel(tmp_path)
    assert without.returncode != 0
    assert "this build sees no torch" in without.stderr
    for line in (
        "pip install torch && pip install .",
        "uv pip install torch --group build && uv pip install --no-build-isolation .",
        "pip install . --config-settings=cmake.define.KNAPFORMER_TORCH=OFF",  # pip 23.0 of Debian 12 knows no -C
    ):
        assert line in without.stderr
    asked_for = _configure_a_wheel(tmp_path, "-DKNAPFORMER_TORCH=OFF")
    assert "this build sees no torch" not in asked_for.stderr
    assert "this build sees no torch" in _configure_a_wheel(tmp_path).stderr  # though the build folder has a planner's


def test_no_installer_downloads_torch_for_a_build_that_cannot_see_it() -> None:
    """What a dependency or an extra names is downloaded, gigabytes with CUDA, then the build ends for lack of it."""
    project = (ROOT / "pyproject.toml").read_text().partition("[dependency-groups]")[0]
    lists = "".join(re.findall(r"= (\[[^]]*\])", project))
    requirements = re.findall(r'"([\w.-]+)[^"]*"', lists)
    assert {"rich", "plotly", "pybind11"} <= set(requirements)
    assert "torch" not in requirements


@pytest.mark.parametrize(
    ("built_for", "words"), [("2.13.0", "(for torch 2.13.0)"), (None, "(planner only: built without torch)")]
)
def test_the_version_says_what_was_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built_for: str | None, words: str
) -> None:
    monkeypatch.setattr(_core, "torch_version", built_for)
    assert main(["--version"]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("module", ["_core", "_torch"])
def test_a_modules_stub_names_what_it_has(module: str) -> None:
    def named(body: list[ast.stmt]) -> dict[str, ast.stmt]:
        nodes = {getattr(node, "name", "") or getattr(getattr(node, "target", None), "id", "_"): node for node in body}
        return {name: node for name, node in nodes.items() if not name.startswith("_")}

    def members(owner: object) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")}

    pytest.importorskip("torch" if module == "_torch" else "knapformer")
    loaded = importlib.import_module(f"knapformer.{module}")
    stub = named(ast.parse((ROOT / f"python/knapformer/{module}.pyi").read_text()).body)
    assert stub.keys() == members(loaded)
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            assert named(node.body).keys() == members(getattr(loaded, name)), name


def test_dir_names_everything_public() -> None:
    import knapformer

    assert dir(knapformer) == sorted([*knapformer.__all__, "__version__"])
    for name in knapformer.__all__:
        assert getattr(knapformer, name).__doc__, name


def test_what_the_readme_says_below_its_title_is_true() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    words = re.findall(r"`([^`]+)`", (ROOT / "README.md").read_text().splitlines()[2])
    license_name, python = (re.search(rf'^{key} = "(.*)"', project, re.M) for key in ("license", "requires-python"))
    assert license_name and python
    assert {license_name[1], f"Python {python[1]}"} <= set(words)
    assert "CXX_STANDARD 20" in (ROOT / "CMakeLists.txt").read_text() and "C++20" in words
