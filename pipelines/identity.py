"""What a result was made from: canonical values, the code that runs, the commit.

    python -m pipelines.identity pipelines.pretrain models.transformer    # the files these commands and modules run

Special here:
- the encoder **raises** on anything it does not know, so that nothing enters an identity by its `repr`;
- code is known by its content: the import closure inside this project, without comments, docstrings and layout, and
  without what only a type checker reads or only the command line runs.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "pipelines")  # the project's own; libraries are known by the pinned versions


def fingerprint(value: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of plain values, in hex: the same in every process and on every machine.

    Raises:
        TypeError: for a value that is not None, bool, int, str, a finite float, or a list or mapping of those.
    """
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces; tuples are lists, 1.0 and 1 differ. Raises as `fingerprint` does."""
    return json.dumps(_plain(value, ""), sort_keys=True, separators=(",", ":"), allow_nan=False)


def import_closure(modules: Iterable[str], root: Path = PROJECT, main: bool = False) -> dict[str, Path]:
    """The project's modules that running `modules` imports, themselves included: dotted name -> file, sorted.

    Imports are read from the source, wherever they stand, but for those under `if TYPE_CHECKING:`; modules named by a
    string are not followed: list them.

    Args:
        main: `modules` are run as commands, with what stands under `if __name__ == "__main__":`.
    Raises:
        ValueError: for a module that is not a file of the project.
    """
    found: dict[str, Path] = {}
    waiting = list(modules)
    commands = set(waiting) if main else set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        file = _module_file(name, root)
        if file is None:
            raise ValueError(f"{name} is no module of {', '.join(PACKAGES)} in {root}")
        found[name] = file
        imported = _imports(file.read_text("utf-8"), name, file.name == "__init__.py", name in commands)
        waiting += [each for each in (name.rpartition(".")[0], *imported) if _module_file(each, root)]
    return dict(sorted(found.items()))


def code_digest(modules: Iterable[str], root: Path = PROJECT) -> str:
    """SHA-256 over the import closure of `modules`, as far as importing them runs it.

    Comments, docstrings, layout, and blocks under `if TYPE_CHECKING:` or `if __name__ == "__main__":` do not change it.
    """
    return fingerprint(
        {name: _meaning(file.read_text("utf-8")) for name, file in import_closure(modules, root).items()}
    )


@dataclass(frozen=True)
class Commit:
    """The commit the project is at (`"none"` outside git), and whether code or parameters differ from it."""

    sha: str
    dirty: bool


def commit(root: Path = PROJECT) -> Commit:
    """The state of the source tree in git."""
    sha = _git("rev-parse", "HEAD", root=root).strip()
    changed = _git("status", "--porcelain", "--", *PACKAGES, "params.yaml", root=root).strip()
    return Commit(sha, bool(changed)) if sha else Commit("none", True)


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where.lstrip('.') or 'value'}={value!r} ({type(value).__name__}) has no canonical form")


@cache
def _module_file(name: str, root: Path) -> Path | None:
    if name.split(".")[0] not in PACKAGES:
        return None
    path = root.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def _tree(source: str, main: bool = False) -> ast.Module:
    """The syntax tree of what runs: when the source is imported, or as a command (`main`)."""
    return _Running(main).visit(ast.parse(source))


class _Running(ast.NodeTransformer):
    """Leaves out the blocks that do not run."""

    def __init__(self, main: bool) -> None:
        self._left_out = {"TYPE_CHECKING"} if main else {"TYPE_CHECKING", "__name__ == '__main__'"}

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) in self._left_out else node


@cache
def _imports(source: str, module: str, is_package: bool, main: bool) -> list[str]:
    """Every dotted name an import statement may load; `from a import b` loads `a` and perhaps `a.b`."""
    package, found = module if is_package else module.rpartition(".")[0], []
    for node in ast.walk(_tree(source, main)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return found


@cache
def _meaning(source: str) -> str:
    """The source as the compiler sees it: reprinted from its syntax tree, without docstrings."""
    tree = _tree(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[0] = ast.Pass()
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(*command: str, root: Path) -> str:
    try:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:  # git is not installed
        return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pipelines.identity", description="List the files modules run.")
    parser.add_argument("modules", nargs="+", help="dotted names, such as pipelines.pretrain")
    try:
        files = import_closure(parser.parse_args().modules, main=True)
    except ValueError as error:
        parser.error(str(error))
    for path in files.values():
        print(path.relative_to(PROJECT).as_posix())
