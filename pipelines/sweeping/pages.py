"""A table's folder: `data.json`, and from it `index.html`, `table.md`, `table.tex` and the figures."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.ablation_tables import latex
from pipelines.figures import Drawing
from pipelines.files import atomic_path, write_json, write_text
from pipelines.report import Report, html, markdown
from pipelines.sweeping.ablation import Ablation

ABLATIONS = Path("reports/ablations")
DATA = "data.json"


def write(ablation: Ablation, folder: Path) -> Path:
    """Write everything, `data.json` first; returns the page."""
    report = ablation.report()
    write_json(folder / DATA, ablation.dump())
    for name, text in texts(ablation, report).items():
        write_text(folder / name, text)
    for section in report.sections:
        for drawing in (block for block in section.blocks if isinstance(block, Drawing)):
            with atomic_path(folder / f"{drawing.name}.png") as path:
                path.write_bytes(drawing.png())
    return folder / "index.html"


def texts(ablation: Ablation, report: Report | None = None) -> dict[str, str]:
    """Every text file by name."""
    report = report or ablation.report()
    tables = [ablation.effects_table()] if ablation.sweep.verdicts else []
    tables += [ablation.measures_table(), *([ablation.claims_table()] if ablation.judgements else [])]
    return {
        "table.md": markdown(report),
        "table.tex": "\n".join(map(latex, tables)),
        "index.html": html(report),
    }


def read(folder: Path) -> Ablation:
    return Ablation.load(json.loads((folder / DATA).read_text("utf-8")))
