"""Identities: equal things have equal digests, different things different ones, unknown things none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

import pytest

from models.families import FAMILIES
from pipelines.identity import PACKAGES, PROJECT, canonical, code_digest, commit, fingerprint, import_closure
from pipelines.sweeping.plan import modules_of


def test_the_canonical_form_is_independent_of_order_and_layout():
    assert canonical({"b": (1, 2.5, None), "a": {"y": True, "x": "é"}}) == canonical(
        {"a": {"x": "é", "y": True}, "b": [1, 2.5, None]}
    )
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of "{}"


@pytest.mark.parametrize(("one", "two"), [(1, 1.0), (1, True), (None, "None"), ("1", 1), ([1, 2], [2, 1])])
def test_values_that_differ_have_different_forms(one, two):
    assert canonical({"x": one}) != canonical({"x": two})


class Subclass(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        pytest.param(object(), id="object"),
        len,
        {1, 2},
        b"x",
        Subclass("x"),
        {1: 2},
        PROJECT,
    ],
    ids=repr,
)
def test_what_is_not_known_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"model\.x\[0\]"):
        canonical({"model": {"x": [value]}})


@pytest.fixture
def project(tmp_path):
    """`pipelines.stage` uses `models.family`, and `models.family` a part; a bystander is used by nobody."""
    sources = {
        "models/__init__.py": "",
        "models/family.py": '"""Doc."""\nfrom models import part\n\n\ndef f(x):\n    """Doc."""\n    return part.g(x)',
        "models/part.py": "def g(x):\n    return x + 1\n",
        "models/bystander.py": "",
        "pipelines/__init__.py": "",
        "pipelines/deep/__init__.py": "from .leaf import value\n",
        "pipelines/deep/leaf.py": "value = 1\n",
        "pipelines/command.py": "",
        "pipelines/stage.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from models import bystander\n"
            "def run():\n    import models.family\n    from pipelines.deep import value\n"
            'if __name__ == "__main__":\n    from pipelines.command import main\n'
        ),
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_closure_follows_every_import_inside_the_project(project):
    assert list(import_closure(["pipelines.stage"], project)) == [
        "models",
        "models.family",
        "models.part",
        "pipelines",
        "pipelines.deep",
        "pipelines.deep.leaf",
        "pipelines.stage",
    ]
    with pytest.raises(ValueError, match=r"models\.absent is no module"):
        import_closure(["models.absent"], project)


def test_what_a_command_imports_is_followed_only_for_the_command(project):
    imported, command = (set(import_closure(["pipelines.stage"], project, main)) for main in (False, True))
    assert command - imported == {"pipelines.command"}
    (project / "pipelines" / "other.py").write_text("import pipelines.stage\n")
    assert "pipelines.command" not in import_closure(["pipelines.other"], project, main=True)


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        ("models/family.py", '"""Doc."""', '"""Another."""', True),
        ("models/part.py", "return x + 1", "return (x  +  1)  # comment", True),
        ("models/bystander.py", "", "x = 1", True),
        ("pipelines/stage.py", "import bystander", "import another", True),
        ("pipelines/stage.py", "import main", "import other", True),
        ("models/part.py", "x + 1", "x + 2", False),
        ("pipelines/deep/leaf.py", "1", "'1'", False),
    ],
)
def test_the_code_digest_follows_what_runs(project, file, old, new, same):
    before = code_digest(["pipelines.stage"], project)
    (project / file).write_text((project / file).read_text().replace(old, new))
    assert (code_digest(["pipelines.stage"], project) == before) is same


def test_a_family_is_part_of_a_digest_only_when_named():
    assert "models.transformer" not in import_closure(["pipelines.pretrain"])
    assert "models.looped.melt" not in import_closure(["pipelines.pretrain", "models.transformer"])


@pytest.fixture
def copy(tmp_path):
    """The project's own sources."""
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("models/presets.py", '"mela_tiny": ("mela", {})', '"mela_new": ("mela", {}), "mela_tiny": ("mela", {})', []),
        ("models/mela/mela.py", "from __future__", "# a comment\nfrom __future__", []),
        ("pipelines/command.py", "def main(", "def principal(", []),
        ("models/mela/mela.py", "class Mela(", "class Male(", ["mela"]),
        ("models/layers.py", "class RMSNorm(", "class Norm(", ["transformer", "mela", "looplm", "melt"]),
    ],
)
def test_an_edit_makes_the_cells_stale_that_run_it(copy, file, old, new, stale):
    text = (copy / file).read_text("utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), "utf-8")
    edited = codes(copy)
    assert [family for family in FAMILIES if edited[family] != codes(PROJECT)[family]] == stale


@cache
def codes(root):
    return {family: code_digest(modules_of("pretrain", family), root) for family in FAMILIES}


def test_command_lists_files():
    command = [sys.executable, "-m", "pipelines.identity", "pipelines.identity"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.split()
    assert listed == ["pipelines/__init__.py", "pipelines/identity.py"]


def test_the_commit_and_whether_code_differs_from_it(project):
    assert (commit(project).sha, commit(project).dirty) == ("none", True)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *arguments], cwd=project, check=True)
    assert len(commit(project).sha) == 40
    assert not commit(project).dirty
    (project / "notes.txt").write_text("not code")
    assert not commit(project).dirty
    (project / "models" / "new.py").write_text("")
    assert commit(project).dirty
