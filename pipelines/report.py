"""The report: `reports/index.html` (one file, offline), `report.md`, the figures, and the table of the terminal.

    python -m pipelines.report
    python -m pipelines.report --check    # regenerate every table, compare it with what is there and with the ledger

Reads what the other stages left in `artifacts/` and `evaluations/`; trains and measures nothing itself.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from pipelines import accounts, controls, curves, looped_costs, looped_gates, looped_quality, sections
from pipelines.audit import audit
from pipelines.figures import DARK, PALETTE, Drawing
from pipelines.files import atomic_path, write_text
from pipelines.looped_results import Pair, load_pairs
from pipelines.recall_section import recall
from pipelines.results import ReportError, Result, comparable, imported, load_results, unevaluated
from pipelines.sections import Block, Section
from pipelines.tables import Table, words

TEMPLATES = Path(__file__).parent / "templates"
FIGURES = "figures"  # folder; the rest of `reports/` belongs to the ablation tables


@dataclass(frozen=True)
class Report:
    """What is written, whatever it is written as."""

    title: str
    lead: list[str]
    sections: list[Section]


def compose(results: Sequence[Result], pairs: Sequence[Pair]) -> list[Section]:
    """Every section, in reading order."""
    return [
        sections.headline(results, [*controls.findings(results), *looped_quality.findings(pairs)]),
        sections.context(results),
        controls.controls(results),
        curves.position(results),
        curves.training(results),
        recall(results),
        *(_melt(results, pairs) if pairs else []),
        accounts.costs(results),
        audit(results),
        accounts.limits(results),
        accounts.runs(results),
    ]


def _melt(results: Sequence[Result], pairs: Sequence[Pair]) -> list[Section]:
    """Students beside their teachers."""
    return [
        looped_quality.quality(results, pairs),
        looped_quality.loops(pairs),
        looped_gates.gates(pairs),
        looped_costs.memory(results, pairs),
        looped_costs.speed(results, pairs),
    ]


def run(artifacts: Path, evaluations: Path, output: Path) -> tuple[Table, Path]:
    """Write the report; returns the table of the terminal and the path of the page.

    Raises:
        ReportError: when there is nothing to report, or what there is does not fit together.
    """
    for folder in imported(artifacts, evaluations):
        print(f"left out: {folder} is of an imported model, whose training is unknown", file=sys.stderr)
    results, others = comparable(load_results(artifacts, evaluations))
    for result in others:
        print(
            f"left out: {evaluations / result.name} scored other windows or contexts than the rest; evaluate alike",
            file=sys.stderr,
        )
    pairs = load_pairs(results, artifacts, evaluations)
    report = Report(accounts.title(results), accounts.lead(results), compose(results, pairs))
    for drawing in (block for section in report.sections for block in section.blocks if isinstance(block, Drawing)):
        with atomic_path(output / FIGURES / f"{drawing.name}.png") as path:
            path.write_bytes(drawing.png())
        write_text(output / FIGURES / f"{drawing.name}.svg", drawing.svg())
    summary, page = sections.measures(results), output / "index.html"
    write_text(output / "report.md", markdown(report, f"{FIGURES}/"))
    write_text(output / "summary.txt", f"{summary.text()}\n{page}\n")
    write_text(page, html(report))
    return summary, page


def html(report: Report) -> str:
    """The page: no script, nothing fetched, figures inline, light or dark as the reader has it."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    environment.filters |= {"block": lambda block: Markup(_html(block)), "words": lambda text: Markup(words(text))}
    return environment.get_template("report.html.j2").render(report=report, light=PALETTE, dark=DARK) + "\n"


def markdown(report: Report, figures: str = "") -> str:
    """The same content as text, with the figures as PNG files beside it, their names after `figures`."""
    parts = [f"# {report.title}", *report.lead]
    for section in report.sections:
        parts += [f"## {section.title}", *(_markdown(block, figures) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def _html(block: Block) -> str:
    if isinstance(block, Table):
        return block.html()
    if isinstance(block, Drawing):
        return (
            f'<figure class="drawing"><div class="scroll">{block.inline()}</div>'
            f"<figcaption>{words(block.caption)}</figcaption></figure>"
        )
    if isinstance(block, tuple):
        return "<ul>" + "".join(f"<li>{words(item)}</li>" for item in block) + "</ul>"
    return f"<p>{words(block)}</p>"


def _markdown(block: Block, figures: str) -> str:
    if isinstance(block, Table):
        return block.markdown()
    if isinstance(block, Drawing):
        return f"![{block.alt}]({figures}{block.name}.png)\n\n*{block.caption}*"
    if isinstance(block, tuple):
        return "\n".join(f"- {item}" for item in block)
    return block


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.report", description="Write the report.")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"), help="folder of trained models")
    parser.add_argument("--evaluations", type=Path, default=Path("evaluations"), help="folder of evaluations")
    parser.add_argument("--output", type=Path, default=Path("reports"), help="folder to write to")
    parser.add_argument("--check", action="store_true", help="write nothing: is every ablation table still true?")
    options = parser.parse_args(arguments)
    if options.check:
        # by name: what checks the ablations is no part of the report, so a change to it makes no report stale
        return importlib.import_module("pipelines.sweeping.check").main(options.output / "ablations")
    try:
        summary, page = run(options.artifacts, options.evaluations, options.output)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    for path in unevaluated(options.artifacts, options.evaluations):
        print(f"left out: {path} is not evaluated: python -m pipelines.evaluate checkpoint={path}", file=sys.stderr)
    print(f"{summary.text()}\n{page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
