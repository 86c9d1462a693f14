"""The check of the order between folders, on made-up trees: what it must find, by file and line, and what may pass."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "include_order.py"
CPP = "knapformer/"
PACKAGE = "python/knapformer/"

IN_ORDER = {
    CPP + "core/util/error.h": "#include <string>\n",
    CPP + "core/plan/plan.h": '#include "knapformer/core/util/error.h"\n',
    CPP + "core/plan/plan.cpp": '#include "knapformer/core/plan/plan.h"\n\n#include "knapformer/core/util/error.h"\n',
    CPP + "torch/comm/group.cpp": '#include <torch/library.h>\n#include "knapformer/core/plan/plan.h"\n',
    PACKAGE + "__init__.py": "from knapformer._core import Plan\nfrom knapformer.calibration import Calibration\n"
    "if TYPE_CHECKING:\n    from knapformer.models.step import step\n",
    PACKAGE + "__main__.py": "from knapformer.tools.cli import main\n",
    PACKAGE + "calibration.py": "from knapformer import _core\n",
    PACKAGE + "models/step.py": "from knapformer import Plan\n",
    PACKAGE + "tools/cli.py": "from knapformer.tools import plan\n",
    PACKAGE + "tools/cli_args.py": "import knapformer\n",
    PACKAGE + "tools/plan.py": "from knapformer.tools.cli_args import counts\nfrom .report import page\n",
    PACKAGE + "tools/report/__init__.py": "from knapformer.tools.report.page import page\n",
    PACKAGE + "tools/report/page.py": "from knapformer.tools.cli_args import counts\n",
}


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True, check=False)


def test_passes_what_is_in_order_and_counts_its_arrows(tmp_path: Path) -> None:
    result = check(tmp_path, IN_ORDER)
    assert (result.returncode, result.stderr) == (0, "")
    assert "core: 1 arrows between rooms, at most 10\n    core/plan -> core/util\n" in result.stdout
    assert "torch: 1 arrows between rooms, at most 12\n    torch/comm -> core/plan\n" in result.stdout
    assert "    python/tools/plan -> python/tools/report python/tools/shared\n" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param(
            CPP + "core/util/sort.h",
            '#pragma once\n#include "knapformer/core/plan/plan.h"\n',
            "core/util/sort.h:2: core/util may not include core/plan/plan (only: nothing)",
            id="a folder of the core",
        ),
        pytest.param(
            CPP + "core/plan/heads.cpp",
            '  #  include "knapformer/torch/comm/group.h"\n',
            "core/plan/heads.cpp:1: core/plan may not include torch/comm/group",
            id="a layer",
        ),
        pytest.param(
            CPP + "core/util/rows.cpp",
            "#include <ATen/core/Tensor.h>\n",
            "core/util/rows.cpp:1: core must not know <ATen/core/Tensor.h>",
            id="Torch in the core",
        ),
        pytest.param(
            CPP + "torch/balancer.cpp",
            "#include <torch/library.h>\n#include <torch/extension.h>\n",
            "torch/balancer.cpp:2: torch must not know <torch/extension.h>",
            id="Python in the torch layer",
        ),
        pytest.param(
            CPP + "core/sundry.h",
            '#include "knapformer/core/util/error.h"\n',
            "core/sundry.h:1: core/sundry lies in no room",
            id="a file outside of the rooms",
        ),
        pytest.param(
            PACKAGE + "losses.py",
            "import torch\n\nimport knapformer.models.step\n",
            "losses.py:3: python may not include python/models/step (only: nothing)",
            id="a package",
        ),
        pytest.param(
            PACKAGE + "tools/files.py",
            "def write():\n    from knapformer.tools.report import page\n",
            "tools/files.py:2: python/tools/shared may not include python/tools/report/page",
            id="inside a function",
        ),
        pytest.param(
            PACKAGE + "models/step.py",
            "from ..tools import plan\n",
            "models/step.py:1: python/models may not include python/tools/plan",
            id="a relative import",
        ),
    ],
)
def test_names_the_line_that_includes_upward(tmp_path: Path, name: str, text: str, message: str) -> None:
    result = check(tmp_path, IN_ORDER | {name: text})
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_names_the_files_of_a_circle(tmp_path: Path) -> None:
    """In C++ a header and its source are one: neither of these headers could include the other."""
    result = check(
        tmp_path,
        IN_ORDER
        | {
            CPP + "torch/balancer.h": '#include "knapformer/torch/feedback.h"\n',
            CPP + "torch/feedback.h": "#include <vector>\n",
            CPP + "torch/feedback.cpp": '#include <vector>\n\n#include "knapformer/torch/balancer.h"\n',
            PACKAGE + "a.py": "from knapformer import b\n",
            PACKAGE + "b.py": "from knapformer import c\n",
            PACKAGE + "c.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from knapformer.a import A\n",
        },
    )
    assert result.returncode == 1
    in_python, in_cpp = sorted(result.stderr.replace(f"{tmp_path}/", "").splitlines(), key=lambda line: "torch" in line)
    assert in_cpp == (
        "circle: knapformer/torch/balancer.h:1 includes torch/feedback, "
        "knapformer/torch/feedback.cpp:3 includes torch/balancer"
    )
    assert in_python == (
        "circle: python/knapformer/a.py:1 includes python/b, python/knapformer/b.py:1 includes python/c, "
        "python/knapformer/c.py:4 includes python/a"
    )


def test_counts_arrows_and_refuses_more_than_a_layer_may_have(tmp_path: Path) -> None:
    """Each of these arrows may be, and a second file does not make a second arrow; but there is one too many."""
    core = [f"core/{folder}/x.h" for folder in ("util", "model", "plan")]
    included = {
        "comm/a.cpp": core,
        "exchange/b.cpp": [*core, "torch/comm/a.h"],
        "exchange/b2.cpp": core,
        "c.cpp": [*core, "core/cost/x.h", "torch/comm/a.h"],
    }
    tree = {
        f"{CPP}torch/{name}": "".join(f'#include "knapformer/{to}"\n' for to in included[name]) for name in included
    }
    result = check(tmp_path, tree)
    assert result.returncode == 0
    assert "torch: 12 arrows between rooms, at most 12\n" in result.stdout
    one_more = {CPP + "torch/d.cpp": '#include "knapformer/torch/exchange/b.h"\n'}
    result = check(tmp_path, tree | one_more)
    assert result.returncode == 1
    assert result.stderr == "torch: 13 arrows between rooms, where at most 12 are allowed\n"


def test_a_tree_without_sources_is_refused(tmp_path: Path) -> None:
    result = check(tmp_path, {})
    assert result.returncode == 1
    assert "no includes found" in result.stderr
