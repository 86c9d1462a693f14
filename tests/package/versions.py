"""Runs the tests on several versions of Python and torch, each in its own environment: `make versions`.

    python tests/package/versions.py python3.10:2.11.0 python3.13:none -- tests/python/distributed

An argument is an interpreter and a torch, or "none" for the planner alone, with the tests that need no torch. Arguments
after -- go to pytest, in place of the whole suite but for what runs on the simulated device, which is built for one
torch. Prints a row of a table for each; ends with 1 where one failed.
"""

from __future__ import annotations

import re
import subprocess
import sys

from wheels import ROOT, environment, run

PLANNER_TESTS = ["pytest", "pytest-timeout", "hypothesis"]
PLANNER_FILES = ["plan", "arguments"]


def check(python: str, torch: str, tests: list[str]) -> tuple[str, bool]:
    needs = PLANNER_TESTS if torch == "none" else [f"torch=={torch}", "--group", "test"]
    own = environment(ROOT / "build/versions", python)
    run(own, "-m", "pip", "install", "--quiet", "pip>=25.1")  # the first that knows --group
    run(own, "-m", "pip", "install", "--quiet", "--group", "build", *needs, cwd=ROOT)
    options = ["--config-settings", "cmake.define.KNAPFORMER_TORCH=OFF"] if torch == "none" else []
    run(own, "-m", "pip", "install", "--no-deps", "--no-build-isolation", ROOT, *options)
    arguments = [f"tests/python/test_{name}.py" for name in PLANNER_FILES] if torch == "none" else tests
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    version = run(own, "-c", "import platform; print(platform.python_version())").strip()
    summary = re.sub(r" in .*", "", done.stdout.strip().splitlines()[-1].strip("= "))
    if done.returncode != 0:
        print(done.stdout)
    return f"| {version} | {torch} | {summary} |", done.returncode == 0


def main() -> int:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    tests = given[cut + 1 :] or ["--ignore=tests/python/accelerator"]
    rows = [check(*versions.rsplit(":", 1), tests) for versions in given[:cut]]
    print("| Python | torch | tests |\n| --- | --- | --- |", *(row for row, _ in rows), sep="\n")
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
