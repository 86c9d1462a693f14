"""Pages of the site that stand elsewhere or are made: the README as the first page, its neighbours, and the references.

A hook of mkdocs (mkdocs.yml). Pages link to sources of the project; on the site a header is in the reference, and any
other file is copied. A link to what does not exist fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {page: page for page in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_linked(ROOT / source, page, files, config)))
    for layer in ("core", "torch"):
        files.append(File.generated(config, f"reference/{layer}.md", content=_headers(layer)))
    files.append(File.generated(config, "reference/python.md", content=_python()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return (
        markdown
        if page.file.generated_by
        else _linked(ROOT / "docs" / page.file.src_uri, page.file.src_uri, files, config)
    )


def _linked(source: Path, page: str, files: Files, config: Any) -> str:
    """The text of a page, with links as the site has them."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = (source.parent / target).resolve()
        if not path.exists():
            raise PluginError(f"{source.relative_to(ROOT)}: a link to {target}, which does not exist")
        at = path.relative_to(ROOT).as_posix()
        if at in PAGES.values():
            to = next(name for name, of in PAGES.items() if of == at)
        elif at.startswith("docs/"):
            to = at.removeprefix("docs/")
        elif path.suffix == ".h":
            layer = at.split("/")[1]
            to, anchor = f"reference/{layer}.md", "#" + _anchor(at)
        elif path.is_dir():
            return words  # a folder of the checkout
        else:
            to = f"source/{at}.txt"
            if files.get_file_from_path(to) is None:
                files.append(File.generated(config, to, content=path.read_text()))
        return f"[{words}]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```)", source.read_text(), flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):  # outside of code
        parts[i] = re.sub(r"(?<!`)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", link, parts[i])
    return "".join(parts)


def _anchor(header: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", header.removeprefix("knapformer/"))


def _headers(layer: str) -> str:
    """Every public header of a layer: what it is for, and all of it."""
    text = [f"# C++: knapformer::{layer}\n", "The headers, as they are installed. See [From C++](../cpp.md).\n"]
    for path in sorted((ROOT / "knapformer" / layer).rglob("*.h")):
        lines = path.read_text().splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
        opening = "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines[:end])
        code = "\n".join(lines[end:]).replace("#pragma once\n", "").strip()
        name = path.relative_to(ROOT).as_posix()
        text.append(f"## {name} {{ #{_anchor(name)} }}\n\n```text\n{opening}\n```\n\n```cpp\n{code}\n```\n")
    return "\n".join(text)


def _python() -> str:
    """Everything in knapformer.__all__, which is what is public, and the modules beside it."""
    tree = ast.parse((ROOT / "python/knapformer/__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    text = [
        "# Python: knapformer\n",
        "What `import knapformer` gives. See [what is public](../guarantees.md#what-is-public).\n",
    ]
    text += [f"::: knapformer.{name}\n" for name in names]
    for module in ("losses", "checkpointing", "models"):
        text.append(
            f"## knapformer.{module}\n\n::: knapformer.{module}\n    options:\n      show_root_heading: false\n"
        )
    return "\n".join(text)
