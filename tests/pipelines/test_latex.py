"""`table.tex`: whatever a title, a cell or a failure is called, LaTeX reads it, with booktabs and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.ablation_tables import latex
from pipelines.outcomes import Outcome
from pipelines.sweeping import pages
from pipelines.sweeping.ablation import Ablation
from pipelines.tables import Cell, table
from tests.pipelines.test_sweep_table import made_up

NASTY = r"50 % & more_of #1 \end{table} $x^2$ ~ {a}[b] <c|d> −1 ± 2 ≤ 3 × 4 → é ﬁ “ü” · … 日 👍 "
NASTY_LINES = f"{NASTY}\n\n\\input{{x}}\ttab \x1b[0m"
COMMANDS = {
    *("begin", "end", "centering", "caption", "textbf", "toprule", "midrule", "bottomrule"),  # the last three: booktabs
    *("textbackslash", "textasciitilde", "textasciicircum"),
    *("pm", "leq", "geq", "times", "cdot", "rightarrow"),  # in mathematics
}
DOCUMENT = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n%s\\end{document}\n"


def nasty() -> Ablation:
    """A table whose title, source, claim and failures hold every special character."""
    ablation = made_up([0, 1.0, -1.0])
    failed = Outcome(ablation.table.cells[1], 0, "failed", reason=NASTY_LINES)
    kept = tuple(each for each in ablation.outcomes if (each.cell, each.seed) != (failed.cell, 0))
    claims = {name: {**claim, "says": NASTY} for name, claim in ablation.values["claims"].items()}
    values = ablation.values | {"title": NASTY, "source": NASTY, "claims": claims}
    return replace(ablation, values=values, outcomes=(*kept, failed))


TABLES = {
    "effects": lambda: made_up([0, 1.0, -1.0]),
    "two factors": lambda: made_up([0, 1.0, -1.0], sweep="hlr_cycles"),
    "many measures": lambda: made_up([0, 1.0], sweep="components"),
    "special characters": nasty,
}


@pytest.fixture(params=TABLES)
def text(request) -> str:
    return pages.texts(TABLES[request.param]())["table.tex"]


def test_its_structure_is_latex(text):
    assert_structure(text)


def test_any_text_anywhere_leaves_the_structure():
    for said in [*NASTY, NASTY, NASTY_LINES, *map(chr, range(128))]:
        cells = [said, Cell(said, strong=True)]
        assert_structure(latex(table(said, [said, said], [cells, cells], said)))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is missing: install texlive-latex-recommended")
def test_it_compiles(tmp_path):
    if subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).returncode:
        pytest.skip("LaTeX is here without booktabs: install texlive-latex-recommended")
    texts = "\n".join(pages.texts(make())["table.tex"] for make in TABLES.values())
    assert compiled(DOCUMENT % texts, tmp_path)


def assert_structure(text: str) -> None:
    """Balanced braces and environments, known commands, nothing special raw, as many cells as columns."""
    assert text.isascii()
    assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= COMMANDS
    environments: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{([a-z]+)\}", text):
        assert name in ("table", "tabular")
        if kind == "begin":
            environments.append(name)
        else:
            assert environments.pop() == name
    assert not environments
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        assert depth >= 0
    assert depth == 0
    said = re.sub(r"\$\\?[A-Za-z<>|-]+\$|\\[&%$#_{}\\]", "", text)  # without mathematics and what is escaped
    assert not set(said) & set("%$#_~^<>|")
    assert not re.search(r"\\\\\s*[\[*]", text), "it is read as an argument of the line break"
    assert text.count("\\caption{") == len(re.findall(r"\\caption\{.*\}\n\\begin\{tabular\}", text)), "of one paragraph"
    for form, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.splitlines() if line not in (r"\toprule", r"\midrule", r"\bottomrule")]
        assert all(line.endswith(r" \\") for line in lines)
        assert all(len(re.findall(r"(?<!\\)&", line)) == len(form) - 1 for line in lines)


def compiled(document: str, folder: Path) -> bool:
    (folder / "table.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    return (folder / "table.pdf").stat().st_size > 0
