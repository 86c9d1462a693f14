"""The check of the order between folders, on made-up trees: what it must find, by file and line, and what may pass."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "include_order.py"
CORE, TORCH, PACKAGE = "knapformer/core/", "knapformer/torch/", "python/knapformer/"
IN_ORDER = {
    CORE + "plan/plan.h": '#include <string>\n#include "knapformer/core/util/error.h"\n',
    TORCH + "comm/group.cpp": '#include <torch/library.h>\n#include "knapformer/core/plan/plan.h"\n',
    PACKAGE + "__init__.py": "from knapformer.models.packed_step import step\n",
    PACKAGE + "__main__.py": "from knapformer.tools.cli import main\n",
    PACKAGE + "models/packed_step.py": "from knapformer import Plan, _core\n",
    PACKAGE + "tools/cli.py": "from knapformer.tools import plan\n",
    PACKAGE + "tools/plan.py": "from knapformer.tools.measure.steps import step\n",
    PACKAGE + "tools/measure/steps.py": "from knapformer.tools.cli_args import counts\n",
}


def check(root: Path, files: dict[str, str]) -> tuple[int, str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    result = subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True, check=False)
    return result.returncode, result.stderr.replace(f"{root}/", "")


def test_passes_what_is_in_order(tmp_path: Path) -> None:
    assert check(tmp_path, IN_ORDER) == (0, "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CORE + "util/a.h", f'#pragma once\n#include "{CORE}plan/plan.h"\n', "2: knapformer/core/util may not include"),
        (CORE + "plan/a.cpp", f'  #  include "{TORCH}comm/group.h"\n', "1: knapformer/core/plan may not include"),
        (
            CORE + "util/a.cpp",
            "#include <ATen/core/Tensor.h>\n",
            "1: knapformer/core must not know <ATen/core/Tensor.h>",
        ),
        (TORCH + "a.cpp", "\n#include <torch/extension.h>\n", "2: knapformer/torch must not know <torch/extension.h>"),
        (PACKAGE + "a.py", "\nimport knapformer.models.packed_step\n", "2: python/knapformer may not include"),
        (
            PACKAGE + "tools/a.py",
            "def f():\n    from knapformer.tools.measure import step\n",
            "2: python/knapformer/to",
        ),
        (PACKAGE + "models/a.py", "from knapformer.tools import plan\n", "1: python/knapformer/models may not include"),
    ],
)
def test_names_the_line_that_includes_upward(tmp_path: Path, name: str, text: str, message: str) -> None:
    status, error = check(tmp_path, IN_ORDER | {name: text})
    assert status == 1
    assert all(line.startswith(f"{name}:{message}") for line in error.splitlines())


def test_a_file_outside_of_the_rooms_and_a_tree_without_sources_are_refused(tmp_path: Path) -> None:
    assert "no sources found" in check(tmp_path, {})[1]
    assert (
        "lies in no room of ROOMS: knapformer"
        in check(tmp_path, {CORE + "a.h": ""} | {CORE + "b.h": f'#include "{CORE}a.h"\n'})[1]
    )
